"""The KV store from Python: blocks of a pool in a folder and back, and what is refused."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyengine.kv_cache import (
    BlockManager,
    BufferError,
    ConfigError,
    KVBlocks,
    KvError,
    KVStore,
    StoredPrefix,
    StoreError,
    TokenError,
    Transfer,
    kv_fingerprint,
)
from tests.support.processes import run_python
from tests.support.read_only import another_user, read_only

ROOT = Path(__file__).parents[3]
MIB = 2**20
MINUTE = 60.0
NUM_BLOCKS = 8
BLOCK_SIZE = 4
TOKENS = list(range(100, 118))
"""Four full blocks and two tokens."""
MODEL = [kv_fingerprint([("model", b"example"), ("group", bytes([g]))]) for g in range(2)]

Arrays = list[npt.NDArray[Any]]


def arrays(seed: int) -> Arrays:
    """Two tensors of the first group and one of the second, of three types."""
    random = np.random.default_rng(seed)
    return [
        random.integers(2**16, size=(NUM_BLOCKS, BLOCK_SIZE, 3), dtype=np.uint16),
        random.standard_normal((NUM_BLOCKS, BLOCK_SIZE), dtype=np.float32),
        random.integers(2**8, size=(NUM_BLOCKS, 7), dtype=np.uint8),
    ]


def memory(tensors: Arrays) -> KVBlocks:
    return KVBlocks(tensors, [[0, 1], [2]])


def prefix(store: KVStore, tokens: Any = TOKENS, **changes: Any) -> StoredPrefix:
    return store.prefix(tokens, BLOCK_SIZE, **{"fingerprints": MODEL, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[KVStore]:
    store = KVStore(folder, max_bytes=64 * MIB)
    yield store
    assert store.close(MINUTE)


@pytest.fixture
def filled(store: KVStore) -> Arrays:
    """The source of the stored blocks of `TOKENS`, for both groups: its blocks 0 to 3."""
    tensors = arrays(1)
    blocks = [(i, group, i) for group in range(2) for i in range(4)]
    assert len(prefix(store).store(memory(tensors), blocks)) == 8
    assert store.flush(MINUTE)
    return tensors


@pytest.mark.parametrize(
    ("switch", "shared"), [((0, b"a"), 0), ((5, b"a"), 1), ((8, b"a"), 2), ((90, b"a"), 4)]
)
def test_blocks_before_a_switch_are_the_namespaces(
    store: KVStore, filled: Arrays, switch: tuple[int, bytes], shared: int
) -> None:
    stored = prefix(store, switch=switch)
    assert stored.stored_blocks() == shared
    blocks = [(i, group, i) for group in range(2) for i in range(4)]
    assert len(stored.store(memory(filled), blocks)) == 8
    assert store.flush(MINUTE)
    assert store.stats()["stored"] == 8 + 2 * (4 - shared)
    assert prefix(store, switch=switch).stored_blocks() == 4
    assert prefix(store, switch=(switch[0], b"b")).stored_blocks() == shared
    assert len(stored.load(memory(arrays(2)), blocks)) == 8


def test_a_round_trip_has_the_same_bits(store: KVStore, filled: Arrays) -> None:
    stored = prefix(store)
    assert (stored.num_blocks, stored.stored_blocks(), stored.stored_blocks(1, 1)) == (4, 4, 3)
    target, before = arrays(2), arrays(2)
    blocks = [(i, group, 7 - i) for group in range(2) for i in range(4)]
    assert len(stored.load(memory(target), blocks)) == 8
    for loaded, source, old in zip(target, filled, before, strict=True):
        assert loaded[:3:-1].tobytes() == source[:4].tobytes()
        assert loaded[:4].tobytes() == old[:4].tobytes()
    stats = store.stats()
    assert (stats["stored"], stats["hits"], stats["readable_entries"]) == (8, 8, 8)
    size = 4 * (24 + 16) + 4 * 7
    assert (stats["stored_bytes"], stats["hit_bytes"]) == (size, size)
    assert stats["is_writer"] is True
    assert stats["limit_bytes"] == 64 * MIB


def test_only_the_rows_of_the_group_are_moved(store: KVStore, filled: Arrays) -> None:
    target, before = arrays(2), arrays(2)
    assert len(prefix(store).load(memory(target), [(2, 1, 5)])) == 1
    assert target[2][5].tobytes() == filled[2][2].tobytes()
    assert [a.tobytes() for a in target[:2]] == [a.tobytes() for a in before[:2]]
    assert np.delete(target[2], 5, 0).tobytes() == np.delete(before[2], 5, 0).tobytes()


def test_the_blocks_of_a_transfer_are_those_to_load(store: KVStore, filled: Arrays) -> None:
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    sequence = manager.sequence(TOKENS)
    transfer = sequence.reserve(len(TOKENS))
    assert isinstance(transfer, Transfer)
    target = arrays(2)
    assert len(prefix(store).load(memory(target), transfer.blocks)) == transfer.num_blocks == 4
    assert transfer.complete() == sequence.num_restored_tokens == 16
    for index, _, block in transfer.blocks:
        assert target[0][block].tobytes() == filled[0][index].tobytes()


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dropped", [(i, group) for i in range(4) for group in range(2)])
def test_a_partial_load_caches_only_whole_rows(
    store: KVStore, filled: Arrays, window: int | None, dropped: tuple[int, int]
) -> None:
    """Whichever block is missing, in whichever group, no incomplete row is cached."""
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, groups=[None, window])
    stored = prefix(store, windows=manager.groups)
    sequence = manager.sequence(TOKENS)
    transfer = sequence.reserve(BLOCK_SIZE * stored.stored_blocks())
    assert isinstance(transfer, Transfer)
    target = [np.zeros_like(tensor) for tensor in filled]
    some = [block for block in transfer.blocks if block[:2] != dropped]
    if dropped in [block[:2] for block in transfer.blocks]:
        some = transfer.blocks[: [block[:2] for block in transfer.blocks].index(dropped)]
    loaded = stored.load(memory(target), some)
    assert loaded == some
    expected = transfer.restored_tokens(loaded)
    transfer.complete(loaded)
    with manager.match_prefix(TOKENS) as pin:
        assert pin.num_tokens in (expected, 0)  # a window is not whole before its last row
        reader = manager.sequence(TOKENS)
        reader.attach(pin)
        for group, table in enumerate(reader.block_tables):
            for index, block in enumerate(table[: pin.num_tokens // BLOCK_SIZE]):
                for tensor in [target[:2], target[2:]][group] if block < NUM_BLOCKS else []:
                    source = next(s for t, s in zip(target, filled, strict=True) if t is tensor)
                    assert tensor[block].tobytes() == source[index].tobytes()
        reader.free()


@pytest.mark.parametrize("missing", [(i, group) for i in range(4) for group in range(2)])
def test_stored_blocks_counts_rows_of_all_layer_groups(
    store: KVStore, missing: tuple[int, int]
) -> None:
    blocks = [(i, group, i) for i in range(4) for group in range(2) if (i, group) != missing]
    assert prefix(store).store(memory(arrays(1)), blocks) == blocks
    assert store.flush(MINUTE)
    assert prefix(store).stored_blocks() == missing[0]
    assert prefix(store).stored_blocks(most=2) == min(2, missing[0])
    sliding = prefix(store, windows=[None, 6])  # a token sees the two blocks before it
    index, group = missing
    expected = {0: index, 1: 4 if index < 2 else index}[group]
    if missing == (0, 1):
        assert sliding.stored_blocks(most=1) == sliding.stored_blocks(most=2) == 0
    assert sliding.stored_blocks() == expected
    assert sliding.needed_blocks(0, 4) == [4, 2] and sliding.needed_blocks(3, 4) == [1, 1]
    with pytest.raises(ConfigError, match="first=3, end=5: the prefix has 4 full blocks"):
        sliding.needed_blocks(3, 5)
    with pytest.raises(ConfigError, match="windows has 1 layer groups and fingerprints has 2"):
        prefix(store, windows=[None])


def test_a_store_outlives_its_process(folder: Path) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from tests.unit.kv_cache.test_store import *
        store = KVStore(Path(sys.argv[1]), max_bytes=64 * MIB)
        assert len(prefix(store).store(memory(arrays(1)), [(i, 0, i) for i in range(4)])) == 4
        assert store.close(MINUTE)"""
    run_python(code, folder)
    store, target = KVStore(folder, max_bytes=64 * MIB), arrays(2)
    stored = prefix(store, np.array(TOKENS))
    assert store.stats()["loaded"] == 4
    assert len(stored.load(memory(target), [(i, 0, i) for i in range(4)])) == 4
    assert target[0][:4].tobytes() == arrays(1)[0][:4].tobytes()
    assert target[1][:4].tobytes() == arrays(1)[1][:4].tobytes()
    assert store.close(MINUTE)


