"""The memory of a pool's blocks, from and to which a store copies.

On the CPU a store reads and writes the pool itself, `HostBlocks`. On a device blocks pass through
pinned staging memory, `DeviceBlocks`:

    store: device -> [copy stream] -> staging -> store
    load:  store -> staging -> [copy stream, after the steps queued before] -> device
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from pyengine._kv import KVBlocks, StoredPrefix, StoreError
from pyengine.utils.host_copy import upload
from pyengine.utils.tensors import array_of

if TYPE_CHECKING:
    import torch

Block: TypeAlias = tuple[int, int, int]
"""Index in the prefix, layer group, block id.

The blocks of a snapshot of a state follow each other. They have the index of the last block of its
prefix, and the layer group after those with keys and values.
"""

_STAGING_BYTES = 8 << 20
"""Staging memory in each direction, or that of one block or snapshot if this is more."""


class BlockMemory(Protocol):
    """Copies blocks between a pool and a store. One thread stores, and one loads."""

    @property
    def piece_bytes(self) -> int:
        """Bytes to copy at a time, or one block."""

    @property
    def shares_processors(self) -> bool:
        """True if steps run on the processors that copy."""

    def block_bytes(self, group: int) -> int:
        """Bytes of a block in a layer group."""

    def mark(self) -> Any:
        """A point after all work that the calling thread has queued on the device."""

    def store(self, prefix: StoredPrefix, blocks: Sequence[Block]) -> list[Block]:
        """See `StoredPrefix.store`. The steps that computed the blocks have ended."""

    def load(self, prefix: StoredPrefix, blocks: Sequence[Block], after: Any) -> list[Block]:
        """See `StoredPrefix.load`. Blocks are written after the `mark` named `after`.

        Steps that are queued from the return on read what was loaded.
        """


class SnapshotBlocks:
    """The memory of a pool in which some blocks have snapshots of states: tells it which.

    `loading` is called with the blocks of any kind that are about to be written, `loaded` with
    those that have keys and values since.
    """

    def __init__(
        self,
        memory: BlockMemory,
        state_group: int,
        loading: Callable[[list[int]], None],
        loaded: Callable[[list[int]], None],
    ) -> None:
        self._memory, self._state_group = memory, state_group
        self._loading, self._loaded = loading, loaded
        self.piece_bytes = memory.piece_bytes
        self.shares_processors = memory.shares_processors

    def block_bytes(self, group: int) -> int:
        """See `BlockMemory`."""
        return self._memory.block_bytes(group)

    def mark(self) -> Any:
        """See `BlockMemory`."""
        return self._memory.mark()

    def store(self, prefix: StoredPrefix, blocks: Sequence[Block]) -> list[Block]:
        """See `BlockMemory`."""
        return self._memory.store(prefix, blocks)

    def load(self, prefix: StoredPrefix, blocks: Sequence[Block], after: Any) -> list[Block]:
        """See `BlockMemory`."""
        self._loading([block for _, _, block in blocks])
        done = self._memory.load(prefix, blocks, after)
        self._loaded([block for _, group, block in done if group != self._state_group])
        return done


class HostBlocks:
    """Blocks in arrays of the host; for the arguments see `KVBlocks`."""

    piece_bytes = 512 << 10
    """A fraction of a millisecond's work."""
    shares_processors = True

    def __init__(self, arrays: Sequence[Any], groups: Sequence[Sequence[int]]) -> None:
        self._blocks = KVBlocks(arrays, groups)

    def block_bytes(self, group: int) -> int:
        """See `BlockMemory`."""
        return self._blocks.block_bytes(group)

    def mark(self) -> None:
        """See `BlockMemory`: nothing is queued."""

    def store(self, prefix: StoredPrefix, blocks: Sequence[Block]) -> list[Block]:
        """See `BlockMemory`."""
        return prefix.store(self._blocks, blocks)

    def load(
        self, prefix: StoredPrefix, blocks: Sequence[Block], after: None = None
    ) -> list[Block]:
        """See `BlockMemory`."""
        return prefix.load(self._blocks, blocks)


class CopyStream:
    """A CUDA stream for copies, which run beside the steps."""

    def __init__(self, device: "torch.device") -> None:
        import torch

        self._cuda = torch.cuda
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        """An event behind all work in the calling thread's stream."""
        event: Any = self._cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._cuda.current_stream(self._stream.device))
        return event

    @contextmanager
    def copying(self, after: Any = None) -> Iterator[None]:
        """Queue copies here, after an event; waits for them at the end, after an error too."""
        with self._cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            try:
                yield
            finally:
                end: Any = self._cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                end.record(self._stream)
                end.synchronize()


class _HostStream:
    """Stands in for a `CopyStream` where tensors are on the CPU: copies run at once."""

    def mark(self) -> None:
        """Nothing is queued."""

    @contextmanager
    def copying(self, after: None = None) -> Iterator[None]:
        """Make copies."""
        yield


