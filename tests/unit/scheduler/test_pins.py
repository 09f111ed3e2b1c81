"""Pins of callers: they end on time, keep within quotas, and starve no request."""

import random
from collections.abc import Sized
from itertools import count

import pytest

from pyengine.errors import PinQuotaError
from pyengine.kv_cache import BlockManager
from pyengine.request.prompts import BlockSpace
from pyengine.request.request import SequenceState
from pyengine.scheduler import pins as pins_module
from pyengine.scheduler.pins import CacheHints, KeptPrefix, PinTable
from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.support.blocks import leave_evictable
from tests.support.requests import make_sequence

BLOCK = 4

SPACE: BlockSpace = {"namespace": b"", "switch": None}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pins_module, "monotonic", clock)
    return clock


def prompt(family: int, length: int = 12) -> list[int]:
    return [1000 * family + position for position in range(length)]


def hints(seconds: float = 300, length: int = 12, *, owner: bytes = b"", of: int = 1) -> CacheHints:
    return CacheHints(pins=((length, seconds),), owner=owner, num_owners=of)


def make(limit: int, num_blocks: int = 32) -> tuple[BlockManager, PinTable]:
    manager = BlockManager(num_blocks, BLOCK)
    for family in range(6):
        leave_evictable(manager, prompt(family))
    return manager, PinTable(manager, limit)


def test_a_pin_keeps_its_blocks_and_ends_on_time(clock: Clock) -> None:
    manager, table = make(8)
    [kept] = table.pin(prompt(0), SPACE, hints(seconds=10))
    assert (kept.num_tokens, manager.usage().pinned, table.expire()) == (12, 3, 10)
    manager.evict_all()
    with manager.match_prefix(prompt(0)) as pin:
        assert pin.num_tokens == 12
    clock.now += 9.9
    table.expire()
    assert manager.usage().pinned == 3
    clock.now += 0.2
    table.expire()
    assert (manager.usage().pinned, table.num_blocks, table.expire()) == (0, 0, None)


def test_another_pin_on_the_same_prefix_renews_it(clock: Clock) -> None:
    manager, table = make(8)
    [first] = table.pin(prompt(0), SPACE, hints(seconds=10))
    clock.now += 9
    [second] = table.pin(prompt(0), SPACE, hints(seconds=10))
    assert first is second and table.num_blocks == 3
    clock.now += 9
    table.expire()
    assert manager.usage().pinned == 3
    clock.now += 2
    table.expire()
    assert manager.usage().pinned == 0


def test_a_shorter_time_does_not_shorten_a_pin(clock: Clock) -> None:
    manager, table = make(8)
    table.pin(prompt(0), SPACE, hints(seconds=10))
    table.pin(prompt(0), SPACE, hints(seconds=1))
    clock.now += 5
    table.expire()
    assert manager.usage().pinned == 3


def test_a_released_pin_is_over_at_once(clock: Clock) -> None:
    manager, table = make(8)
    [kept] = table.pin(prompt(0), SPACE, hints())
    table.release(kept)
    table.release(kept)
    assert (manager.usage().pinned, table.num_blocks) == (0, 0)
    [again] = table.pin(prompt(0), SPACE, hints())
    assert again is not kept and manager.usage().pinned == 3


def test_a_pin_beyond_the_limit_is_refused_with_the_numbers(clock: Clock) -> None:
    manager, table = make(7)
    for family in (0, 1):
        table.pin(prompt(family), SPACE, hints(owner=b"%d" % family))
    with pytest.raises(PinQuotaError, match=r"12 tokens takes 3 blocks, 3 .* hold 6 of 7 blocks"):
        table.pin(prompt(2), SPACE, hints(owner=b"2"))
    assert manager.usage().pinned == table.num_blocks == 6


def test_a_pin_beyond_the_owners_part_is_refused_with_the_numbers(clock: Clock) -> None:
    _, table = make(8)
    table.pin(prompt(0), SPACE, hints(owner=b"a", of=2))
    with pytest.raises(PinQuotaError, match=r"3 of them new.* hold 3 of its 4 blocks"):
        table.pin(prompt(1), SPACE, hints(owner=b"a", of=2))
    table.pin(prompt(1), SPACE, hints(owner=b"b", of=2))
    assert table.num_blocks_of(b"a") == table.num_blocks_of(b"b") == 3


def test_shared_blocks_count_once_for_each_owner(clock: Clock) -> None:
    _, table = make(3)
    table.pin(prompt(0), SPACE, hints(owner=b"a"))
    table.pin(prompt(0), SPACE, hints(owner=b"b"))
    table.pin(prompt(0), SPACE, hints(owner=b"b", length=8))
    assert (table.num_blocks, table.num_blocks_of(b"a"), table.num_blocks_of(b"b")) == (3, 3, 3)


