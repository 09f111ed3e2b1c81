"""Snapshots of states in the KV store: entries of their own, restored with what is before them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine.kv_cache import (
    BlockManager,
    ConfigError,
    KVBlocks,
    KVStore,
    Prefilled,
    Sequence,
    StoredPrefix,
    StoreError,
    Transfer,
    kv_fingerprint,
)
from pyengine.kv_cache.block_memory import DeviceBlocks, HostBlocks, SnapshotBlocks, end_of_piece

NUM_BLOCKS, BLOCK_SIZE, STATE_BLOCKS = 32, 4, 2
MODEL, STATE = (kv_fingerprint([("kind", kind)]) for kind in (b"blocks", b"states"))
TOKENS = list(range(22))
GROUPS = [[0], [0, 1]]
"""Blocks of tokens have one array, snapshots have both."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[KVStore]:
    store = KVStore(folder, max_bytes=64 << 20)
    yield store
    assert store.close(60)


def arrays(seed: int) -> list[Any]:
    random = np.random.default_rng(seed)
    return [random.integers(256, size=(NUM_BLOCKS, size), dtype=np.uint8) for size in (24, 8)]


def prefix(store: KVStore, tokens: list[int] = TOKENS, **changes: Any) -> StoredPrefix:
    settings = {"fingerprints": [MODEL], "state": (STATE, STATE_BLOCKS), **changes}
    return store.prefix(tokens, BLOCK_SIZE, **settings)


def manager(**settings: Any) -> BlockManager:
    return BlockManager(
        NUM_BLOCKS, BLOCK_SIZE, state_blocks=STATE_BLOCKS, snapshot_min_tokens=8, **settings
    )


def compute(manager: BlockManager, sequence: Sequence) -> None:
    """Compute all tokens."""
    samples = False
    while not samples:
        plan = manager.begin_step(1000)
        answer = plan.prefill(sequence, 1000)
        assert isinstance(answer, Prefilled)
        samples = answer.samples
        plan.commit([7] if samples else [])
        manager.check()


def pinned(manager: BlockManager, end: int) -> list[tuple[int, int, int]]:
    with manager.match_prefix(TOKENS[:end]) as pin:
        assert pin.num_state_tokens == end
        assert [block for *_, block in pin.indexed_blocks] == pin.blocks
        return pin.indexed_blocks


def test_a_new_manager_restores_blocks_and_snapshot(store: KVStore) -> None:
    first, source = manager(), arrays(1)
    sequence = first.sequence(TOKENS)
    compute(first, sequence)
    assert first.snapshot_positions(TOKENS) == [20]
    blocks = pinned(first, 20)
    assert [place[:2] for place in blocks] == [(at, 0) for at in range(5)] + [(4, 1), (4, 1)]
    stored = prefix(store)
    assert stored.missing(blocks) == blocks
    assert stored.store(KVBlocks(source, GROUPS), blocks) == blocks
    assert store.flush(60)
    assert stored.missing(blocks) == []
    assert store.stats()["stored"] == 5 + 1  # a snapshot is one entry
    assert store.stats()["stored_bytes"] == 5 * 24 + 2 * 32

    second, target = manager(), arrays(2)
    later = second.sequence(TOKENS)
    assert stored.last_snapshot(0, 5) == 5
    transfer = later.reserve(20)
    assert isinstance(transfer, Transfer)
    assert stored.load(KVBlocks(target, GROUPS), transfer.blocks) == transfer.blocks
    assert transfer.complete(transfer.blocks) == 0
    second.check()
    for (*_, old), (_, group, new) in zip(blocks, transfer.blocks, strict=True):
        for at in GROUPS[group]:
            assert (target[at][new] == source[at][old]).all()
    plan = second.begin_step(1000)
    answer = plan.prefill(later, 1000)
    assert isinstance(answer, Prefilled)
    assert (answer.num_cached_tokens, answer.num_tokens) == (20, 2)
    assert plan.state_loads() == [(later.id, 20, [block for *_, block in transfer.blocks[5:]])]
    plan.commit([7])