def test_other_prompts_namespaces_and_models_have_nothing(store: KVStore, filled: Arrays) -> None:
    variants = {
        "another fingerprint": prefix(store, fingerprints=[kv_fingerprint([])]),
        "another namespace": prefix(store, namespace=b"tenant"),
        "another first token": prefix(store, [1, *TOKENS[1:]]),
        "another last token": prefix(store, [*TOKENS[:15], 1]),
        "another block size": store.prefix(TOKENS, 8, fingerprints=MODEL),
    }
    stored = {name: other.stored_blocks() for name, other in variants.items()}
    assert stored == {**dict.fromkeys(variants, 0), "another last token": 3}
    target = arrays(2)
    blocks = [(0, 0, 0)]
    loaded = {name: len(other.load(memory(target), blocks)) for name, other in variants.items()}
    assert loaded == {**dict.fromkeys(variants, 0), "another last token": 1}
    assert prefix(store, namespace=b"").stored_blocks() == 4
    assert prefix(store, namespace=None).stored_blocks() == 4


def test_loading_stops_at_the_first_block_that_is_missing(store: KVStore) -> None:
    tensors, target = arrays(1), arrays(2)
    stored = prefix(store)
    assert len(stored.store(memory(tensors), [(0, 0, 0), (1, 0, 1), (3, 0, 3)])) == 3
    assert store.flush(MINUTE)
    assert [stored.contains(i) for i in range(4)] == [True, True, False, True]
    assert not stored.contains(0, 1)
    assert [stored.stored_blocks(i, 0) for i in (0, 3, 4)] == [2, 1, 0]
    assert stored.stored_blocks() == 0  # of the other group, nothing is stored
    assert len(stored.load(memory(target), [(i, 0, i) for i in range(4)])) == 2
    assert target[0][3].tobytes() == arrays(2)[0][3].tobytes()