def test_without_a_limit_the_reason_is_given(clock: Clock) -> None:
    _, table = make(0)
    with pytest.raises(PinQuotaError, match=r"no block may be pinned: max_pinned_share is 0"):
        table.pin(prompt(0), SPACE, hints())


def keep(manager: BlockManager, table: PinTable, family: int, priority: int) -> KeptPrefix | None:
    pin = manager.match_prefix(prompt(family))
    assert pin.num_tokens == 12
    return table.keep(pin, priority, CacheHints())


def test_prefixes_of_low_priority_go_first(clock: Clock) -> None:
    manager, table = make(20)
    low, high, again = (keep(manager, table, at, priority) for at, priority in enumerate((1, 9, 1)))
    assert low is not None and high is not None and again is not None
    manager.evict_all()
    assert manager.usage().available == 32 - 9
    assert table.give_way(32 - 9 + 1)
    assert low.pin.is_released and not again.pin.is_released and not high.pin.is_released
    assert table.give_way(32 - 3)
    assert again.pin.is_released and not high.pin.is_released
    assert table.give_way(32)
    assert high.pin.is_released and not table.give_way(32)
    assert table.num_blocks == 0


def test_a_priority_does_not_count_against_other_owners(clock: Clock) -> None:
    """The owner that holds more gives way first, however high its priorities are."""
    manager, table = make(32)
    few = manager.match_prefix(prompt(0))
    own = table.keep(few, 1, hints(owner=b"a", of=2))
    others = [
        table.keep(manager.match_prefix(prompt(family)), 100, hints(owner=b"b", of=2))
        for family in (1, 2)
    ]
    assert own is not None
    assert table.give_way(manager.usage().available + 1)
    assert not own.pin.is_released
    assert [kept.pin.is_released for kept in others if kept is not None] == [True, False]


def test_a_pin_replaces_prefixes_that_are_kept_by_priority(clock: Clock) -> None:
    manager, table = make(6)
    low, high = keep(manager, table, 0, 1), keep(manager, table, 1, 2)
    assert low is not None and high is not None
    assert keep(manager, table, 2, 0) is None, "it is the lowest"
    table.pin(prompt(3), SPACE, hints())
    assert low.pin.is_released and not high.pin.is_released
    assert keep(manager, table, 4, 3) is not None
    assert high.pin.is_released
    assert table.num_blocks == 6


def num_entries(table: PinTable) -> dict[str, int]:
    """The length of every list, heap and dict of the table."""
    return {name: len(value) for name, value in vars(table).items() if isinstance(value, Sized)}


def test_what_has_ended_leaves_no_entry(clock: Clock) -> None:
    """Pins released, expired, renewed or refused, and prefixes replaced, kept or refused."""
    manager, table = make(6)
    empty = num_entries(table)
    for number in range(100):
        owner = b"%d" % number
        for seconds in (3600, 7200):  # the second one renews the first
            [kept] = table.pin(prompt(0), SPACE, hints(seconds, owner=owner))
        table.release(kept)
        assert num_entries(table) == empty
    for number in range(100):
        with pytest.raises(PinQuotaError):
            table.pin(prompt(0), SPACE, hints(owner=b"%d" % number, of=3))
        with manager.match_prefix(prompt(0)) as pin:
            assert table.keep(pin, 1, hints(owner=b"%d" % number, of=3)) is None
    assert num_entries(table) == empty
    for number in range(100):
        pin = manager.match_prefix(prompt(0))
        assert table.keep(pin, 1, hints(owner=b"%d" % number))
    assert table.give_way(32) and num_entries(table) == empty
    table.pin(prompt(1), SPACE, hints(10))
    clock.now += 11
    assert table.expire() is None and num_entries(table) == empty


def test_entries_of_released_pins_are_few_beside_those_of_live_ones(clock: Clock) -> None:
    _, table = make(9)
    live = [table.pin(prompt(family), SPACE, hints(length=4)) for family in range(3)]
    for _ in range(1000):
        [kept] = table.pin(prompt(3), SPACE, hints(3600))
        table.release(kept)
        assert len(table.ends) <= 2 * len(live) + 1
    clock.now += 301
    assert table.expire() is None and all(kept.pin.is_released for [kept] in live)