def filled(store: KVStore, ends: list[int], blocks: list[int]) -> list[Any]:
    """Store these blocks of `TOKENS`, and snapshots at these positions."""
    source = arrays(1)
    moves = [(at, 0, at) for at in blocks]
    for end in ends:
        moves += [(end // BLOCK_SIZE - 1, 1, 10 + part) for part in range(STATE_BLOCKS)]
    assert prefix(store).store(KVBlocks(source, GROUPS), moves) == moves
    assert store.flush(60)
    return source


@pytest.mark.parametrize(
    ("ends", "blocks", "first", "limit", "expected"),
    [
        ([], [0, 1, 2, 3, 4], 0, 5, 0),
        ([20], [0, 1, 2, 3, 4], 0, 5, 5),
        ([20], [0, 1, 2, 3, 4], 0, 4, 0),
        ([12, 20], [0, 1, 2, 3, 4], 0, 4, 3),
        ([12, 20], [0, 1, 2, 4], 0, 5, 3),
        ([12, 20], [0, 1, 2, 4], 4, 5, 5),
        ([12, 20], [1, 2], 0, 5, 0),
        ([12], [], 5, 5, 3),  # all blocks are cached
        ([4, 12], [0, 2], 0, 9, 1),
    ],
)
def test_the_last_snapshot_that_can_be_restored(
    store: KVStore, ends: list[int], blocks: list[int], first: int, limit: int, expected: int
) -> None:
    filled(store, ends, blocks)
    assert prefix(store).last_snapshot(first, limit) == expected


def test_other_snapshots_are_not_found(store: KVStore) -> None:
    filled(store, [20], [0, 1, 2, 3, 4])
    assert prefix(store).last_snapshot(0, 5) == 5
    assert prefix(store, [99, *TOKENS[1:]]).last_snapshot(0, 5) == 0
    assert prefix(store, namespace=b"other").last_snapshot(0, 5) == 0
    other = kv_fingerprint([("kind", b"others")])
    assert prefix(store, state=(other, 2)).last_snapshot(0, 5) == 0
    assert prefix(store, state=None).last_snapshot(0, 5) == 0


def test_parts_of_snapshots_are_refused(store: KVStore) -> None:
    memory = KVBlocks(arrays(1), GROUPS)
    for blocks in ([(4, 1, 10)], [(4, 1, 10), (4, 1, 11), (4, 1, 12)], [(4, 1, 1), (3, 1, 2)]):
        for move in (prefix(store).store, prefix(store).load):
            with pytest.raises(ConfigError, match=r"of the snapshot after block 4: a snapshot has"):
                move(memory, blocks)
    with pytest.raises(ConfigError, match="group 2"):
        prefix(store).store(memory, [(4, 2, 1)])
    with pytest.raises(ConfigError, match="group 1"):
        prefix(store, state=None).store(memory, [(4, 1, 1)])
    for state, said in (((b"short", 2), "32 bytes"), ((STATE, 0), "at least 1 block")):
        with pytest.raises(ConfigError, match=said):
            prefix(store, state=state)
    assert store.stats()["stored"] == 0


def test_a_snapshot_of_another_length_is_refused(store: KVStore) -> None:
    filled(store, [20], [])
    with pytest.raises(StoreError, match="block 4 of group 1"):
        prefix(store, state=(STATE, 3)).load(
            KVBlocks(arrays(2), GROUPS), [(4, 1, part) for part in range(3)]
        )


def test_a_damaged_snapshot_is_never_loaded(store: KVStore, folder: Path) -> None:
    source = filled(store, [12, 20], [0, 1, 2, 3, 4])
    (path,) = folder.glob("*.data")
    data = bytearray(path.read_bytes())
    payload = source[1][11].tobytes()  # the end of both snapshots
    assert data.count(payload) == 2
    data[data.rindex(payload)] ^= 1
    path.write_bytes(data)
    other, stored = manager(), prefix(store)
    sequence = other.sequence(TOKENS)
    transfer = sequence.reserve(20)
    assert isinstance(transfer, Transfer)
    loaded = stored.load(KVBlocks(arrays(2), GROUPS), transfer.blocks)
    assert loaded == transfer.blocks[:5]
    transfer.complete(loaded)
    other.check()
    assert other.state_usage().snapshots == 0
    assert stored.last_snapshot(0, 5) == 3  # the damaged entry was dropped
    again = other.sequence(TOKENS)
    alone = again.reserve(12)
    assert isinstance(alone, Transfer)
    assert [place[:2] for place in alone.blocks] == [(2, 1), (2, 1)]
    assert stored.load(KVBlocks(arrays(2), GROUPS), alone.blocks) == alone.blocks
    alone.complete()
    plan = other.begin_step(1000)
    answer = plan.prefill(again, 1000)
    assert isinstance(answer, Prefilled)
    assert answer.num_cached_tokens == 12


def test_pieces_never_part_a_snapshot() -> None:
    blocks = [(0, 0, 1), (1, 0, 2), (1, 1, 3), (1, 1, 4), (1, 1, 5), (2, 0, 6)]
    ends = [end_of_piece(blocks, start, 2) for start in (0, 1, 2, 5)]
    assert ends == [2, 2, 5, 6]
    assert [end_of_piece(blocks, 0, most) for most in (1, 3, 4, 5, 6, 9)] == [1, 2, 2, 5, 6, 6]


@pytest.mark.parametrize("on_device", [False, True])
def test_the_pool_knows_which_blocks_have_snapshots(store: KVStore, on_device: bool) -> None:
    source = filled(store, [20], [0, 1, 2, 3])
    target, calls = arrays(2), []
    if on_device:
        torch = pytest.importorskip("torch")
        inner: Any = DeviceBlocks([torch.from_numpy(array) for array in target], GROUPS, 2)
    else:
        inner = HostBlocks(target, GROUPS)
    memory = SnapshotBlocks(
        inner,
        1,
        lambda blocks: calls.append(("to", blocks)),
        lambda blocks: calls.append(("kv", blocks)),
    )
    assert [memory.block_bytes(group) for group in range(2)] == [24, 32]
    blocks = [(3, 0, 20), (4, 1, 21), (4, 1, 22), (4, 0, 23)]  # the last one is not stored
    assert memory.load(prefix(store), blocks, memory.mark()) == blocks[:3]
    assert calls == [("to", [20, 21, 22, 23]), ("kv", [20])]
    assert (target[0][20] == source[0][3]).all()
    for part in range(2):
        assert all(
            (new[21 + part] == old[10 + part]).all()
            for new, old in zip(target, source, strict=True)
        )
