"""Eight threads that match, allocate, attach, drop and check; then everything is free again."""

import faulthandler
import random
import sys
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from time import monotonic, sleep

import pytest

from pyengine.kv_cache import BlockManager, NoRoom, Pin, Prefilled, Sequence
from tests.support.blocks import compute, computed
from tests.support.kernels import run_apart

THREADS = 8
BLOCK = 4
NUM_BLOCKS = 96
PROMPTS = [[family] * 8 + [family, tail] * 12 for family in range(3) for tail in range(4)]


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Hammer:
    """What the threads share: a manager, pins that one takes and another drops, a deadline."""

    def __init__(self, seconds: float) -> None:
        self.manager = BlockManager(NUM_BLOCKS, BLOCK)
        self.pins: SimpleQueue[Pin] = SimpleQueue()
        self.deadline = monotonic() + seconds
        self.stepping = threading.Lock()
        self.errors: list[BaseException] = []
        self.done: dict[str, int] = {}

    def run(self) -> None:
        loops: list[Callable[[random.Random], str]] = [
            *([self.step] * 3),
            *([self.match] * 2),
            *([self.drop] * 2),
            self.check,
        ]
        assert len(loops) == THREADS
        threads = [
            threading.Thread(target=self.loop, args=(body, seed), daemon=True)
            for seed, body in enumerate(loops)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def loop(self, body: Callable[[random.Random], str], seed: int) -> None:
        rng = random.Random(seed)
        try:
            while monotonic() < self.deadline and not self.errors:
                outcome = body(rng)
                self.done[outcome] = self.done.get(outcome, 0) + 1
        except BaseException as error:
            self.errors.append(error)

    def step(self, rng: random.Random) -> str:
        """A sequence from beginning to end, in steps of which one is open at a time."""
        manager = self.manager
        prompt = rng.choice(PROMPTS)[: rng.randrange(1, 33)]
        sequence = manager.sequence(prompt)
        if rng.random() < 0.3:
            sequence.attach(manager.match_prefix(prompt))
        for _ in range(rng.randrange(6)):
            if not self.stepping.acquire(blocking=False):
                continue  # another thread's step is open
            try:
                outcome = self.one_step(sequence, rng)
            finally:
                self.stepping.release()
            if outcome == "dropped":
                return "dropped in a step"
            if outcome == "planned":
                self.inspect(sequence)
            if rng.random() < 0.2:
                sequence.reset()
        if rng.random() < 0.5:
            self.pins.put(sequence.pin())
        if rng.random() < 0.5:
            sequence.free()
        return "sequence ended"

    def one_step(self, sequence: Sequence, rng: random.Random) -> str:
        """Plan the sequence, then commit the plan or forget it."""
        plan = self.manager.begin_step(64)
        left = sequence.num_tokens - sequence.num_computed_tokens
        if left == 1 and sequence.block_table:
            planned = plan.decode([sequence]) == []
        else:
            planned = isinstance(plan.prefill(sequence, 64), Prefilled)
        if rng.random() < 0.1:
            return "forgotten"
        dropped = planned and rng.random() < 0.1
        if dropped:
            sequence.free()
        plan.copies()
        plan.commit([rng.randrange(2)] * plan.num_samples)
        return "dropped" if dropped else "planned" if planned else "empty"

    def inspect(self, sequence: Sequence) -> None:
        table = sequence.block_table
        assert len(set(table)) == len(table) == -(-sequence.num_computed_tokens // BLOCK)
        for block in table:
            assert self.manager.refs(block) >= 1
            assert self.manager.seq_refs(block) >= 1
            assert self.manager.state(block) == "active"

    def match(self, rng: random.Random) -> str:
        pin = self.manager.match_prefix(rng.choice(PROMPTS))
        for block in pin.blocks:
            assert self.manager.refs(block) >= 1
            assert self.manager.state(block) in {"active", "pinned"}
        if self.pins.qsize() < 4 and rng.random() < 0.5:
            self.pins.put(pin)
            return "pin handed on"
        return "pin dropped by its owner" if pin.blocks else "nothing matched"

    def drop(self, rng: random.Random) -> str:
        # Not `get(timeout=...)`: in CPython 3.11 a thread was seen to wait in it without an end,
        # which it does if what is left of the timeout is negative.
        try:
            pin = self.pins.get_nowait()
        except Empty:
            sleep(0.001)
            return "nothing to drop"
        if rng.random() < 0.5:
            pin.release()
        return "pin dropped by another"

    def check(self, rng: random.Random) -> str:
        self.manager.check()
        now = self.manager.usage()
        assert now.free + now.evictable + now.active + now.pinned == NUM_BLOCKS
        if rng.random() < 0.02:
            self.manager.evict_all()
        return "checked"

    def assert_all_free(self) -> None:
        while not self.pins.empty():
            self.pins.get().release()
        manager = self.manager
        manager.check()
        now = manager.usage()
        assert (now.active, now.pinned, now.available) == (0, 0, NUM_BLOCKS)
        assert manager.evict_all() == now.evictable
        assert manager.usage().free == NUM_BLOCKS
        assert all(manager.refs(block) == 0 for block in range(NUM_BLOCKS))
        manager.check()
        self.assert_whole_pool_usable()

    def assert_whole_pool_usable(self) -> None:
        sequence = self.manager.sequence(range(NUM_BLOCKS * BLOCK + 1))
        plan = self.manager.begin_step(10_000)
        assert isinstance(plan.prefill(sequence, 10_000), NoRoom)
        answer = plan.prefill(sequence, NUM_BLOCKS * BLOCK)
        assert isinstance(answer, Prefilled)
        assert sorted(sequence.block_table) == list(range(NUM_BLOCKS))


@pytest.mark.parametrize("seconds", [3.0, pytest.param(60.0, marks=pytest.mark.soak)])
def test_eight_threads(seconds: float) -> None:
    """In a new process: here threads and finalizers of earlier tests would run among the eight."""
    run_apart(__name__, "eight_threads", str(seconds))


def eight_threads(seconds: str) -> None:
    # Also of a thread that never releases the interpreter's lock.
    faulthandler.dump_traceback_later(float(seconds) + 60, exit=True)
    sys.setswitchinterval(1e-5)
    hammer = Hammer(float(seconds))
    hammer.run()
    expected = {
        *("sequence ended", "dropped in a step", "checked"),
        *("pin handed on", "pin dropped by its owner", "pin dropped by another"),
    }
    assert expected <= set(hammer.done), f"some paths were never taken: {hammer.done}"
    stats = hammer.manager.stats()
    assert min(stats.hit_blocks, stats.evicted_blocks, stats.merged_blocks) > 0, stats
    assert min(stats.committed_steps, stats.rolled_back_steps) > 0, stats
    hammer.assert_all_free()


def test_one_pin_released_by_many_threads_counts_once() -> None:
    manager = BlockManager(16, BLOCK)
    sequence = computed(manager, range(32))
    for _ in range(50):
        pin = sequence.pin()
        assert manager.refs(pin.blocks[0]) == 2
        barrier = threading.Barrier(THREADS)

        def release(pin: Pin = pin, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            pin.release()

        threads = [threading.Thread(target=release) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(manager.refs(block) == 1 for block in sequence.block_table)
        manager.check()


def test_the_last_of_many_pins_gives_the_blocks_back() -> None:
    manager = BlockManager(16, BLOCK)
    compute(manager, manager.sequence(range(32)))
    for _ in range(50):
        pins = [manager.match_prefix(range(32)) for _ in range(THREADS)]
        assert manager.usage().pinned == 8
        threads = [threading.Thread(target=pin.release) for pin in pins]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (manager.usage().pinned, manager.usage().evictable) == (0, 8)
        manager.check()