def test_missing_blocks_are_those_without_an_entry(store: KVStore) -> None:
    blocks = [(index, 0, 7 - index) for index in range(4)]
    stored = prefix(store)
    assert stored.missing(blocks) == blocks and stored.missing([]) == []
    assert len(stored.store(memory(arrays(1)), [blocks[0], blocks[2]])) == 2
    assert stored.missing(blocks) == [blocks[1], blocks[3]]  # they may wait in the queue
    assert store.flush(MINUTE)
    assert stored.missing([*blocks, (0, 1, 0)]) == [blocks[1], blocks[3], (0, 1, 0)]
    assert store.stats()["known"] == 4


def flip(folder: Path, payload: bytes) -> None:
    """Change a bit of the stored bytes that end with `payload`."""
    (path,) = folder.glob("*.data")
    data = bytearray(path.read_bytes())
    assert data.count(payload) == 1
    data[data.index(payload)] ^= 1
    path.write_bytes(data)


def test_a_damaged_block_is_never_loaded(store: KVStore, filled: Arrays, folder: Path) -> None:
    flip(folder, filled[1][2].tobytes())
    stored, target = prefix(store), arrays(2)
    assert stored.stored_blocks() == 4
    assert len(stored.load(memory(target), [(i, 0, i) for i in range(4)])) == 2
    assert (stored.stored_blocks(), store.stats()["damaged"]) == (2, 1)
    (notice,) = store.take_notices()
    assert "payload with a wrong checksum" in notice
    assert store.take_notices() == []
    assert len(stored.store(memory(filled), [(2, 0, 2)])) == 1
    assert store.flush(MINUTE)
    assert len(stored.load(memory(target), [(i, 0, i) for i in range(4)])) == 4


def test_verify_names_what_is_damaged(store: KVStore, filled: Arrays, folder: Path) -> None:
    assert store.verify() == (8, [])
    flip(folder, filled[2][1].tobytes())
    whole, damaged = store.verify()
    assert (whole, len(damaged), len(bytes.fromhex(damaged[0]))) == (7, 1, 32)
    assert prefix(store).stored_blocks(0, 1) == 1
    assert store.verify() == (7, [])


def test_a_full_queue_drops_the_rest(folder: Path) -> None:
    size = MIB
    tensor = np.ones((1, size), dtype=np.uint8)
    store = KVStore(folder, max_bytes=64 * MIB, queue_bytes=2 * size)
    stored = store.prefix(list(range(300)), 1, fingerprints=MODEL[:1])
    blocks = [(i, 0, 0) for i in range(300)]
    queued = len(stored.store(KVBlocks([tensor], [[0]]), blocks))
    assert 2 <= queued < 300
    assert store.stats()["dropped_queue_full"] == 1
    assert store.flush(MINUTE)
    assert len(stored.store(KVBlocks([tensor], [[0]]), blocks[: queued + 1])) == queued + 1
    assert store.stats()["known"] >= queued - store.stats()["evicted"]
    assert store.close(MINUTE)


def test_a_block_that_never_fits_is_dropped(folder: Path) -> None:
    store = KVStore(folder, max_bytes=4 * 4096, segment_bytes=4096)
    tensor = np.ones((1, 5000), dtype=np.uint8)
    stored = store.prefix([1], 1, fingerprints=MODEL[:1])
    assert len(stored.store(KVBlocks([tensor], [[0]]), [(0, 0, 0)])) == 0
    assert store.stats()["dropped_too_large"] == 1
    assert store.close(MINUTE)


