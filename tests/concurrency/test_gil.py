"""No thread waits for the manager's lock while it holds the GIL."""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, sleep, thread_time
from typing import Any, NamedTuple

import numpy as np
import pytest

from pyengine._kv import ReplicaIndex
from pyengine.kv_cache import BlockManager, Pin, Sequence, StepBuffers, StepPlan
from tests.support.blocks import step_arrays

BLOCKS = 2_000_000
CONTENTS = 500_000
PATIENCE = 60.0
"""Seconds after which a thread counts as dead."""


class Pool(NamedTuple):
    """A manager whose `check()` takes long: it visits every block and every content."""

    manager: BlockManager
    sequence: Sequence
    planned: Sequence
    pin: Pin
    plan: StepPlan
    buffers: StepBuffers
    check_takes: float
    """Seconds."""


@pytest.fixture(scope="module")
def pool() -> Pool:
    manager = BlockManager(BLOCKS, 1)
    sequence = manager.sequence(np.arange(CONTENTS))
    plan = manager.begin_step(CONTENTS)
    plan.prefill(sequence, CONTENTS)
    plan.commit([0])
    pin = manager.match_prefix(np.arange(1000))
    planned = manager.sequence([1])
    plan = manager.begin_step(8)
    plan.prefill(planned, 8)
    start = perf_counter()
    manager.check()
    took = perf_counter() - start
    buffers = StepBuffers(**step_arrays())
    return Pool(manager, sequence, planned, pin, plan, buffers, took)


