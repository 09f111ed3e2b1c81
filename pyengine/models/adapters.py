"""Low-rank adapters of linear layers (LoRA, Hu et al., 2021, arXiv:2106.09685) as data.

A row `x` of a linear layer gives `W x + B A x`, where B is scaled already.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Matrices: TypeAlias = tuple[Floats, Floats]
"""A `[rank, inputs]` and B `[outputs, rank]`, scaled."""

NO_SLOT = -1
"""The slot of tokens that no adapter changes."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """The slots for adapters in one step, and the largest rank."""

    max_loras: int
    max_rank: int


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The content of an adapter, whatever its name.

    `matrices` are those of linear layers, by the names of transformers' modules. An activated LoRA
    (Greenewald et al., 2025, arXiv:2504.12397) changes tokens from the last occurrence of its
    `invocation_tokens` in the prompt on.
    """

    matrices: Mapping[str, Matrices]
    invocation_tokens: tuple[int, ...] | None = None
    digest: bytes = field(init=False)
    """32 bytes, equal for equal content."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", _digest(self.matrices, self.invocation_tokens))

    def start(self, token_ids: Sequence[int]) -> int | None:
        """The position of the first token that it changes in a prompt; None: it changes none."""
        if self.invocation_tokens is None:
            return 0
        tokens, wanted = np.asarray(token_ids, np.int64), np.array(self.invocation_tokens, np.int64)
        if len(tokens) < len(wanted):
            return None
        windows = np.lib.stride_tricks.sliding_window_view(tokens, len(wanted))
        found = np.flatnonzero((windows == wanted).all(axis=1))
        return int(found[-1]) if len(found) else None


def _digest(matrices: Mapping[str, Matrices], tokens: tuple[int, ...] | None) -> bytes:
    content = blake2b(digest_size=32, person=b"pyengine LoRA")
    for name in sorted(matrices):
        for matrix in matrices[name]:
            content.update(f"{len(name)} {name} {matrix.shape} ".encode())
            content.update(np.ascontiguousarray(matrix, "<f4").data)
    content.update(f"{tokens}".encode())
    return content.digest()


@dataclass(frozen=True, slots=True, eq=False)
class AppliedAdapter:
    """An adapter as a request has it: it changes the tokens from position `start` on."""

    adapter: Adapter
    start: int = 0


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of a step: the slot of each token, int32 `[T]`, and what the slots have.

    Slots without tokens in this step are left out.
    """

    slots: npt.NDArray[np.int32]
    contents: Mapping[int, Adapter]