def test_a_reader_follows_the_writer_of_another_process(folder: Path) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from tests.unit.kv_cache.test_store import *
        store = KVStore(Path(sys.argv[1]), max_bytes=64 * MIB, access="write")
        for index in range(4):
            print("ready", flush=True)
            sys.stdin.readline()
            assert len(prefix(store).store(memory(arrays(1)), [(index, 0, index)])) == 1
            assert store.flush(MINUTE)
        print("done", flush=True)
        sys.stdin.readline()
        assert store.prune() == 4 and store.close(MINUTE)"""
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        store = KVStore(folder, max_bytes=64 * MIB)
        assert not store.is_writer
        assert repr(store) == f"<KVStore {folder}, reads>"
        with pytest.raises(StoreError, match=f"written by process {writer.pid}; close it"):
            KVStore(folder, max_bytes=64 * MIB, access="write")
        with pytest.raises(StoreError, match="open for reading: only the process that writes"):
            store.prune()
        stored, target = prefix(store), arrays(2)
        for index in range(4):
            writer.stdin.write("\n")
            writer.stdin.flush()
            assert writer.stdout.readline() in ("ready\n", "done\n")
            assert stored.stored_blocks(group=0) == index
            assert store.refresh() == index + 1
            assert len(stored.load(memory(target), [(i, 0, i) for i in range(4)])) == index + 1
        assert target[0][:4].tobytes() == arrays(1)[0][:4].tobytes()
        assert len(stored.store(memory(arrays(1)), [(0, 0, 0), (0, 1, 0)])) == 1
        assert store.stats()["dropped_read_only"] == 1
        writer.communicate("\n", timeout=MINUTE)
        assert writer.returncode == 0
    assert store.refresh() == 0
    assert store.close(MINUTE)
    assert KVStore(folder, max_bytes=64 * MIB).is_writer


def test_prune_by_fingerprint_and_by_age(store: KVStore, filled: Arrays) -> None:
    now = time.time()
    rows = store.fingerprints()
    assert [(row[0], row[1]) for row in rows] == [(MODEL[0], 4), (MODEL[1], 4)]
    assert rows[0][2] > rows[1][2] > 4 * 7
    assert all(abs(row[3] - now) < MINUTE for row in rows)
    assert store.prune(older_than=3600) == 0
    assert store.prune(fingerprints=[]) == 0
    assert store.prune(fingerprints=MODEL, older_than=3600.5) == 0
    assert store.prune(fingerprints=[MODEL[1]]) == 4
    assert [row[0] for row in store.fingerprints()] == [MODEL[0]]
    assert (prefix(store).stored_blocks(0, 0), prefix(store).stored_blocks(0, 1)) == (4, 0)
    assert store.prune() == 4
    assert store.flush(MINUTE)
    assert store.stats()["pruned"] == 8
    assert store.fingerprints() == []


def test_a_store_in_memory() -> None:
    store, target = KVStore.in_memory(64 * MIB), arrays(2)
    assert store.is_writer
    assert len(prefix(store).store(memory(arrays(1)), [(i, 0, i) for i in range(4)])) == 4
    assert store.flush(MINUTE)
    assert len(prefix(store).load(memory(target), [(i, 0, i) for i in range(4)])) == 4
    assert target[0][:4].tobytes() == arrays(1)[0][:4].tobytes()
    assert store.stats()["limit_bytes"] == 64 * MIB
    assert store.take_notices() == []
    store.sync()
    assert repr(store) == "<KVStore in memory, writes>"
    assert store.close(MINUTE)


def test_limits_hold(folder: Path) -> None:
    store = KVStore(folder, max_bytes=4 * 65536, segment_bytes=65536, queue_bytes=64 * MIB)
    tensor = np.ones((1, 20_000), dtype=np.uint8)
    stored = store.prefix(list(range(100)), 1, fingerprints=MODEL[:1])
    assert len(stored.store(KVBlocks([tensor], [[0]]), [(i, 0, 0) for i in range(100)])) == 100
    assert store.flush(MINUTE)
    stats = store.stats()
    assert stats["disk_bytes"] <= 4 * 65536
    assert stats["evicted"] + stats["readable_entries"] == 100
    assert stats["readable_entries"] >= 6
    assert sum(path.stat().st_size for path in folder.glob("0*")) == stats["disk_bytes"]
    assert store.close(MINUTE)


CALLS: dict[str, Callable[[KVStore], object]] = {
    "prefix": prefix,
    "stats": lambda store: store.stats(),
    "take_notices": lambda store: store.take_notices(),
    "flush": lambda store: store.flush(0),
    "sync": lambda store: store.sync(),
    "refresh": lambda store: store.refresh(),
    "prune": lambda store: store.prune(),
    "verify": lambda store: store.verify(),
    "fingerprints": lambda store: store.fingerprints(),
}


def test_every_call_is_tried_here() -> None:
    public = {name for name in vars(KVStore) if not name.startswith("_")}
    assert public == CALLS.keys() | {"in_memory", "is_writer", "close"}


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_store_says_so(folder: Path, call: str) -> None:
    store = KVStore(folder, max_bytes=64 * MIB)
    CALLS[call](store)
    assert store.close(MINUTE)
    with pytest.raises(StoreError) as raised:
        CALLS[call](store)
    assert str(raised.value) == f"the KV store {folder} is closed"
    assert store.close(0)


def test_a_prefix_of_a_closed_store_has_nothing(folder: Path) -> None:
    store = KVStore(folder, max_bytes=64 * MIB)
    stored, target = prefix(store), arrays(2)
    assert len(stored.store(memory(arrays(1)), [(0, 0, 0)])) == 1
    assert store.close(MINUTE)
    assert (stored.stored_blocks(), stored.contains(0)) == (0, False)
    assert stored.missing([(0, 0, 0)]) == [(0, 0, 0)]
    assert len(stored.load(memory(target), [(0, 0, 0)])) == 0
    assert len(stored.store(memory(target), [(0, 0, 0)])) == 0
    assert KVStore(folder, max_bytes=64 * MIB).stats()["loaded"] == 1


def test_a_fork_is_refused_and_ends(folder: Path) -> None:
    code = """if True:
        import os, sys
        from pathlib import Path
        from tests.unit.kv_cache.test_store import *
        store = KVStore(Path(sys.argv[1]), max_bytes=64 * MIB)
        found, blocks = prefix(store), memory(arrays(1))
        calls = {
            **{name: (lambda call=call: call(store)) for name, call in CALLS.items()},
            "close": lambda: store.close(0),
            "stored_blocks": lambda: found.stored_blocks(),
            "contains": lambda: found.contains(0),
            "missing": lambda: found.missing([(0, 0, 0)]),
            "store": lambda: found.store(blocks, [(0, 0, 0)]),
            "load": lambda: found.load(blocks, [(0, 0, 0)]),
        }
        parent, child = os.getpid(), os.fork()
        if child == 0:
            for name, call in calls.items():
                try:
                    call()
                except StoreError as error:
                    wanted = f"process {parent} opened the KV store {sys.argv[1]}, this is "
                    wanted += f"process {os.getpid()}: open it after the fork"
                    assert str(error) == wanted, error
                else:
                    raise SystemExit(f"{name} is not refused")
            del store, found, calls, call
            raise SystemExit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(found.store(blocks, [(0, 0, 0)])) == 1
        assert store.flush(MINUTE) and found.stored_blocks(group=0) == 1
        assert store.close(MINUTE)
        print("done")"""
    start = time.monotonic()
    assert run_python(code, folder, timeout=MINUTE).stdout == "done\n"
    assert time.monotonic() - start < 9, "the child waited for a thread that it does not have"


def test_a_fork_keeps_nobody_from_writing_and_lets_nobody_else(folder: Path) -> None:
    """Even if another process has a copy of the descriptor, between `fork` and `exec` too."""
    code = """if True:
        import os, signal, sys
        from pathlib import Path
        from tests.unit.kv_cache.test_store import *
        path, access = Path(sys.argv[1]), "write"
        store = KVStore(path, max_bytes=64 * MIB, access=access)
        if (gone := os.fork()) == 0:
            del store
            raise SystemExit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(gone, 0)[1]) == 0
        try:
            KVStore(path, max_bytes=64 * MIB, access=access)
        except StoreError as error:
            assert f"process {os.getpid()}" in str(error), error
        else:
            raise SystemExit("the end of a fork let another one write")
        if (child := os.fork()) == 0:
            signal.pause()
        try:
            assert store.close(MINUTE)
            assert KVStore(path, max_bytes=64 * MIB, access=access).close(MINUTE)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        print("done")"""
    assert run_python(code, folder, timeout=MINUTE).stdout == "done\n"


FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "other users can enter it": (lambda path: path.chmod(0o750), "accessible to other users"),
    "it is a symbolic link": (
        lambda path: path.symlink_to(path.rename(path.with_name("moved"))),
        "is a symbolic link; name the folder itself",
    ),
    "it is a file": (
        lambda path: (shutil.rmtree(path), path.write_text(""))[0],
        "cannot open the KV store {path}: Not a directory",
    ),
    "it holds something else": (
        lambda path: (path / "format").rename(path / "holiday.jpg") and None,
        "{path} is not empty and not a KV store; name an empty or new folder",
    ),
    "it has another format": (
        lambda path: (path / "format").write_text("pyengine kv-store\nformat 9\n") and None,
        "is a KV store of format 9, this program reads format 1",
    ),
    "its parent is not there": (
        lambda path: shutil.rmtree(path.parent),
        "cannot open the KV store {path}: No such file or directory",
    ),
}


@pytest.mark.parametrize("access", ["write", "read", "write_or_read"])
@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_is_no_store_is_refused(tmp_path: Path, case: str, access: Any) -> None:
    path = tmp_path / "parent" / "store"
    path.parent.mkdir()
    assert KVStore(path, max_bytes=64 * MIB).close(MINUTE)
    change, sentence = FOLDERS[case]
    change(path)
    with pytest.raises(StoreError) as raised:
        KVStore(path, max_bytes=64 * MIB, access=access)
    assert sentence.format(path=path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    assert KVStore(folder, max_bytes=64 * MIB).close(MINUTE)
    os.chown(folder, 12345, -1)
    message = f"{folder} belongs to user 12345, this process runs as user 0; use a folder of this"
    with pytest.raises(StoreError, match=message):
        KVStore(folder, max_bytes=64 * MIB)


def assert_read_alone(folder: Path, expected: Arrays) -> None:
    """The folder cannot be opened to write; a reader has all entries, and stores nothing."""
    with pytest.raises(StoreError) as raised:
        KVStore(folder, max_bytes=64 * MIB, access="write")
    assert f"{folder} cannot be written (" in str(raised.value)
    assert 'make it writable, or open it with access "read"' in str(raised.value)
    with pytest.raises(StoreError, match="cannot be written"):
        KVStore(folder, max_bytes=64 * MIB)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    reader, target = KVStore(folder, max_bytes=64 * MIB, access="read"), arrays(2)
    stored, blocks = prefix(reader), [(i, group, i) for group in range(2) for i in range(4)]
    assert not reader.is_writer and stored.stored_blocks() == 4
    assert stored.load(memory(target), blocks) == blocks
    for ours, theirs in zip(target, expected, strict=True):
        assert ours[:4].tobytes() == theirs[:4].tobytes()
    other = prefix(reader, TOKENS[::-1])
    assert other.store(memory(target), [(0, 0, 0)]) == []
    assert reader.stats()["dropped_read_only"] == 1
    assert (reader.refresh(), reader.verify()) == (8, (8, []))
    with pytest.raises(StoreError, match="open for reading"):
        reader.prune()
    assert reader.take_notices() == []
    assert reader.close(MINUTE)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def filled_folder(folder: Path) -> Arrays:
    """A closed store with the blocks of `TOKENS`."""
    tensors, store = arrays(1), KVStore(folder, max_bytes=64 * MIB)
    blocks = [(i, group, i) for group in range(2) for i in range(4)]
    assert prefix(store).store(memory(tensors), blocks) == blocks
    assert store.close(MINUTE)
    return tensors


def test_a_folder_on_a_read_only_mount_is_read(folder: Path) -> None:
    expected = filled_folder(folder)
    with read_only(folder):
        assert_read_alone(folder, expected)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_that_its_owner_may_not_write_is_read() -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        expected = filled_folder(folder)
        with another_user(folder):
            assert_read_alone(folder, expected)
    finally:
        shutil.rmtree(folder)


def test_a_reader_makes_no_folder(folder: Path) -> None:
    with pytest.raises(StoreError, match="No such file or directory"):
        KVStore(folder, max_bytes=64 * MIB, access="read")
    assert not folder.exists()


def test_a_link_is_refused_however_it_is_spelt(folder: Path) -> None:
    filled_folder(folder)
    link = folder.with_name("link")
    link.symlink_to(folder)
    for spelt in (f"{link}/", f"{link}/.", f"{link}//", f"{link}/./"):
        with pytest.raises(StoreError, match="link is a symbolic link; name the folder itself"):
            KVStore(spelt, max_bytes=64 * MIB)
    with pytest.raises(StoreError, match="the name of its folder is empty"):
        KVStore("", max_bytes=64 * MIB)


def test_another_authentication_key_is_refused(folder: Path) -> None:
    key = bytes(range(32))
    store = KVStore(folder, max_bytes=64 * MIB, auth_key=key)
    assert len(prefix(store).store(memory(arrays(1)), [(0, 0, 0)])) == 1
    assert store.close(MINUTE)
    for other in (None, bytes(32)):
        with pytest.raises(StoreError, match="another authentication key; give that key"):
            KVStore(folder, max_bytes=64 * MIB, auth_key=other)
    assert KVStore(folder, max_bytes=64 * MIB, auth_key=key).stats()["loaded"] == 1


def test_a_new_folder_is_private(store: KVStore, filled: Arrays, folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    files = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert files == dict.fromkeys(["format", "lock", "00000000.data", "00000000.index"], 0o600)


def test_a_stored_block_of_another_length_is_an_error(store: KVStore, filled: Arrays) -> None:
    target = KVBlocks([np.zeros((4, 8), np.uint8)], [[0], [0]])
    with pytest.raises(StoreError) as raised:
        prefix(store).load(target, [(1, 1, 0)])
    assert str(raised.value) == (
        "block 1 of group 1: the entry holds 7 bytes, the buffers 8: part of the layout is missing "
        "in the fingerprint"
    )
    assert store.stats()["damaged"] == 0


SETTINGS: dict[str, tuple[dict[str, Any], type[KvError], str]] = {
    "max_bytes": ({"max_bytes": -1}, ConfigError, "max_bytes=-1 is not an unsigned integer"),
    "max_bytes, none": ({"max_bytes": None}, ConfigError, "max_bytes=None is not an unsigned"),
    "max_bytes, small": ({"max_bytes": 1}, StoreError, "max_bytes is 1; it must hold four"),
    "access": ({"access": "append"}, ConfigError, "access=append is none of"),
    "access, number": ({"access": 3}, ConfigError, "access=3 is none of"),
    "queue_bytes": ({"queue_bytes": 2**64}, ConfigError, "queue_bytes=18446744073709551616"),
    "queue_bytes, 0": ({"queue_bytes": 0}, StoreError, "queue_bytes is 0; it must hold"),
    "segment_bytes": ({"segment_bytes": "1"}, ConfigError, "segment_bytes=1 is not an unsigned"),
    "segment_bytes, 1": ({"segment_bytes": 1}, StoreError, "segment_bytes is 1; it must be"),
    "auth_key": ({"auth_key": b"secret"}, ConfigError, "auth_key has 6 bytes, not 32"),
    "stall_after": ({"stall_after": -1}, ConfigError, "stall_after=-1 is not a number of seconds"),
    "retry_after": ({"retry_after": "x"}, ConfigError, "retry_after=x is not a number of seconds"),
    "retry_after, NaN": ({"retry_after": float("nan")}, ConfigError, "retry_after=NaN is not"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_bad_settings_are_named(folder: Path, case: str) -> None:
    changes, error, sentence = SETTINGS[case]
    settings: dict[str, Any] = {"max_bytes": 64 * MIB, **changes}
    with pytest.raises(KvError) as raised:
        KVStore(folder, **settings)
    assert type(raised.value) is error
    assert sentence in str(raised.value)
    assert not folder.exists()
    if "access" not in changes:
        max_bytes = settings.pop("max_bytes")
        with pytest.raises(error) as raised:
            KVStore.in_memory(max_bytes, **settings)
        assert sentence in str(raised.value)


def test_times_have_no_upper_end(folder: Path) -> None:
    times = {"stall_after": float("inf"), "retry_after": 1e300}
    store = KVStore(folder, max_bytes=64 * MIB, **times)
    assert store.flush(float("inf"))
    assert store.prune(older_than=float("inf")) == 0
    assert store.close(1e300)


ARGUMENTS: dict[str, tuple[Callable[[KVStore], object], type[KvError], str]] = {
    "tokens": (lambda s: prefix(s, [1, -1]), TokenError, "token id -1 at position 1"),
    "block_size": (
        lambda s: s.prefix([1], 0, fingerprints=MODEL),
        ConfigError,
        "block_size=0: it must be at least 1",
    ),
    "no fingerprints": (
        lambda s: prefix(s, fingerprints=[]),
        ConfigError,
        "fingerprints is empty: each layer group has one",
    ),
    "a short fingerprint": (
        lambda s: prefix(s, fingerprints=[MODEL[0], b"short"]),
        ConfigError,
        "fingerprints[1]=b'short' is not 32 bytes",
    ),
    "a fingerprint to prune": (
        lambda s: s.prune(fingerprints=["a"]),
        ConfigError,
        "fingerprints[0]=a is not 32 bytes",
    ),
    "older_than": (
        lambda s: s.prune(older_than=-1.5),
        ConfigError,
        "older_than=-1.5 is not a number of seconds from 0",
    ),
    "flush": (lambda s: s.flush(-1), ConfigError, "timeout=-1 is not a number of seconds"),
    "close": (lambda s: s.close("x"), ConfigError, "timeout=x is not a number"),  # type: ignore[arg-type]
    "first": (
        lambda s: prefix(s).stored_blocks(5),
        ConfigError,
        "first=5: the prefix has 4 full blocks",
    ),
    "first, negative": (
        lambda s: prefix(s).stored_blocks(-1),
        ConfigError,
        "first=-1 is not an unsigned integer",
    ),
    "group": (
        lambda s: prefix(s).stored_blocks(0, 2),
        ConfigError,
        "group=2: the prefix has fingerprints of 2 groups",
    ),
    "contains": (
        lambda s: prefix(s).contains(4),
        ConfigError,
        "index=4: the prefix has 4 full blocks",
    ),
    "contains in a group": (
        lambda s: prefix(s).contains(0, 2),
        ConfigError,
        "group=2: the prefix has fingerprints of 2 groups",
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_bad_arguments_are_named(store: KVStore, case: str) -> None:
    call, error, sentence = ARGUMENTS[case]
    with pytest.raises(KvError) as raised:
        call(store)
    assert type(raised.value) is error
    assert sentence in str(raised.value)


BLOCKS: dict[str, tuple[Any, str]] = {
    "an index": ((4, 0, 0), "blocks[1]: index 4: the prefix has 4 full blocks"),
    "a group": ((0, 2, 0), "blocks[1]: group 2: the prefix has fingerprints of 2 groups"),
    "a block": ((0, 0, 8), "blocks[1]: block 8 is not there: the arrays have 8"),
    "negative": ((0, 0, -1), "blocks[1]=(0, 0, -1) is not (index in the prefix, layer group, "),
    "a pair": ((0, 0), "blocks[1]=(0, 0) is not (index in the prefix, layer group, block id)"),
    "a number": (7, "blocks[1]=7 is not (index in the prefix, layer group, block id)"),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_bad_blocks_are_named_before_anything_moves(
    store: KVStore, filled: Arrays, case: str
) -> None:
    bad, sentence = BLOCKS[case]
    stored, target, before = prefix(store), arrays(2), store.stats()
    for call in (stored.load, stored.store):
        with pytest.raises(ConfigError) as raised:
            call(memory(target), [(0, 0, 0), bad])
        assert sentence in str(raised.value)
    if case != "a block":  # of which only a memory knows how many there are
        with pytest.raises(ConfigError) as raised:
            stored.missing([(0, 0, 0), bad])
        assert sentence in str(raised.value)
    assert [a.tobytes() for a in target] == [a.tobytes() for a in arrays(2)]
    assert store.stats() == before


def test_groups_of_other_arrays_are_refused(store: KVStore) -> None:
    target = KVBlocks(arrays(1)[:2], [[0, 1]])
    with pytest.raises(ConfigError, match=r"blocks\[0\]: group 1: the arrays are of 1 groups"):
        prefix(store).store(target, [(0, 1, 0)])
    with pytest.raises(TypeError, match="memory"):
        prefix(store).store(arrays(1), [(0, 0, 0)])  # type: ignore[arg-type]


def test_the_errors_of_an_argument_pass(store: KVStore) -> None:
    class Interrupted:
        def __index__(self) -> int:
            raise KeyboardInterrupt

        __float__ = __index__

    with pytest.raises(KeyboardInterrupt):
        prefix(store).load(memory(arrays(1)), [(0, 0, Interrupted())])  # type: ignore[list-item]
    with pytest.raises(KeyboardInterrupt):
        store.flush(Interrupted())  # type: ignore[arg-type]


ONES = np.ones((4, 3), np.uint8)
READ_ONLY = np.frombuffer(bytes(12), np.uint8).reshape(4, 3)
MEMORY: dict[str, tuple[Any, Any, str]] = {
    "no tensors": ([], [[0]], "tensors has no arrays"),
    "not an array": ([ONES, 7], [[0]], "array tensors[1] has no buffer"),
    "read-only": ([ONES, READ_ONLY], [[0]], "array tensors[1] is read-only"),
    "strided": ([np.ones((4, 6), np.uint8)[:, ::2]], [[0]], "array tensors[0] is not contiguous"),
    "no blocks": ([np.ones((0, 3), np.uint8)], [[0]], "array tensors[0] has no blocks, or blocks"),
    "no bytes": ([np.ones((4, 0), np.uint8)], [[0]], "array tensors[0] has no blocks, or blocks"),
    "a number": ([np.array(1.0)], [[0]], "array tensors[0] has no buffer"),
    "other blocks": (
        [ONES, np.ones((5, 3), np.uint8)],
        [[0, 1]],
        "array tensors[1] has 5 blocks, tensors[0] has 4",
    ),
    "the same twice": ([ONES, ONES], [[0, 1]], "arrays tensors[0] and tensors[1] share memory"),
    "no groups": ([ONES], [], "groups has no layer group"),
    "an empty group": ([ONES], [[0], []], "groups[1] has no tensor"),
    "not there": ([ONES], [[0], [1]], "groups[1] names tensor 1: there are 1"),
    "twice": ([ONES], [[0, 0]], "groups[0] names tensor 0 twice"),
}


@pytest.mark.parametrize("case", MEMORY)
def test_bad_arrays_and_groups_are_named(case: str) -> None:
    tensors, groups, sentence = MEMORY[case]
    with pytest.raises(BufferError) as raised:
        KVBlocks(tensors, groups)
    assert sentence in str(raised.value)


def test_the_size_of_a_block() -> None:
    blocks = memory(arrays(1))
    assert (blocks.num_blocks, blocks.block_bytes(0), blocks.block_bytes(1)) == (8, 40, 7)
    assert repr(blocks) == "<KVBlocks, 8 blocks in 3 arrays of 2 layer groups>"
    with pytest.raises(ConfigError, match="group=2: there are 2 layer groups"):
        blocks.block_bytes(2)
    with pytest.raises(ConfigError, match=r"an index in groups\[0\]=-1 is not an unsigned"):
        KVBlocks([ONES], [[-1]])


def test_arrays_stay_as_long_as_they_are_used(store: KVStore, filled: Arrays) -> None:
    array = np.zeros((4, 7), np.uint8)
    references = sys.getrefcount(array)
    blocks = KVBlocks([array], [[0], [0]])
    assert sys.getrefcount(array) > references
    assert len(prefix(store).load(blocks, [(3, 1, 0)])) == 1
    assert array[0].tobytes() == filled[2][3].tobytes()
    del blocks
    assert sys.getrefcount(array) == references


def test_fingerprints_are_those_of_the_format() -> None:
    digest = "f76225a5f006fb0e9b3feacb8834247d14e76ccc67a9df3029545e43c989332f"
    assert kv_fingerprint([("model", b"example"), ("dtype", b"float32")]).hex() == digest
    assert digest in (ROOT / "docs/reference/kv-store-format.md").read_text(encoding="utf-8")
    swapped = kv_fingerprint([("dtype", b"float32"), ("model", b"example")])
    assert swapped.hex() != digest
    with pytest.raises(TypeError, match="properties"):
        kv_fingerprint([("model", 1)])  # type: ignore[list-item]
