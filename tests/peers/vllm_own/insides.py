"""Structures of vLLM that its tests read, as read-only views over ours.

Only for those tests: they look at a request's blocks and at the free blocks by the names of vLLM's
coordinator and pool.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True, slots=True)
class GroupView:
    """A single-type manager: `req_to_blocks` and `num_cached_block`."""

    manager: Any
    index: int
    block_size: int
    kv_cache_spec: Any

    @property
    def req_to_blocks(self) -> dict[str, list["PoolBlock"]]:
        """The blocks of each request."""
        pool = self.manager.block_pool.blocks
        names = self.manager.tables.entries
        ids = {name: self.manager.get_block_ids(name)[self.index] for name in names}
        return {name: [pool[block] for block in blocks] for name, blocks in ids.items()}

    @property
    def _null_block(self) -> "PoolBlock":
        """The block that stands for those that a window has passed."""
        null: PoolBlock = self.manager.block_pool.null_block
        return null

    @property
    def num_cached_block(self) -> dict[str, int]:
        """The number of registered blocks of each request."""
        rows = self.manager.tables.entries
        return {name: self.manager.get_blocks(name).num_cached for name in rows}


class PoolBlock:
    """A block of the pool as it is when it is read. The null block has no reference."""

    def __init__(self, block_id: int, tables: Any) -> None:
        self.block_id = block_id
        self.is_null = block_id == 0
        self._kv = tables.kv
        self._kv_id = block_id - tables.offset

    @property
    def ref_cnt(self) -> int:
        """References of requests and pins."""
        return 0 if self.is_null else self._kv.refs(self._kv_id)

    @property
    def block_hash(self) -> bytes | None:
        """None if the block is not in the index."""
        nodes = memoryview(self._kv.snapshot().nodes).cast("I")
        return b"registered" if not self.is_null and nodes[self._kv_id] else None

    _block_hash = block_hash

    def __eq__(self, other: object) -> bool:
        return self.block_id == getattr(other, "block_id", None)

    def __hash__(self) -> int:
        return self.block_id


class PoolView:
    """A block pool: `blocks`, `free_block_queue` and `cached_block_hash_to_block`."""

    def __init__(self, manager: Any) -> None:
        self._tables = manager.tables
        self._pool = manager.block_pool
        self.num_gpu_blocks = self._tables.num_blocks
        self.null_block = PoolBlock(0, self._tables)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    @property
    def blocks(self) -> list[PoolBlock]:
        """All blocks."""
        others = (PoolBlock(block, self._tables) for block in range(1, self.num_gpu_blocks))
        return [self.null_block, *others]

    @property
    def free_block_queue(self) -> Any:
        """The number of free blocks."""
        return SimpleNamespace(num_free_blocks=self._pool.get_num_free_blocks())

    @property
    def cached_block_hash_to_block(self) -> list[bytes]:
        """The hashes of the registered blocks."""
        hashes: list[bytes] = self._tables.kv.cached_hashes()
        return hashes


def show(manager: Any) -> None:
    """Put the views in place."""
    views = tuple(
        GroupView(manager, index, group.block_size, group.kv_cache_spec)
        for index, group in enumerate(manager.coordinator.single_type_managers)
    )
    manager.coordinator = type(manager.coordinator)(views, manager.tables)
    manager.block_pool = PoolView(manager)
