"""Requests with cached prefixes first: no request starves, and the queue keeps its prefixes.

The bound on overtaking is counted here from what was admitted, not from the scheduler's counts.
"""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from pyengine.kv_cache import BlockManager, Pin
from pyengine.request.request import SequenceState
from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits, StalledError
from tests.support.blocks import leave_evictable
from tests.support.requests import entries_of, make_sequence

BLOCK = 4


def prompt(family: int, length: int = 12) -> list[int]:
    return [1000 * family + position for position in range(length)]


def occupied(num_left: int, num_occupied: int = 64) -> BlockManager:
    """A manager with so many blocks left beside those that a pin holds."""
    manager = BlockManager(num_occupied + num_left, BLOCK)
    leave_evictable(manager, prompt(99, num_occupied * BLOCK))
    HELD.append(manager.match_prefix(prompt(99, num_occupied * BLOCK)))
    assert manager.usage().available == num_left
    return manager


HELD: list[Pin] = []


@pytest.fixture(autouse=True)
def release_held() -> Iterator[None]:
    yield
    while HELD:
        HELD.pop().release()


def make(
    manager: BlockManager, overtakes: int = 4, *, slots: int = 1, budget: int = 256, **hooks: Any
) -> Scheduler:
    limits = SchedulerLimits(
        max_num_batched_tokens=budget, max_num_seqs=slots, max_overtakes=overtakes
    )
    return Scheduler(manager, limits, **hooks)


def add(scheduler: Scheduler, name: str, tokens: list[int], priority: float = 0) -> SequenceState:
    sequence = make_sequence(name, tokens, priority=priority)
    scheduler.add(sequence)
    return sequence


def next_step(scheduler: Scheduler) -> list[str]:
    """Plan and commit a step, and end what it computed: the names of the requests in it."""
    step = scheduler.schedule()
    assert step is not None
    scheduler.commit(step, [1] * len(step.sampling_sequences))
    names = [entry.sequence.request.request_id for entry in entries_of(step)]
    scheduler.finish(step.sampling_sequences)
    return names


def test_if_blocks_are_short_the_largest_cached_part_goes_first() -> None:
    manager = occupied(16)
    leave_evictable(manager, prompt(1, 8))
    leave_evictable(manager, prompt(2, 12))
    scheduler = make(manager)
    for name, tokens in (("cold", prompt(3)), ("half", prompt(1, 16)), ("most", prompt(2))):
        add(scheduler, name, tokens)
    assert [next_step(scheduler) for _ in range(3)] == [["most"], ["half"], ["cold"]]


def test_equal_quarters_go_in_order_of_arrival() -> None:
    manager = occupied(16)
    leave_evictable(manager, prompt(1, 8))
    leave_evictable(manager, prompt(2, 12))
    scheduler = make(manager)
    add(scheduler, "8 of 20 tokens", prompt(1, 20))
    add(scheduler, "12 of 25 tokens", prompt(2, 25))
    assert [name for _ in range(2) for name in next_step(scheduler)] == [
        "8 of 20 tokens",
        "12 of 25 tokens",
    ]


def test_if_blocks_are_to_spare_the_first_comes_first_and_prefixes_are_kept() -> None:
    manager = BlockManager(32, BLOCK)
    leave_evictable(manager, prompt(2))
    scheduler = make(manager)
    add(scheduler, "cold", prompt(1))
    add(scheduler, "hot", prompt(2))
    assert next_step(scheduler) == ["cold"]
    assert manager.usage().pinned == 3
    assert next_step(scheduler) == ["hot"]


def test_without_overtakes_the_first_comes_first() -> None:
    manager = occupied(16)
    leave_evictable(manager, prompt(2))
    scheduler = make(manager, overtakes=0)
    add(scheduler, "cold", prompt(1))
    add(scheduler, "hot", prompt(2))
    assert [next_step(scheduler) for _ in range(2)] == [["cold"], ["hot"]]


def test_a_request_of_a_lower_priority_overtakes_nobody() -> None:
    manager = occupied(16)
    leave_evictable(manager, prompt(2))
    scheduler = make(manager)
    add(scheduler, "hot", prompt(2), priority=1)
    add(scheduler, "cold", prompt(1))
    assert [next_step(scheduler) for _ in range(2)] == [["cold"], ["hot"]]


