"""Adapters of linear layers on the CPU: see `adapters`."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pyengine.cpu import CpuAttention, add_adapters
from pyengine.models.adapters import AdapterLimits, Floats, Matrices
from pyengine.utils.dtypes import Rows, rounded


class CpuAdapterTable:
    """See `AdapterTable`. One kernel adds those of all slots.

    Matrices have the dtype of rows: float32, or bfloat16, two in a uint32. See `add_adapters`.
    """

    def __init__(
        self,
        threads: CpuAttention,
        ends: Sequence[int],
        inputs: int,
        limits: AdapterLimits,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        slots, rank, lanes = limits.max_loras, limits.max_rank, -(-limits.max_rank // 16) * 16
        self._threads = threads
        self._ends = np.array(ends, np.int64)
        self._pack = _pairs if dtype == "bfloat16" else _floats
        kind, count = (np.uint32, 2) if dtype == "bfloat16" else (np.float32, 1)
        # Pages of zeros take memory when they are written.
        self._down: npt.NDArray[Any] = np.zeros(
            (slots, -(-inputs // count), len(ends), lanes), kind
        )
        self._up: npt.NDArray[Any] = np.zeros((slots, -(-rank // count), ends[-1]), kind)
        self._ranks = np.zeros((slots, len(ends)), np.int32)
        self._is_used = False

    def write(self, slot: int, parts: Mapping[int, Matrices]) -> None:
        """See `AdapterTable.write`."""
        self._ranks[slot] = 0
        for part, (first, second) in parts.items():
            down, up = self._pack(first.T), self._pack(second.T)
            start = self._ends[part - 1] if part else 0
            self._down[slot, :, part, : len(first)] = down
            self._up[slot, : len(up), start : self._ends[part]] = up
            self._ranks[slot, part] = len(first)
        self._is_used = bool(self._ranks.any())

    def add(self, result: Rows, rows: Rows, slots: npt.NDArray[np.int32]) -> Rows:
        """See `AdapterTable.add`."""
        if not self._is_used:
            return result
        result = np.require(result, requirements=["C", "W"])
        tables = self._down, self._up, self._ranks, self._ends
        add_adapters(self._threads, rows, result, slots, *tables)
        return result


def _floats(matrix: Floats) -> Floats:
    return matrix


def _pairs(matrix: Floats) -> npt.NDArray[np.uint32]:
    """Two rows in one, in bfloat16: the first of them in the lower halves."""
    rows = np.zeros((len(matrix) + len(matrix) % 2, matrix.shape[1]), np.uint32)
    rows[: len(matrix)] = rounded(matrix, np.uint16)
    pairs: npt.NDArray[np.uint32] = rows[::2] | rows[1::2] << np.uint32(16)
    return pairs
