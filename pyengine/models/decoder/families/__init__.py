"""The table of families that run in pyengine's decoders, by `model_type`."""

from collections.abc import Mapping
from types import MappingProxyType

from pyengine.models.decoder.families import (
    classic,
    delta,
    dense,
    experts,
    gemma,
    latent,
    lfm2,
    mamba,
    mixed,
    sigmoid_experts,
)
from pyengine.models.decoder.families.parts import NEUTRAL, NO_EFFECT, Family

_FILES = (
    dense,
    mixed,
    gemma,
    classic,
    experts,
    sigmoid_experts,
    latent,
    delta,
    mamba,
    lfm2,
)

TABLE: Mapping[str, Family] = MappingProxyType(
    {family.model_type: family for file in _FILES for family in file.FAMILIES}
)
"""Families by the `model_type` of their configurations."""

__all__ = ["NEUTRAL", "NO_EFFECT", "TABLE", "Family"]
