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

TABLE: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for file in (dense, mixed, gemma, classic, experts, sigmoid_experts, latent)
        for family in file.FAMILIES
    }
)
"""Families by the `model_type` of their configurations."""

RECURRENT: Mapping[str, Family] = MappingProxyType(
    {family.model_type: family for file in (delta, mamba, lfm2) for family in file.FAMILIES}
)
"""Families that keep states, which the engine does not run: decoders alone are built of them."""

__all__ = ["NEUTRAL", "NO_EFFECT", "RECURRENT", "TABLE", "Family"]