class Timed(threading.Thread):
    """A call on a thread of its own, with the times around it."""

    def __init__(self, call: Callable[[], object], *, after: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.call, self.after = call, after
        self.started = self.ended = 0.0
        self.error: BaseException | None = None

    def run(self) -> None:
        sleep(self.after)
        self.started = perf_counter()
        try:
            self.call()
        except BaseException as error:
            self.error = error
        self.ended = perf_counter()


WAITING: dict[str, Callable[[Pool], object]] = {
    "usage": lambda p: p.manager.usage(),
    "stats": lambda p: p.manager.stats(),
    "refs": lambda p: p.manager.refs(0),
    "preview": lambda p: p.manager.preview(p.planned),
    "sequence": lambda p: p.manager.sequence([1, 2]),
    "match_prefix": lambda p: p.manager.match_prefix([0, 1, 2]),
    "block_table": lambda p: p.planned.block_table,
    "pin": lambda p: p.planned.pin(),
    "num_tokens of a plan": lambda p: p.plan.num_tokens,
    "decode": lambda p: p.plan.decode([]),
    "fill": lambda p: p.plan.fill(p.buffers),
    "check": lambda p: p.manager.check(),
}


class Pause(NamedTuple):
    """A time in which the thread that looks did not run."""

    began: float
    ended: float


def look_until_done(threads: list[Timed]) -> list[Pause]:
    """Run Python on this thread until the others are done; the times it stood still."""
    pauses, last = list[Pause](), perf_counter()
    deadline = last + PATIENCE
    while any(thread.is_alive() for thread in threads):
        now = perf_counter()
        if now - last > 1e-3:
            pauses.append(Pause(last, now))
        last = now
        assert now < deadline, "a thread never came back: deadlock"
    return [*pauses, Pause(last, perf_counter())]


def share_stopped(pool: Pool, call: Callable[[], object]) -> float | None:
    """The share of the wait of `call` for a thread in `check()` in which this thread stood still.

    None if `call` came too late to wait. A busy machine makes the wait and the pauses longer, and
    leaves their share.
    """
    checking = Timed(pool.manager.check)
    waiting = Timed(call, after=pool.check_takes / 10)
    threads = [checking, waiting]
    for thread in threads:
        thread.start()
    pauses = look_until_done(threads)
    assert [thread.error for thread in threads] == [None, None]
    began, ended = waiting.started, min(waiting.ended, checking.ended)
    if ended - began < pool.check_takes / 4:
        return None
    return max(min(p.ended, ended) - max(p.began, began) for p in pauses) / (ended - began)


def shares_stopped(pool: Pool, call: Callable[[], object], times: int) -> list[float]:
    shares = [share_stopped(pool, call) for _ in range(times)]
    return [share for share in shares if share is not None]


@pytest.mark.parametrize("call", WAITING)
def test_waiting_for_the_lock_lets_python_run(pool: Pool, call: str) -> None:
    # On a busy machine any thread may be late; one that waits with the GIL always stops this one.
    seen = list[float]()
    for _ in range(10):
        seen += shares_stopped(pool, lambda: WAITING[call](pool), times=2)
        if seen and min(seen) < 0.5:
            return
    pytest.fail(f"{call} always stopped this thread, or never had to wait; shares: {seen}")


def test_a_thread_that_keeps_the_gil_would_be_seen(pool: Pool) -> None:
    sleep_with_gil = ctypes.PyDLL(None).usleep
    seen = shares_stopped(pool, lambda: sleep_with_gil(int(pool.check_takes * 1e6)), times=5)
    assert max(seen) > 0.9  # a busy machine may stop the sleeper before it begins


def test_letting_go_needs_no_lock(pool: Pool) -> None:
    """Pins and handles go while another thread is in `check()`, which stays content."""
    for _ in range(5):
        pins = [pool.manager.match_prefix(np.arange(1000)) for _ in range(100)]
        sequences = [pool.manager.sequence([1]) for _ in range(100)]
        checking = Timed(pool.manager.check)
        checking.start()
        sleep(pool.check_takes / 10)
        before = perf_counter()
        for pin in pins:
            pin.release()
        assert all(pin.is_released and pin.blocks == [] for pin in pins)
        del sequences
        after = perf_counter()
        in_time = checking.is_alive()
        checking.join(PATIENCE)
        assert checking.error is None
        if in_time:
            break
    else:
        pytest.fail(f"letting go took {after - before:.3f} s: it waited for check()")
    assert pool.manager.refs(0) == 2  # the sequence and the pool's own pin


def test_an_open_plan_may_be_dropped_during_a_check() -> None:
    manager = BlockManager(BLOCKS, 1)
    sequence = manager.sequence([1, 2, 3])
    plan = manager.begin_step(8)
    plan.prefill(sequence, 8)
    checking = Timed(manager.check)
    checking.start()
    sleep(0.005)
    del plan
    checking.join(PATIENCE)
    assert checking.error is None
    assert manager.usage().free == BLOCKS
    assert sequence.block_table == []


MANY = 1_000_000
"""Contents; one call on them takes tens of milliseconds at least."""


@contextmanager
def pauses() -> Iterator[list[float]]:
    """A thread that asks for the GIL all the time; how long it had to wait for it, each time."""
    waited, over = list[float](), threading.Event()

    def look() -> None:
        last = perf_counter()
        while not over.is_set():
            sleep(2e-5)
            now = perf_counter()
            waited.append(now - last)
            last = now

    thread, interval = threading.Thread(target=look, daemon=True), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        yield waited
    finally:
        over.set()
        thread.join(PATIENCE)
        sys.setswitchinterval(interval)


def filled(count: int = MANY) -> list[Any]:
    """A pool whose every block is evictable and holds a content of which no event was taken."""
    manager = BlockManager(count, 1, events=True)
    sequence = manager.sequence(np.arange(count))
    plan = manager.begin_step(count)
    plan.prefill(sequence, count)
    plan.commit([0])
    sequence.free()
    return [manager]


def replica_index() -> list[Any]:
    known = ReplicaIndex(1, hash_seed=1)
    names = known.block_hashes(np.arange(MANY))
    known.apply(0, b"\1" * MANY, names)
    return [known]


def dropped_transfers() -> list[Any]:
    """A pool after many transfers were dropped; its next call ends them."""
    manager = BlockManager(MANY // 25, 1)
    sequences = [manager.sequence([at, 0]) for at in range(MANY // 25)]
    transfers = [sequence.reserve(1) for sequence in sequences]
    manager.usage()
    del sequences, transfers
    return [manager]


def pinned() -> list[Any]:
    [manager] = filled(4 * MANY)
    return [manager, manager.match_prefix(np.arange(4 * MANY))]


LONG: dict[str, tuple[Callable[[], list[Any]], Callable[[list[Any]], object]]] = {
    "BlockManager": (list, lambda own: own.append(BlockManager(2 * MANY, 1))),
    "cached_hashes": (filled, lambda own: own[0].cached_hashes()),
    "evict_all": (filled, lambda own: own[0].evict_all()),
    "take_events": (filled, lambda own: own[0].take_events()),
    "take_packed_events": (lambda: filled(4 * MANY), lambda own: own[0].take_packed_events()),
    "snapshot": (lambda: [BlockManager(4 * MANY, 1)], lambda own: own[0].snapshot()),
    "usage after transfers were dropped": (dropped_transfers, lambda own: own[0].usage()),
    "Pin.release": (pinned, lambda own: own[1].release()),
    "tokens": (
        lambda: [BlockManager(1, 1).sequence(np.arange(MANY))],
        lambda own: own[0].tokens(),
    ),
    "ReplicaIndex.cached_blocks": (replica_index, lambda own: own[0].cached_blocks(0)),
    "ReplicaIndex.block_hashes": (
        lambda: [ReplicaIndex(1, hash_seed=1)],
        lambda own: own[0].block_hashes(np.arange(MANY)),
    ),
}


@pytest.mark.parametrize("call", LONG)
def test_what_takes_long_lets_python_run_meanwhile(call: str) -> None:
    """Objects are made a few thousand at a time; everything else happens without the GIL.

    A call that keeps the GIL keeps it for all of its processor time, however busy the machine is.
    """
    prepare, run = LONG[call]
    seen = []
    for _ in range(10):  # on a busy machine the other thread may be late
        own = prepare()
        with pauses() as waited:
            sleep(0.001)
            waited.clear()
            before = thread_time()
            kept = run(own)  # what becomes of the answer is the caller's
            took, pause = thread_time() - before, max(waited, default=0.0)
        del kept
        seen.append((pause, took))
        if pause < max(took / 2, 0.01):
            return
    pytest.fail(f"{call} let nobody run for half of its time; pauses and times: {seen}")


def test_no_python_code_runs_under_the_lock() -> None:
    """An int whose conversion calls the manager again does not lock up."""
    manager = BlockManager(8, 4)

    class Nested:
        def __index__(self) -> int:
            manager.check()
            return manager.usage().free

    tokens: Any = [Nested(), Nested()]
    done = Timed(lambda: manager.sequence(tokens))
    done.start()
    done.join(PATIENCE)
    assert not done.is_alive()
    assert done.error is None
    assert manager.match_prefix(tokens).num_tokens == 0
