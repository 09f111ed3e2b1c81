"""The table of families that run in pyengine's decoders, by `model_type`."""

from collections.abc import Mapping
from types import MappingProxyType

from pyengine.models.decoder.families import (
    classic,
    dense,
    experts,
    gemma,
    latent,
    mixed,
    sigmoid_experts,
)
from pyengine.models.decoder.families.parts import NEUTRAL, NO_EFFECT, Family

TABLE: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for file in (dense, mixed, gemma, classic, experts, sigmoid_experts, latent)
        for family in file.FAMILIES
    }
)
"""Families by the `model_type` of their configurations."""

__all__ = ["NEUTRAL", "NO_EFFECT", "TABLE", "Family"]
