"""Adapters of linear layers on the CPU: see `adapters`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.cpu import CpuAttention, add_adapters
from pyengine.models.adapters import AdapterLimits, Matrices
from pyengine.utils.dtypes import Rows, rounded, widened


class CpuAdapterTable:
    """See `AdapterTable`. Matrices are float32; one kernel adds those of all slots."""

    def __init__(
        self, threads: CpuAttention, ends: Sequence[int], inputs: int, limits: AdapterLimits
    ) -> None:
        slots, rank = limits.max_loras, limits.max_rank
        self._threads = threads
        self._ends = np.array(ends, np.int64)
        # Pages of zeros take memory when they are written.
        self._down = np.zeros((slots, len(ends), rank, inputs), np.float32)
        self._up = np.zeros((slots, rank, ends[-1]), np.float32)
        self._ranks = np.zeros((slots, len(ends)), np.int32)
        self._is_used = False

    def write(self, slot: int, parts: Mapping[int, Matrices]) -> None:
        """See `AdapterTable.write`."""
        self._ranks[slot] = 0
        for part, (first, second) in parts.items():
            rank = len(first)
            start = self._ends[part - 1] if part else 0
            self._down[slot, part, :rank] = first
            self._up[slot, :rank, start : self._ends[part]] = second.T
            self._ranks[slot, part] = rank
        self._is_used = bool(self._ranks.any())

    def add(self, result: Rows, rows: Rows, slots: npt.NDArray[np.int32]) -> Rows:
        """See `AdapterTable.add`."""
        if not self._is_used:
            return result
        result = np.require(result, requirements=["C", "W"])
        tables = self._down, self._up, self._ranks, self._ends
        add_adapters(self._threads, rows, result, slots, *tables)
        return result


class NumpyAdapterTable(CpuAdapterTable):
    """The same, adapter by adapter: the oracle of the kernel."""

    def add(self, result: Rows, rows: Rows, slots: npt.NDArray[np.int32]) -> Rows:
        """See `AdapterTable.add`."""
        sums: npt.NDArray[Any] = widened(result).copy()
        for slot in np.unique(slots[slots >= 0]):
            own, start = slots == slot, 0
            for part, end in enumerate(self._ends):
                rank = self._ranks[slot, part]
                latent = widened(rows[own]) @ self._down[slot, part, :rank].T
                sums[own, start:end] += latent @ self._up[slot, :rank, start:end]
                start = int(end)
        return rounded(sums, result.dtype.type)
