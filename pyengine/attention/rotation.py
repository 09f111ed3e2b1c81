"""Queries and keys as attention wants them: normalised, and turned by their positions.

Models do so before they attend. Where a layer leaves it to us (`own_rotation`), it is done with
the KV write: on CUDA by one kernel (`rotation_kernel`), on CPUs by that which attends, elsewhere by
what is here, which is their oracle. All compute in float32 and round once.
"""

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """A root-mean-square norm over each head: `x / rms(x) * (offset + weight)`.

    `query_weight` and `key_weight` are `[head_dim]`; `eps` is added under the root. `offset` is 1
    where weights are kept as differences from 1 (Gemma), else 0.
    """

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float
    offset: float


@dataclass(frozen=True, slots=True)
class RotaryLayout:
    """Which numbers of a head are turned together (RoPE, arXiv 2104.09864).

    The first `size` numbers of a head are: number i with `i + size / 2` ("halves", as in
    GPT-NeoX), or 2 i with 2 i + 1 ("pairs"). Pair i has the angle in column `i * step`.
    """

    size: int
    order: Literal["halves", "pairs"]
    step: int


@dataclass(frozen=True, slots=True)
class Rotation:
    """What a layer leaves to attention; `cos` and `sin` are `[T, columns]`, of any float type."""

    cos: torch.Tensor
    sin: torch.Tensor
    layout: RotaryLayout
    norm: HeadNorm | None = None


def rotated(
    query: torch.Tensor, key: torch.Tensor, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """`query` `[T, query_heads, d]` and `key` `[T, kv_heads, d]`, normalised first, then turned."""
    norm = rotation.norm
    weights = (None, None) if norm is None else (norm.query_weight, norm.key_weight)
    turned = [_turned(*one, rotation) for one in zip((query, key), weights, strict=True)]
    return turned[0], turned[1]


def _turned(rows: torch.Tensor, weight: torch.Tensor | None, rotation: Rotation) -> torch.Tensor:
    found, layout, norm = rows.float(), rotation.layout, rotation.norm
    if norm is not None and weight is not None:
        found = found * torch.rsqrt(found.square().mean(-1, keepdim=True) + norm.eps)
        found = found * (norm.offset + weight.float())
    half, lead = layout.size // 2, found.shape[:-1]
    shape, axis = ((2, half), -2) if layout.order == "halves" else ((half, 2), -1)
    first, second = found[..., : layout.size].reshape(*lead, *shape).unbind(axis)
    cos, sin = (
        one.float()[:, None, : half * layout.step : layout.step]
        for one in (rotation.cos, rotation.sin)
    )
    parts = [first * cos - second * sin, second * cos + first * sin]
    turned = torch.stack(parts, axis).flatten(-2)
    return torch.cat([turned, found[..., layout.size :]], -1).to(rows.dtype)