class Load:
    """Random requests and pins of three owners, and what the table should have by a naive count."""

    num_owners = 3

    def __init__(self, seed: int, clock: Clock) -> None:
        self.random, self.clock = random.Random(seed), clock
        self.manager = BlockManager(48, BLOCK, partial_reuse=False)
        self.limit = self.random.randint(6, 48 - 16)  # a request has up to 16 blocks
        limits = SchedulerLimits(
            max_num_batched_tokens=32,
            max_num_seqs=4,
            max_overtakes=4,
            max_pinned_blocks=self.limit,
        )
        self.scheduler = Scheduler(self.manager, limits)
        self.left: dict[SequenceState, int] = {}
        self.kept: list[KeptPrefix] = []
        self.numbers = count()
        self.refused = self.pinned = self.gave_way = 0

    def hints(self, *pins: tuple[int, float]) -> CacheHints:
        owner = b"%d" % self.random.randrange(self.num_owners)
        return CacheHints(pins=pins, owner=owner, num_owners=self.num_owners)

    def add(self) -> None:
        tokens = prompt(self.random.randrange(12), self.random.randint(1, 56))
        sequence = make_sequence(str(next(self.numbers)), tokens)
        sequence.request.cache_hints = self.hints()
        self.scheduler.add(sequence)
        self.left[sequence] = self.random.randint(1, 8)

    def pin(self) -> None:
        length = self.random.randint(4, 56)
        tokens, table = prompt(self.random.randrange(12), length), self.scheduler.pins
        seconds = self.random.choice([1.0, 5.0, 30.0])
        asked = self.hints((length, seconds))
        with self.manager.match_prefix(tokens) as pin:
            blocks = set(pin.blocks)
        try:
            [kept] = table.pin(tokens, SPACE, asked)
        except PinQuotaError:
            self.refused += 1
            own = self.blocks_of(asked.owner)
            own_pins = {
                block
                for kept in self.live
                if kept.owner == asked.owner and kept.end != float("inf")
                for block in kept.blocks
            }
            too_many_own = len(own_pins | blocks) > self.limit // self.num_owners
            too_many = len(self.all_blocks | blocks) > self.limit
            assert too_many_own or too_many
            assert own == own_pins, "what is kept by priority was dropped first"
            return
        self.pinned += 1
        assert kept.blocks == blocks
        assert kept.end >= self.clock.now + seconds
        if kept not in self.kept:
            self.kept.append(kept)

    @property
    def live(self) -> list[KeptPrefix]:
        return [kept for kept in self.kept if not kept.pin.is_released]

    @property
    def all_blocks(self) -> set[int]:
        return {block for kept in self.live for block in kept.blocks}

    def blocks_of(self, owner: bytes) -> set[int]:
        return {block for kept in self.live if kept.owner == owner for block in kept.blocks}

    def step(self) -> None:
        self.scheduler.pins.expire()
        assert all(kept.end > self.clock.now for kept in self.live), "a pin has not ended on time"
        step = self.scheduler.schedule()
        if step is None:
            return
        self.scheduler.commit(step, [1] * len(step.sampling_sequences))
        ended = []
        for sequence in step.sampling_sequences:
            self.left[sequence] -= 1
            if not self.left[sequence]:
                ended.append(sequence)
                if priority := self.random.choice([0, 0, 1, 7]):
                    pin, asked = sequence.kv.pin(), sequence.request.cache_hints
                    kept = self.scheduler.pins.keep(pin, priority, asked)
                    self.kept += [] if kept is None else [kept]
        self.scheduler.finish(ended)
        for sequence in ended:
            del self.left[sequence]

    def check(self) -> None:
        table = self.scheduler.pins
        before, self.kept = len(self.kept), self.live
        self.gave_way += before - len(self.kept)
        assert table.num_blocks == len(self.all_blocks) <= self.limit
        for number in range(self.num_owners):
            owner = b"%d" % number
            assert table.num_blocks_of(owner) == len(self.blocks_of(owner))
            assert table.num_blocks_of(owner) <= self.limit // self.num_owners


def test_10_000_random_pins_and_requests(clock: Clock) -> None:
    refused = pinned = gave_way = preemptions = 0
    for seed in range(20):
        load, steps = Load(seed, clock), 0
        for _ in range(500):
            load.random.choice([load.add, load.pin])()
            clock.now += load.random.random()
            for _ in range(load.random.randrange(4)):
                load.step()
                load.check()
        while load.scheduler.has_work:
            load.step()
            load.check()
            steps += 1
            assert steps < 5000, f"seed {seed}: a request starves"
        assert not load.left
        clock.now += 31
        load.scheduler.pins.expire()
        while load.scheduler.pins.give_way(load.manager.num_blocks):
            pass
        usage = load.manager.usage()
        assert (usage.pinned, usage.active, load.scheduler.pins.num_blocks) == (0, 0, 0)
        load.manager.check()
        refused, pinned = refused + load.refused, pinned + load.pinned
        gave_way += load.gave_way
        preemptions += load.scheduler.num_preemptions
    seen = {"refused": refused, "pinned": pinned, "gave way": gave_way, "preempted": preemptions}
    assert min(seen.values()) > 0, seen