class DeviceBlocks:
    """Blocks in contiguous tensors `[num_blocks, ...]` of a device.

    `groups[g]` lists the tensors of layer group `g`. Tensors on the CPU are for tests: they
    are staged in the same way, without streams. `snapshot_blocks` are those of a snapshot, which is
    staged as a whole.
    """

    piece_bytes = _STAGING_BYTES
    shares_processors = False

    def __init__(
        self,
        tensors: Sequence["torch.Tensor"],
        groups: Sequence[Sequence[int]],
        snapshot_blocks: int = 1,
    ) -> None:
        rows = [_rows(tensor) for tensor in tensors]
        self._stored = _Staging(rows, groups, snapshot_blocks)
        self._loaded = _Staging(rows, groups, snapshot_blocks)

    def block_bytes(self, group: int) -> int:
        """See `BlockMemory`."""
        return self._stored.blocks.block_bytes(group)

    def mark(self) -> Any:
        """See `BlockMemory`."""
        return self._loaded.stream.mark()

    def store(self, prefix: StoredPrefix, blocks: Sequence[Block]) -> list[Block]:
        """See `BlockMemory`. Raises `StoreError` too if the device fails."""
        staging, done = self._stored, 0
        for part in staging.parts(blocks):
            with _failures(), staging.stream.copying():
                staging.copy_from_device(part)
            stored = len(prefix.store(staging.blocks, part.staged))
            done += stored
            if stored < len(part.staged):
                break
        return list(blocks[:done])

    def load(self, prefix: StoredPrefix, blocks: Sequence[Block], after: Any) -> list[Block]:
        """See `BlockMemory`. Raises `StoreError` too if the device fails."""
        staging, done = self._loaded, 0
        for part in staging.parts(blocks):
            loaded = len(prefix.load(staging.blocks, part.staged))
            with _failures(), staging.stream.copying(after):
                staging.copy_to_device(part, loaded)
            done += loaded
            if loaded < len(part.staged):
                break
        return list(blocks[:done])


def end_of_piece(blocks: Sequence[Block], start: int, max_blocks: int) -> int:
    """The end of at most `max_blocks` blocks from `start` on that does not part a snapshot.

    More if the first snapshot alone has more.
    """
    end = min(start + max_blocks, len(blocks))

    def parts(at: int) -> bool:
        return 0 < at < len(blocks) and blocks[at - 1][:2] == blocks[at][:2]

    cut = end
    while cut > start and parts(cut):
        cut -= 1
    if cut > start:
        return cut
    while parts(end):
        end += 1
    return end


class _Part:
    """Blocks that fit into the staging memory together; those of a group are adjacent there."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        by_group: dict[int, list[int]] = {}
        for position, (_, group, _) in enumerate(blocks):
            by_group.setdefault(group, []).append(position)
        self._positions, self._blocks = by_group, blocks
        order = [position for positions in by_group.values() for position in positions]
        rows = {position: row for row, position in enumerate(order)}
        self.staged: list[Block] = [
            (index, group, rows[position]) for position, (index, group, _) in enumerate(blocks)
        ]
        """The blocks, each with its row in the staging memory in place of its id."""

    def copies(self, count: int) -> Iterator[tuple[int, int, list[int]]]:
        """A layer group, its first row, and block ids in order, of the first `count` blocks."""
        first = 0
        for group, positions in self._positions.items():
            ids = [self._blocks[position][2] for position in positions if position < count]
            if ids:
                yield group, first, ids
            first += len(positions)


class _Staging:
    """Staging memory of one direction, and its stream. For one thread."""

    def __init__(
        self,
        rows: Sequence["torch.Tensor"],
        groups: Sequence[Sequence[int]],
        snapshot_blocks: int,
    ) -> None:
        import torch

        self._device = device = rows[0].device
        self._rows, self._groups = rows, groups
        is_cuda = device.type == "cuda"
        self.stream = CopyStream(device) if is_cuda else _HostStream()
        self._capacity = max(
            snapshot_blocks, _STAGING_BYTES // sum([row[0].nbytes for row in rows])
        )
        self._host = [
            torch.zeros((self._capacity, row.shape[1]), dtype=row.dtype, pin_memory=is_cuda)
            for row in rows
        ]
        self.blocks = KVBlocks([array_of(tensor) for tensor in self._host], groups)

    def parts(self, blocks: Sequence[Block]) -> Iterable[_Part]:
        """The blocks in order, as many at a time as fit."""
        start = 0
        while start < len(blocks):
            end = end_of_piece(blocks, start, self._capacity)
            yield _Part(blocks[start:end])
            start = end

    def copy_from_device(self, part: _Part) -> None:
        """Queue the copies of all blocks of a part."""
        for at, rows, ids in self._copies(part, len(part.staged)):
            self._host[at][rows].copy_(self._rows[at].index_select(0, ids), non_blocking=True)

    def copy_to_device(self, part: _Part, count: int) -> None:
        """Queue the copies of the first `count` blocks of a part."""
        for at, rows, ids in self._copies(part, count):
            source = self._host[at][rows].to(self._device, non_blocking=True)
            self._rows[at].index_copy_(0, ids, source)

    def _copies(self, part: _Part, count: int) -> Iterator[tuple[int, slice, "torch.Tensor"]]:
        """A tensor by its index, rows of the staging memory, and the blocks' ids there."""
        for group, first, block_ids in part.copies(count):
            ids = upload(np.array(block_ids, dtype=np.int64), self._device)
            for at in self._groups[group]:
                yield at, slice(first, first + len(block_ids)), ids


def _rows(tensor: "torch.Tensor") -> "torch.Tensor":
    """The same memory, a row of integers for each block: copies are the same for every type."""
    import torch

    rows = tensor.view(len(tensor), -1).view(torch.uint8)
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 else rows


@contextmanager
def _failures() -> Iterator[None]:
    """Raise errors of the device as `StoreError`: the transfer fails, and its thread goes on."""
    try:
        yield
    except RuntimeError as error:
        raise StoreError(f"the device did not copy blocks: {error}") from error
