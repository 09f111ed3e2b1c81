"""The KV store among threads: the GIL is released, and closing ends what others do."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, sleep

import numpy as np
import pytest

from pyengine.kv_cache import KVBlocks, KVStore, StoredPrefix, StoreError, kv_fingerprint
from tests.concurrency.test_gil import PATIENCE, Timed, look_until_done
from tests.support.processes import run_python

MIB = 2**20
MODEL = [kv_fingerprint([("model", b"example")])]
NUM = 128
"""Blocks of a MiB each."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    store = KVStore(tmp_path / "store", max_bytes=1024 * MIB, queue_bytes=1024 * MIB)
    yield store
    store.close(PATIENCE)


@pytest.fixture
def memory() -> KVBlocks:
    return KVBlocks([np.ones((2, MIB // 2), np.uint16)], [[0]])


def prefix(store: KVStore, first: int) -> StoredPrefix:
    """One of `NUM` blocks that no other has; hashing it takes no time."""
    return store.prefix([first, *range(NUM)], 1, fingerprints=MODEL)


def moves(block: int, times: int = 1) -> list[tuple[int, int, int]]:
    return [(index, 0, block) for index in range(NUM)] * times


def runs_in_peace(call: Callable[[], object]) -> bool:
    """Whether this thread keeps running Python while another one is in `call`."""
    calling = Timed(call, after=0.02)  # this thread is in its loop by then
    calling.start()
    pauses = look_until_done([calling])
    assert calling.error is None
    longest = max(pause.ended - pause.began for pause in pauses)
    return longest < (calling.ended - calling.started) / 3


def test_storing_releases_the_gil(store: KVStore, memory: KVBlocks) -> None:
    def call(first: int) -> None:
        assert len(prefix(store, first).store(memory, moves(0))) == NUM

    # On a busy machine this thread may be late; one that calls with the GIL always stops it.
    assert any(runs_in_peace(lambda first=first: call(first)) for first in range(5))  # type: ignore[misc]


def test_loading_releases_the_gil(store: KVStore, memory: KVBlocks) -> None:
    found = prefix(store, 0)
    assert len(found.store(memory, moves(0))) == NUM
    assert store.flush(PATIENCE)

    def call() -> None:
        assert len(found.load(memory, moves(1))) == NUM

    assert any(runs_in_peace(call) for _ in range(5))


def test_hashing_releases_the_gil(store: KVStore) -> None:
    tokens = np.arange(2_000_000)
    assert any(
        runs_in_peace(lambda: store.prefix(tokens, 16, fingerprints=MODEL)) for _ in range(5)
    )


def test_verifying_releases_the_gil(store: KVStore, memory: KVBlocks) -> None:
    assert len(prefix(store, 0).store(memory, moves(0))) == NUM
    assert store.flush(PATIENCE)
    assert any(runs_in_peace(store.verify) for _ in range(5))


def test_a_call_that_keeps_the_gil_would_be_seen() -> None:
    sleep_with_gil = ctypes.PyDLL(None).usleep
    assert not runs_in_peace(lambda: sleep_with_gil(50_000))


def test_closing_ends_a_load_in_another_thread(store: KVStore) -> None:
    target = np.zeros((2, MIB), np.uint8)
    source = KVBlocks([np.ones((1, MIB), np.uint8)], [[0]])
    found, loaded = prefix(store, 0), list[int]()
    assert len(found.store(source, moves(0))) == NUM
    assert store.flush(PATIENCE)
    many = moves(1, times=500)
    blocks = KVBlocks([target], [[0]])
    loading = Timed(lambda: loaded.append(len(found.load(blocks, many))))
    loading.start()
    while store.stats()["hits"] < 5:
        sleep(0.001)
    start = perf_counter()
    assert store.close(PATIENCE)
    loading.join(PATIENCE)
    assert loading.error is None
    assert perf_counter() - start < PATIENCE / 2
    assert 5 <= loaded[0] < len(many)
    assert target.min(1).tolist() == [0, 1]
    assert len(found.load(blocks, many)) == 0
    with pytest.raises(StoreError, match="is closed"):
        store.stats()


def test_many_threads_store_and_load_what_is_theirs(store: KVStore) -> None:
    """Each thread its own blocks of the same arrays, and of the same prefixes."""
    num_threads, rounds, size = 4, 20, 4096
    tensor = np.zeros((2 * num_threads, size), np.uint8)
    memory, wrong = KVBlocks([tensor], [[0]]), list[str]()

    def work(thread: int) -> None:
        for each in range(rounds):
            value = (each + 1) % 256
            tensor[thread] = value
            found = store.prefix([each], 1, fingerprints=MODEL)
            found.store(memory, [(0, 0, thread)])
            store.flush(PATIENCE)
            own = num_threads + thread
            if len(found.load(memory, [(0, 0, own)])) != 1 or (tensor[own] != value).any():
                wrong.append(f"thread {thread} in round {each}")

    threads = [Timed(lambda thread=thread: work(thread)) for thread in range(num_threads)]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [thread.error for thread in threads] == [None] * num_threads
    assert wrong == []
    assert store.stats()["stored"] == rounds


END = """if True:
    import sys, threading, time
    import numpy as np
    from pyengine.kv_cache import KVBlocks, KVStore, kv_fingerprint
    store = KVStore(sys.argv[1], max_bytes=256 << 20)
    memory = KVBlocks([np.ones((2, 1 << 20), np.uint8)], [[0]])
    found = store.prefix(list(range(32)), 1, fingerprints=[kv_fingerprint([])])
    assert len(found.store(memory, [(i, 0, 0) for i in range(32)])) == 32
    assert store.flush(60)
    started = threading.Event()
    def load():
        started.set()
        while True:
            found.load(memory, [(i, 0, 1) for i in range(32)])
    threading.Thread(target=load, daemon=True).start()
    started.wait()
    time.sleep(0.05)
    found.store(memory, [(i, 0, 0) for i in range(32)])
    print("end", flush=True)"""


def test_an_interpreter_ends_while_threads_load(tmp_path: Path) -> None:
    for each in range(3):
        done = run_python(END, tmp_path / f"{each}", timeout=PATIENCE)
        assert (done.stdout, done.stderr) == ("end\n", "")
        store = KVStore(tmp_path / f"{each}", max_bytes=256 * MIB, access="write")
        assert store.verify() == (32, [])
        assert store.close(PATIENCE)


def test_an_unused_store_releases_its_folder(tmp_path: Path) -> None:
    for _ in range(20):
        store = KVStore(tmp_path / "store", max_bytes=64 * MIB, access="write")
        found = store.prefix([1], 1, fingerprints=MODEL)
        del store
        assert found.stored_blocks() == 0  # a prefix keeps the store
        with pytest.raises(StoreError, match="written by process"):
            KVStore(tmp_path / "store", max_bytes=64 * MIB, access="write")
        del found
