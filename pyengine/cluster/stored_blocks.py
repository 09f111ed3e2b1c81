"""The blocks that replicas can restore from the folders that they share."""

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from pyengine.cluster.messages import ReplicaInfo
from pyengine.kv_cache import ReplicaIndex

_HASH_BYTES = 16
_STORED = 1


class StoredBlocks:
    """The blocks in each shared folder, by the events of the replica that writes to it.

    A block that this replica has cached counts as stored, and still does once it is evicted from
    the pool. Above the number of blocks that the folder holds, only the blocks in the pool count.
    It is an estimate: short prompts are not stored, and the folder evicts by another order.
    """

    def __init__(self, index: ReplicaIndex) -> None:
        """`index` is an empty one, with the format of the replicas."""
        self._index = index
        self._bits: dict[str, int] = {}
        self._users: Counter[str] = Counter()

    def join(self, info: ReplicaInfo) -> None:
        """Add a replica, which may share a folder."""
        if info.store is None:
            return
        folder = info.store.folder
        self._users[folder] += 1
        if folder not in self._bits:
            used = set(self._bits.values())
            self._bits[folder] = next(bit for bit in range(len(used) + 1) if bit not in used)

    def leave(self, info: ReplicaInfo) -> None:
        """Remove a replica that was added. The folder of the last one is dropped."""
        if info.store is None:
            return
        folder = info.store.folder
        self._users[folder] -= 1
        if not self._users[folder]:
            del self._users[folder]
            self._index.clear(self._bits.pop(folder))

    def apply(
        self, info: ReplicaInfo, kinds: bytes, hashes: bytes, cached: Callable[[], Iterable[bytes]]
    ) -> None:
        """Apply events of a replica. `cached` returns the hashes in its pool."""
        store = info.store
        if store is None or not store.is_writer:
            return
        is_stored = np.frombuffer(kinds, dtype=np.uint8) == _STORED
        stored = np.frombuffer(hashes, dtype=np.uint8).reshape(-1, _HASH_BYTES)[is_stored]
        bit = self._bits[store.folder]
        # With twice the pool, this happens once in as many events as the pool has blocks.
        if self._add(bit, stored.tobytes()) > max(store.num_blocks, 2 * info.num_blocks):
            self._index.clear(bit)
            self._add(bit, b"".join(cached()))

    def _add(self, bit: int, hashes: bytes) -> int:
        """Add blocks to a folder; the number of blocks that it has then."""
        return self._index.apply(bit, bytes([_STORED]) * (len(hashes) // _HASH_BYTES), hashes)

    def matched_blocks(self, hashes: bytes) -> dict[str, int]:
        """The number of leading blocks of a prompt that each folder has."""
        if not self._bits:
            return {}
        matched = self._index.matched_blocks(hashes)
        return {folder: matched[bit] for folder, bit in self._bits.items() if bit < len(matched)}
