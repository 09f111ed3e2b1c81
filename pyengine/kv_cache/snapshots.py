"""Snapshots of states: their bytes, in ordinary blocks of the KV pool.

A state takes the bytes of a block in all tensors, then those of the next block::

    state    |........................|
    blocks   |  block 7  |  block 3  |##|      as many as the block manager has given it
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pyengine.kv_cache.pool_memory import PoolMemory
from pyengine.kv_cache.states import StatePool


class Snapshots:
    """Copies of states in blocks of a pool, whose `memory` has `num_blocks` of them."""

    def __init__(self, states: StatePool, memory: PoolMemory, num_blocks: int) -> None:
        self.states, self._memory = states, memory
        self._written = np.zeros(num_blocks, np.bool_)
        """The blocks that have had a snapshot since keys and values were last written to them."""

    @property
    def num_blocks(self) -> int:
        """Blocks of a snapshot."""
        return -(-self.states.bytes_per_slot // self._memory.block_bytes)

    def save(self, slot: int, blocks: Sequence[int]) -> None:
        """Copy a state to blocks."""
        self._memory.write_bytes(blocks, self.states.bytes_of(slot))
        self._written[blocks] = True

    def load(self, slot: int, blocks: Sequence[int]) -> None:
        """Copy a state back, as `save` has written it."""
        self.states.write_bytes(slot, self._memory.bytes_of(blocks)[: self.states.bytes_per_slot])

    def loading(self, blocks: Sequence[int]) -> None:
        """Blocks are about to be read from a store: they may have anything until then."""
        self._written[blocks] = True

    def clear(self, blocks: npt.NDArray[np.int64]) -> None:
        """Zero those of these blocks that have had a snapshot: keys and values come into them.

        Attention multiplies values that are masked by zero, and the bytes of a state may be NaN.
        """
        written = blocks[self._written[blocks]]
        if len(written):
            self._memory.zero(np.unique(written).tolist())
            self._written[written] = False

    def overwritten(self, blocks: Sequence[int]) -> None:
        """Forget the snapshots of blocks that whole blocks of keys and values have replaced."""
        self._written[blocks] = False
