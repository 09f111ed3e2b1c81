"""Events replayed into a set are what the cache holds, after every step; vLLM's own are not."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is in the peers' environment: make vllm-tests")

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from tests.peers.test_differential import requests
from tests.peers.world import Settings, World


class Index:
    """The state of a router; counts inconsistent events."""

    def __init__(self) -> None:
        self.held: set[Any] = set()
        self.surprises: list[str] = []

    def take(self, events: list[Any]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    again = self.held & set(event.block_hashes)
                    parent = event.parent_block_hash
                    if again:
                        self.surprises.append(f"{len(again)} stored twice")
                    if parent is not None and parent not in self.held:
                        self.surprises.append("stored behind a block that is not there")
                    size = event.block_size
                    assert len(event.token_ids) == size * len(event.block_hashes)
                    assert event.extra_keys is None or len(event.extra_keys) == len(
                        event.block_hashes
                    )
                    self.held |= set(event.block_hashes)
                case BlockRemoved():
                    gone = set(event.block_hashes)
                    if not gone <= self.held:
                        self.surprises.append("removed twice")
                    self.held -= gone
                case AllBlocksCleared():
                    self.held.clear()


def contents(world: World) -> set[Any]:
    """The blocks that a look-up finds now."""
    if world.settings.ours:
        return set(world.manager.tables.kv.cached_hashes())
    from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

    found = world.manager.block_pool.cached_block_hash_to_block._cache
    return {maybe_convert_block_hash(get_block_hash(key)) for key in found}


def run(ours: bool, folder: Path, count: int) -> tuple[Index, int, World]:
    """Duplicates, preemption and eviction; after how many steps the index was wrong."""
    settings = Settings(ours=ours, num_blocks=100, budget=40, events=True)
    world, index, wrong = World(settings, folder), Index(), 0
    for number, (name, tokens, more) in enumerate(requests(5, count, 4)):
        world.add(name, tokens, **more)
        if number % 500 == 499:
            world.drain()
            world.scheduler.reset_prefix_cache()
        for _ in range(number % 3):
            step = world.scheduler.schedule()
            world.preemptions += len(step.preempted_req_ids or ())
            result = world.worker.run(step)
            index.take(world.manager.take_events())
            wrong += index.held != contents(world)
            world._deliver(step, result)
    assert world.worker.wrong == []
    return index, wrong, world


def test_ours_are_the_contents_after_every_step(folder: Path) -> None:
    index, wrong, world = run(True, folder, 2000)
    assert (wrong, index.surprises) == (0, [])
    stats = world.manager.tables.kv.stats()
    assert min(stats.merged_blocks, stats.evicted_blocks, world.preemptions) > 100


def test_duplicates_make_vllms_own_events_wrong(folder: Path) -> None:
    index, wrong, _ = run(False, folder, 2000)
    assert wrong > 100
    assert index.surprises


def duplicated(ours: bool, folder: Path) -> tuple[list[Any], World]:
    """Two requests compute one prompt in step, chunk by chunk; the first one's blocks are evicted
    while the second one's stay."""
    settings = Settings(ours=ours, num_blocks=12, max_num_seqs=4, budget=8, events=True)
    world = World(settings, folder)
    prompt = list(range(16))
    world.add("first", prompt, max_tokens=1, reads=False)
    world.add("second", prompt, max_tokens=12, reads=False)
    events: list[Any] = []

    def step() -> None:
        step = world.scheduler.schedule()
        result = world.worker.run(step)
        events.extend(world.manager.take_events())
        world._deliver(step, result)

    for _ in range(5):
        step()
    world.add("other", list(range(20, 36)), max_tokens=1)
    for _ in range(3):
        step()
    assert world.worker.wrong == []
    return events, world


def test_a_content_that_a_second_block_holds_is_not_removed(folder: Path) -> None:
    events, world = duplicated(True, folder)
    index = Index()
    index.take(events)
    assert index.held == contents(world)
    assert index.surprises == []


def test_vllm_says_removed_of_a_content_that_it_still_holds(folder: Path) -> None:
    """The case of vllm#55092."""
    events, world = duplicated(False, folder)
    index = Index()
    index.take(events)
    assert index.held != contents(world)
    assert contents(world) - index.held, "held, and said to be removed"
