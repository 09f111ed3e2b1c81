"""vLLM's KVCacheManager with several groups of layers, over a simulated KV cache.

A step first copies blocks, then writes what all its requests compute, then reads: every query reads
the positions of its window in each group, which must hold the values of its own tokens. Workers
append to their tables, as vLLM's do, and get a new one only by `merged_tables`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pyengine.integrations.vllm_manager import KVCacheManager
from tests.support.vllm_fakes import (
    CLASSES,
    FullAttentionSpec,
    Request,
    RequestStatus,
    SlidingWindowSpec,
    cache_config,
)

SIZE = 4


def spec(window: int | None) -> Any:
    return SlidingWindowSpec(SIZE, window) if window else FullAttentionSpec(SIZE)


def make(num_blocks: int, windows: Sequence[int | None], **settings: Any) -> KVCacheManager:
    config = cache_config(num_blocks, *(spec(window) for window in windows))
    more = {"max_model_len": 400, "scheduler_block_size": SIZE, "max_in_flight_tokens": 40}
    return KVCacheManager(config, classes=CLASSES, **(more | settings))


@dataclass
class Running:
    """A request and the block tables of the workers."""

    request: Request
    end: int
    tables: list[list[int]] = field(default_factory=list)


class World:
    """A scheduler with one step at a time."""

    def __init__(
        self, seed: int, windows: Sequence[int | None], *, merging: bool, **settings: Any
    ) -> None:
        self.chance = random.Random(seed)
        self.windows = windows
        self.merging = merging
        self.budget = settings.pop("budget", 40)
        self.num_blocks = settings.pop("num_blocks", 60)
        self.manager = make(self.num_blocks, windows, **settings)
        self.running: list[Running] = []
        self.waiting: list[Running] = []
        self.kv: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.reads = self.hits = self.preempted = self.merges = 0
        self.prompts: list[list[int]] = [[]]

    def add(self, name: str) -> None:
        """A prompt that shares a prefix with an earlier one, or all of it."""
        chance = self.chance
        base = chance.choice(self.prompts[-8:])
        cut = chance.choice((len(base), chance.randint(0, len(base))))
        tokens = base[:cut] + [chance.randrange(3) for _ in range(chance.choice((0, 1, 4, 30, 60)))]
        tokens = (tokens or [0])[:150]
        self.prompts.append(tokens)
        request = Request(name, tokens.copy())
        request.skip_reading_prefix_cache = chance.random() < 0.1
        self.waiting.append(Running(request, len(tokens) + chance.choice((1, 6, 30))))

    def step(self) -> None:
        """Schedule, run, and sample."""
        manager = self.manager
        manager.new_step_starts()
        budget, work = self.budget, []
        for each in list(self.running):
            if each not in self.running or not budget:
                continue
            request = each.request
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            while (new := manager.allocate_slots(request, count)) is None:
                victim = self.running.pop()
                self.preempt(victim)
                work = [entry for entry in work if entry[0] is not victim]
                if victim is each:
                    break
            else:
                self.append(each, new)
                work.append((each, request.num_computed_tokens, count))
                budget -= count
        while self.waiting and budget:
            each = self.waiting[0]
            request = each.request
            blocks, hit, _ = manager.get_computed_blocks(request)
            count = min(request.num_tokens - hit, budget)
            if manager.allocate_slots(request, count, hit, blocks) is None:
                break
            self.running.append(self.waiting.pop(0))
            request.status = RequestStatus.RUNNING
            each.tables = [ids.copy() for ids in manager.get_block_ids(request.request_id)]
            request.num_computed_tokens = hit
            self.hits += hit
            work.append((each, hit, count))
            budget -= count
        copies, retained = manager.take_kv_cache_block_copies()
        if self.merging:
            running = [each.request for each, _, _ in work]
            for name, tables in manager.merged_tables(running).items():
                self.merges += 1
                [each] = [each for each, _, _ in work if each.request.request_id == name]
                each.tables = [ids.copy() for ids in tables]
        manager.take_new_block_ids()
        self.run(work, copies)
        manager.block_pool.free_blocks(retained)
        manager.tables.kv.check()
        assert bool(work) or not self.waiting

    @staticmethod
    def append(each: Running, new: Any) -> None:
        for table, ids in zip(each.tables, new.get_block_ids(), strict=True):
            table.extend(ids)

    def preempt(self, each: Running) -> None:
        """Frees its blocks; it begins anew."""
        self.manager.free(each.request)
        each.request.num_computed_tokens = 0
        each.request.status = RequestStatus.PREEMPTED
        self.waiting.insert(0, each)
        self.preempted += 1

    def run(self, work: list[tuple[Running, int, int]], copies: list[Any]) -> None:
        """Copies, writes, reads, and a token for each request that has none left to compute."""
        for source, target in copies:
            for offset in range(SIZE):
                self.kv[target, offset] = self.kv[source, offset]
        for each, start, count in work:
            tokens = each.request._all_token_ids
            for group, table in enumerate(each.tables):
                for position in range(start, start + count):
                    slot = (table[position // SIZE], position % SIZE)
                    assert slot[0] > 0
                    self.kv[slot] = (group, tuple(tokens[: position + 1]))
        for each, start, count in work:
            tokens = each.request._all_token_ids
            for group, (table, window) in enumerate(zip(each.tables, self.windows, strict=True)):
                first = max(start + 1 - window, 0) if window else 0
                for position in range(first, start + count):
                    value = self.kv[table[position // SIZE], position % SIZE]
                    assert value == (group, tuple(tokens[: position + 1])), (group, position)
                    self.reads += 1
        for each, start, count in work:
            request = each.request
            request.num_computed_tokens = start + count
            if request.num_computed_tokens == request.num_tokens:
                if request.num_tokens >= each.end:
                    self.running.remove(each)
                    self.manager.free(request)
                else:
                    last = request._all_token_ids[-3:]
                    request._all_token_ids.append(sum(last) * 7 % 3)


GROUPS: list[tuple[int | None, ...]] = [
    (8,),
    (None, 8),
    (None, 6, 9),
    (None, None, 13),
    (5, 16),
    (None, 4, None, 40),
]


@pytest.mark.parametrize("windows", GROUPS)
@pytest.mark.parametrize("merging", [False, True])
@pytest.mark.parametrize("caching", [True, False])
def test_no_query_reads_a_wrong_block(
    windows: tuple[int | None, ...], merging: bool, caching: bool
) -> None:
    world = World(
        len(windows) + merging,
        windows,
        merging=merging,
        enable_caching=caching,
        num_blocks=1 + 60 * len(windows),
    )
    for number in range(120):
        world.add(f"r{number}")
        while world.chance.random() < 0.8:
            world.step()
    while world.running or world.waiting:
        world.step()
    assert world.reads > 10_000
    assert (world.hits > 1000) == caching
    assert (world.merges > 0) == (merging and caching)
    usage = world.manager.tables.kv.usage()
    assert (usage.active, usage.pinned) == (0, 0)
    assert world.manager.reset_prefix_cache()
    assert world.manager.block_pool.get_num_free_blocks() == world.num_blocks - 1


@pytest.mark.parametrize("windows", GROUPS)
def test_a_tight_pool_preempts(windows: tuple[int | None, ...]) -> None:
    most = sum(-(-(window + 24) // SIZE) + 2 if window else 46 for window in windows)
    world = World(5, windows, merging=True, num_blocks=3 + most, budget=24)
    for number in range(150):
        world.add(f"r{number}")
        if world.chance.random() < 0.5:
            world.step()
    while world.running or world.waiting:
        world.step()
    assert world.preempted > 0
    usage = world.manager.tables.kv.usage()
    assert (usage.active, usage.pinned) == (0, 0)


def test_a_window_takes_only_the_blocks_that_it_reads() -> None:
    manager, request = make(60, (None, 8)), Request("a", list(range(40)))
    free = manager.block_pool.get_num_free_blocks
    assert free() == 59
    first = manager.allocate_slots(request, 20)
    assert first is not None
    assert [len(ids) for ids in first.get_block_ids()] == [5, 5]
    request.num_computed_tokens, request.status = 20, RequestStatus.RUNNING
    assert manager.get_block_ids("a")[1][0] > 0  # the step reads it
    manager.allocate_slots(request, 20)
    full, window = manager.get_block_ids("a")
    assert 0 not in full
    assert [bool(block) for block in window] == [False] * 3 + [True] * 7
    request.num_computed_tokens = 40
    manager.remove_skipped_blocks("a", 40)
    assert manager.get_block_ids("a")[1][:8] == [0] * 8
    assert free() == 59 - 10 - 2


def test_a_hit_needs_the_blocks_of_the_window_alone() -> None:
    manager, first = make(60, (None, 8)), Request("a", list(range(22)))
    admitted = manager.allocate_slots(first, 22)
    assert admitted is not None
    full, window = admitted.get_block_ids()
    second = Request("b", [*range(20), 90, 91])
    blocks, hit, _ = manager.get_computed_blocks(second)
    assert hit == 20
    assert blocks.get_block_ids() == (full[:5], [0, 0, 0, *window[3:5]])
    assert [block.is_null for block in blocks.blocks[1]] == [True] * 3 + [False] * 2
    assert blocks.get_unhashed_block_ids_all_groups() == [[], []]


def test_admission_counts_what_a_window_holds_at_once() -> None:
    """Of 59 blocks, 200 tokens take 50 of full attention, and at most 13 of a window at once."""
    for windows, fits in (((8,), True), ((None,), True), ((None, 8), False), ((8, 8, 8), True)):
        manager, request = make(60, windows), Request("a", list(range(200)))
        answer = manager.allocate_slots(request, 4, full_sequence_must_fit=True)
        assert (answer is not None) == fits, windows
