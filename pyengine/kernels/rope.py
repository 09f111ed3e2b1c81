"""The rotation of queries and keys that a layer leaves to attention, as plain data."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """A root-mean-square norm over each head: `x / rms(x) * (offset + weight)`.

    `query_weight` and `key_weight` are `[head_dim]`; `eps` is added under the root. `offset` is 1
    where weights are kept as differences from 1 (Gemma), else 0.
    """

    query_weight: "torch.Tensor"
    key_weight: "torch.Tensor"
    eps: float
    offset: float


@dataclass(frozen=True, slots=True)
class RotaryLayout:
    """The pairs of numbers in a head that RoPE rotates together (arXiv 2104.09864).

    The first `size` numbers of a head are: number i with `i + size / 2` ("halves", as in
    GPT-NeoX), or 2 i with 2 i + 1 ("pairs"). Pair i has the angle in column `i * step`.
    """

    size: int
    order: Literal["halves", "pairs"]
    step: int


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation that a layer leaves to attention; `cos`, `sin` are floats `[T, columns]`."""

    cos: "torch.Tensor"
    sin: "torch.Tensor"
    layout: RotaryLayout
    norm: HeadNorm | None = None