def test_a_request_is_overtaken_only_so_often() -> None:
    manager = occupied(16)
    leave_evictable(manager, prompt(2))
    scheduler = make(manager, overtakes=3)
    add(scheduler, "cold", prompt(1))
    names = []
    for number in range(6):
        add(scheduler, f"hot {number}", prompt(2))
        names += next_step(scheduler)
    assert names == ["hot 0", "hot 1", "hot 2", "cold", "hot 3", "hot 4"]


def test_a_prefix_that_is_computed_while_a_request_waits_brings_it_forward() -> None:
    manager = occupied(16)
    scheduler = make(manager)
    for name, family in (("a", 1), ("b", 2), ("a again", 1)):
        add(scheduler, name, prompt(family, 13))
    assert [next_step(scheduler) for _ in range(3)] == [["a"], ["a again"], ["b"]]


def test_a_waiting_request_keeps_its_prefix() -> None:
    """Its blocks would be evicted first, as the least recently used."""
    manager = BlockManager(12, BLOCK)
    for family in (1, 2, 3):
        leave_evictable(manager, prompt(family))
    scheduler = make(manager)
    first = add(scheduler, "first", prompt(4, 8))
    scheduler._order._sequences[first].num_overtaken = 4  # it comes next
    add(scheduler, "waits", prompt(1, 13))
    assert next_step(scheduler) == ["first"]
    assert manager.usage().pinned == 3
    leave_evictable(manager, prompt(5, 28))
    with manager.match_prefix(prompt(1)) as pin:
        assert pin.num_tokens == 12
    with manager.match_prefix(prompt(2)) as pin:
        assert pin.num_tokens == 0
    assert next_step(scheduler) == ["waits"]
    assert manager.usage().pinned == 0


def test_pins_give_way_to_a_decode() -> None:
    """Otherwise the running request would be preempted."""
    manager = BlockManager(11, BLOCK)
    leave_evictable(manager, prompt(1, 24))
    scheduler = make(manager)
    running = add(scheduler, "runs", prompt(2, 12))
    scheduler._order._sequences[running].num_overtaken = 4
    waiting = add(scheduler, "waits", prompt(1, 25))
    pinned = []
    for _ in range(11):
        step = scheduler.schedule()
        assert step is not None and step.sequences == [running]
        scheduler.commit(step, [1])
        pinned.append(manager.usage().pinned)
    assert pinned == [6] * 9 + [0] * 2  # position 20 needs a sixth block
    assert scheduler.num_preemptions == 0
    assert (running.num_computed, scheduler._order._pinned.get(waiting)) == (22, None)


def test_pins_give_way_to_a_chunk() -> None:
    manager = BlockManager(12, BLOCK)
    leave_evictable(manager, prompt(1, 16))
    scheduler = make(manager, budget=16)
    large = add(scheduler, "large", prompt(2, 40))
    scheduler._order._sequences[large].num_overtaken = 4
    waiting = add(scheduler, "waits", prompt(1, 17))
    pinned = []
    while large.num_computed < 40:
        step = scheduler.schedule()
        assert step is not None and step.sequences == [large]
        scheduler.commit(step, [1] * len(step.sampling_sequences))
        pinned.append(manager.usage().pinned)
    assert pinned == [4, 4, 0]
    assert (scheduler.num_preemptions, scheduler._order._pinned.get(waiting)) == (0, None)


def test_pins_give_way_to_an_admission() -> None:
    manager = BlockManager(8, BLOCK)
    leave_evictable(manager, prompt(1, 24))
    scheduler = make(manager)
    large = add(scheduler, "large", prompt(2, 31))
    scheduler._order._sequences[large].num_overtaken = 4
    add(scheduler, "waits", prompt(1, 25))
    assert next_step(scheduler) == ["large"]
    assert next_step(scheduler) == ["waits"]


def test_a_request_that_fills_the_pool_is_not_blocked_by_its_own_pin() -> None:
    manager = BlockManager(4, BLOCK)
    leave_evictable(manager, prompt(1, 16))
    scheduler = make(manager)
    sequence = add(scheduler, "a", prompt(1, 16))
    add(scheduler, "b", prompt(1, 16))
    scheduler._order.protect([sequence])  # type: ignore[union-attr]
    assert next_step(scheduler) == ["a"]
    assert next_step(scheduler) == ["b"]


