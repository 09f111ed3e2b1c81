"""Block tables and slots of layers that share a tensor, from those of their groups.

A block of the tensor has `parts` layers side by side (`layer_groups`). A layer sees the tensor with
as many times the blocks, of which block b of its group is `b * parts + part`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.kv_cache.layer_groups import Table


class PartTables:
    """The tables and slots of a step for each of `tables`."""

    def __init__(self, tables: Sequence[Table], block_size: int) -> None:
        self._groups = np.array([table.group for table in tables])
        self._parts = np.array([[table.parts] for table in tables], np.int32)
        self._part = np.array([[table.part] for table in tables], np.int32)
        self._block_size = block_size

    def block_tables(self, of_groups: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """`[tables, B, W]` from `[groups, B, W]`."""
        blocks: npt.NDArray[np.int32] = of_groups[self._groups]
        blocks *= self._parts[..., None]
        blocks += self._part[..., None]
        return blocks

    def slots(self, of_groups: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`[tables, T]` from `[groups, T]`; -1 stays -1."""
        slots: npt.NDArray[np.int64] = of_groups[self._groups]
        blocks = slots // self._block_size
        moved = (blocks * (self._parts - 1) + self._part) * self._block_size
        slots += np.where(slots < 0, 0, moved)
        return slots

    def blocks(self, block: int) -> npt.NDArray[Any]:
        """One block of any group in each table: `[tables, 1]`."""
        return block * self._parts + self._part
