"""Threads that share arrays of the caller: values are mixed, one cache has one owner."""

import sys
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import numpy as np
import pytest

from pyengine import cpu
from pyengine.cpu import CpuAttention, CpuCache, CpuStep
from pyengine.kv_cache import BlockManager, BufferError, SharedPrefixes, StepBuffers, TokenError
from tests.support.blocks import step_arrays

THREADS, PATIENCE = 8, 60.0


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each call gives or raises, all begun at once by a thread each."""
    barrier, results = threading.Barrier(len(calls)), [None] * len(calls)

    def run(position: int) -> None:
        barrier.wait(PATIENCE)
        try:
            results[position] = calls[position]()
        except Exception as error:
            results[position] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a thread never came back"
    return results


class Filler:
    """A manager with an open plan of one prompt, whose tokens all have one value."""

    def __init__(self, token: int, length: int = 64) -> None:
        self.manager = BlockManager(16, 4)
        self.sequence = self.manager.sequence([token] * length)
        self.plan = self.manager.begin_step(length)
        self.plan.prefill(self.sequence, length)
        self.token = token


def shared_arrays() -> dict[str, Any]:
    return step_arrays(64, 4, 16)


def prefix_arrays() -> dict[str, Any]:
    return {
        "order": np.zeros(4, np.int32),
        "own_blocks": np.zeros(4, np.int32),
        "prefixes": np.zeros((4, 5), np.int32),
    }


def test_fills_and_reads_of_the_same_arrays() -> None:
    """Each thread has a manager and `StepBuffers` of its own; all are over the same arrays."""
    arrays, fillers = shared_arrays(), [Filler(token) for token in range(1, THREADS + 1)]
    deadline, tokens = monotonic() + 1.5, arrays["input_ids"]

    def fill(filler: Filler) -> int:
        buffers, count = StepBuffers(**arrays), 0
        shared = SharedPrefixes(**prefix_arrays())
        while monotonic() < deadline:
            filler.plan.fill(buffers, shared=shared)
            # The array of 64-bit tokens, which other threads fill meanwhile.
            read = filler.manager.sequence(tokens).tokens()
            assert set(read) <= set(range(THREADS + 1))
            count += 1
        return count

    counts = together([lambda filler=filler: fill(filler) for filler in fillers])
    assert all(isinstance(count, int) and count > 10 for count in counts), counts
    for filler in fillers:
        filler.plan.fill(StepBuffers(**arrays))
        assert tokens.tolist() == [filler.token] * 64
        assert arrays["positions"].tolist() == list(range(64))
        filler.manager.check()


def test_fills_of_one_set_of_buffers_take_turns_or_are_refused() -> None:
    arrays, fillers = shared_arrays(), [Filler(token) for token in range(1, THREADS + 1)]
    buffers, shared = StepBuffers(**arrays), SharedPrefixes(**prefix_arrays())

    def fill(filler: Filler) -> int:
        filled = 0
        for _ in range(500):
            try:
                filler.plan.fill(buffers, shared=shared)
            except BufferError as error:
                assert "another thread is filling these arrays" in str(error)
            else:
                filled += 1
        return filled

    counts = together([lambda filler=filler: fill(filler) for filler in fillers])
    assert all(isinstance(count, int) for count in counts) and sum(counts) > 0, counts
    fillers[0].plan.fill(buffers)
    assert arrays["input_ids"].tolist() == [1] * 64


def test_token_ids_that_change_while_they_are_read() -> None:
    """They are read or refused; what is refused and what is taken are the same values."""
    tokens, manager = np.zeros(50_000, np.int64), BlockManager(8, 4)
    deadline = monotonic() + 1.5

    def write() -> None:
        while monotonic() < deadline:
            tokens[:] = -1
            tokens[:] = 7

    def read() -> int:
        refused = 0
        while monotonic() < deadline:
            try:
                seen = set(manager.sequence(tokens).tokens())
            except TokenError as error:
                assert "is not an integer" in str(error)
                refused += 1
            else:
                assert seen <= {0, 7}
        return refused

    results = together([write, *[read] * 3])
    assert results[0] is None and all(isinstance(count, int) for count in results[1:]), results


def cache_arrays(blocks: int = 3) -> tuple[Any, Any]:
    return np.zeros((blocks, 2, 2, 3), np.float32), np.zeros((blocks, 2, 2, 1), np.float32)


def test_two_caches_over_one_array_are_refused() -> None:
    keys, values = cache_arrays()
    first = CpuCache(keys, values)
    others = cache_arrays()
    halves = keys.view(np.uint16), np.zeros((3, 2, 2, 1), np.uint16)
    for array, cache in (
        ("keys", (keys, others[1])),
        ("values", (others[0], values)),
        ("keys", (keys[2:], others[1][:1])),
        ("values", (others[0][1:2], values[1:2])),
        ("keys", halves),
    ):
        with pytest.raises(
            cpu.BufferError, match=f"array {array} shares memory with another CpuCache"
        ):
            CpuCache(*cache)
    CpuCache(*others)
    del first
    CpuCache(keys, values)
    both = np.zeros((4, 2, 2, 3), np.float32)
    apart = [CpuCache(both[:2], cache_arrays(2)[1]), CpuCache(both[2:], cache_arrays(2)[1])]
    assert len(apart) == 2


def test_arrays_that_were_refused_are_free() -> None:
    keys, values = cache_arrays()
    with pytest.raises(cpu.BufferError, match="differ"):
        CpuCache(keys, values[:2])
    with pytest.raises(cpu.BufferError, match="share memory"):
        CpuCache(keys, keys)
    CpuCache(keys, values)
    empty = np.zeros((0, 2, 2, 3), np.float32)
    assert CpuCache(empty, empty) is not CpuCache(empty, empty)


def test_of_many_threads_one_gets_the_array() -> None:
    for _ in range(50):
        keys, values = cache_arrays()
        caches = together([lambda k=keys, v=values: CpuCache(k, v)] * THREADS)
        refused = [cache for cache in caches if isinstance(cache, cpu.BufferError)]
        assert len(refused) == THREADS - 1, caches


def test_one_thread_at_a_time_attends_over_a_cache() -> None:
    cache, attention = CpuCache(*cache_arrays()), CpuAttention(1)
    step = CpuStep(
        cache,
        query_start_loc=np.array([0, 1], np.int32),
        seq_lens=np.array([3], np.int32),
        block_tables=np.array([[2, 0]], np.int32),
        slots=np.array([0]),
    )

    def attend() -> int:
        rows = [np.ones((1, heads, dim), np.float32) for heads, dim in ((4, 3), (2, 3), (2, 1))]
        done, out = 0, np.zeros((1, 4, 1), np.float32)
        for _ in range(300):
            try:
                attention.forward(step, cache, *rows, out, scaling=1.0)
            except cpu.BufferError as error:
                assert "another thread attends over this cache" in str(error)
            else:
                done += 1
        return done

    counts = together([attend] * THREADS)
    assert all(isinstance(count, int) for count in counts) and sum(counts) > 0, counts