def test_an_aborted_request_keeps_nothing() -> None:
    manager = BlockManager(8, BLOCK)
    leave_evictable(manager, prompt(1))
    scheduler = make(manager)
    first, second = add(scheduler, "first", prompt(2)), add(scheduler, "second", prompt(1))
    scheduler._order._sequences[first].num_overtaken = 4
    step = scheduler.schedule()
    assert step is not None and step.sequences == [first]
    assert manager.usage().pinned == 3
    scheduler.finish([second])
    assert manager.usage().pinned == 0


class Load:
    """Random requests on a small pool, with a store that answers some of them never.

    A request that waits for the store is abandoned to computation after some steps, as the
    offloader does it. Meanwhile others may overtake it.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.overtakes = self.random.choice([1, 2, 5, 20])
        self.manager = BlockManager(
            self.random.randint(12, 40),
            BLOCK,
            eviction=self.random.choice(["lru", "2q"]),
            partial_reuse=False,  # nothing here copies
        )
        slots, budget = self.random.randint(1, 6), self.random.randint(8, 64)
        self.scheduler = make(
            self.manager, self.overtakes, slots=slots, budget=budget, is_held=self.is_held
        )
        self.patience: dict[SequenceState, int] = {}
        self.overtaken: Counter[SequenceState] = Counter()
        self.left: dict[SequenceState, int] = {}
        self.num_steps = self.num_pinned = 0

    def is_held(self, sequence: SequenceState) -> bool:
        if sequence not in self.patience:
            self.patience[sequence] = self.random.choice([0, 0, 0, 10, 30])
        return self.loads(sequence)

    def loads(self, sequence: SequenceState) -> bool:
        return self.patience.get(sequence, 0) > 0

    def add(self) -> None:
        tokens = prompt(self.random.randrange(6), self.random.randint(1, 40))
        tokens += [self.random.randrange(9)] * self.random.randrange(3)
        output = self.random.randint(1, 8)
        most = self.manager.num_blocks * BLOCK - output
        sequence = add(
            self.scheduler,
            str(len(self.overtaken)),
            tokens[:most],
            priority=self.random.choice([0, 0, 0, 1]),
        )
        self.overtaken[sequence], self.left[sequence] = 0, output

    def step(self) -> None:
        self.num_steps += 1
        for sequence in self.patience:
            self.patience[sequence] -= 1
        was_running = set(self.scheduler.running)
        waiting = list(self.scheduler.waiting)
        try:
            step = self.scheduler.schedule()
        except StalledError:
            assert any(self.loads(sequence) for sequence in waiting)
            return
        assert step is not None
        for entry in step.chunks:
            if entry.sequence in was_running:
                continue
            waiting.remove(entry.sequence)
            for other in waiting:
                is_equal = other.order[0] == entry.sequence.order[0]
                if other.order < entry.sequence.order and is_equal and not self.loads(other):
                    self.overtaken[other] += 1
        self.scheduler.commit(step, [1] * len(step.sampling_sequences))
        self.manager.check()
        self.num_pinned += self.manager.usage().pinned
        ended = []
        for sequence in step.sampling_sequences:
            self.left[sequence] -= 1
            if not self.left[sequence]:
                ended.append(sequence)
        self.scheduler.finish(ended)

    def run(self, num_requests: int) -> None:
        rush = self.random.choice([0.2, 0.9])
        while num_requests or self.scheduler.has_work:
            if num_requests and (not self.scheduler.has_work or self.random.random() < rush):
                self.add()
                num_requests -= 1
            else:
                self.step()
        usage = self.manager.usage()
        assert (usage.active, usage.pinned) == (0, 0)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_no_request_is_overtaken_more_often_than_the_bound(first: int) -> None:
    preemptions = pinned = most = steps = 0
    for seed in range(first, first + 20):
        load = Load(seed)
        load.run(60)
        assert not any(load.left.values()), f"seed {seed}: not all ended"
        assert max(load.overtaken.values()) <= load.overtakes, f"seed {seed}"
        assert load.num_steps < 60 * 40, f"seed {seed}"
        preemptions += load.scheduler.num_preemptions
        pinned += load.num_pinned
        most = max(most, *load.overtaken.values())
        steps += load.num_steps
    assert preemptions > 0 and pinned > 0 and most > 1, (preemptions, pinned, most)
