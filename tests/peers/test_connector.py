"""Blocks that a KV connector fills and sends, in vLLM's real Scheduler over both managers."""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is in the peers' environment: make vllm-tests")

from tests.peers.connector import ConnectedWorld, connected
from tests.peers.test_differential import check_nothing_is_held, requests
from tests.peers.test_events import Index, contents
from tests.peers.world import Settings


def make(folder: Path, *, ours: bool = True, faults: Any = None, **settings: Any) -> ConnectedWorld:
    adjust = connected(**(faults or {}))
    return ConnectedWorld(Settings(ours=ours, adjust=adjust, **settings), folder)


def drive_with_aborts(world: ConnectedWorld, seed: int, count: int) -> None:
    """All requests, in bursts, with aborts and resets; often an abort during a load."""
    chance = random.Random(seed)
    alive: list[str] = []
    for name, tokens, settings in requests(seed, count, world.settings.block_size):
        world.add(name, tokens, **settings)
        alive = [*alive[-30:], name]
        if chance.random() < 0.05:
            world.abort(chance.choice([*world.connector.loading] or alive))
        if chance.random() < 0.002:
            world.scheduler.reset_prefix_cache()
        while chance.random() < 0.7:
            world.step()
    world.drain()
    assert world.worker.wrong == []


def check_all_is_closed(world: ConnectedWorld) -> None:
    """No load, no request that is sent, no block of a request."""
    assert not (world.connector.loading or world.connector.sending)
    assert not (world.manager._loads or world.manager.tables.entries)
    check_nothing_is_held(world)


CASES: dict[str, dict[str, Any]] = {
    "ample": {"num_blocks": 4000},
    "tight": {"num_blocks": 80},
    "synchronous": {"num_blocks": 80, "faults": {"async": 0}},
    "asynchronous": {"num_blocks": 80, "faults": {"async": 1}},
    "all fail": {"num_blocks": 80, "faults": {"failed": 1}},
    "overlapping": {"num_blocks": 80, "overlapping": True, "faults": {"async": 1}},
    # vLLM samples from a synchronous load that failed if the next step is planned already.
    "overlapping, no failures": {"num_blocks": 80, "overlapping": True, "faults": {"failed": 0}},
    "priority": {"num_blocks": 80, "policy": "priority"},
    "drafts": {"num_blocks": 80, "drafts": 3},
    "chunks": {"num_blocks": 80, "budget": 24},
    "without a cache": {"num_blocks": 80, "caching": False},
}


@pytest.mark.parametrize("case", CASES)
def test_never_a_wrong_block_and_no_leak(case: str, folder: Path) -> None:
    world = make(folder, **CASES[case])
    drive_with_aborts(world, seed=13, count=1500)
    faults, counts = world.connector.faults, world.connector.counts
    assert (counts["sync"] > 100) == (faults["async"] < 1), counts
    assert (counts["async"] > 100) == (faults["async"] > 0), counts
    assert (counts["failed"] > 50) == (faults["failed"] > 0), counts
    assert (counts["aborted"] > 10) == (faults["async"] > 0), counts
    assert counts["sent"] > 100
    assert (world.preemptions > 20) == (case != "ample")
    check_all_is_closed(world)


def test_without_a_cache_both_schedule_the_same_in_every_step(folder: Path) -> None:
    """Loads of both kinds, failures, delays and sends: who is admitted, who is preempted, how many
    blocks each has."""
    steps = []
    for ours in (False, True):
        world, seen = make(folder, ours=ours, num_blocks=80, caching=False), []
        for name, tokens, more in requests(17, 1000, 4):
            world.add(name, tokens, **more)
            for _ in range(3):
                step = world.step()
                blocks = [len(new.block_ids[0]) for new in step.scheduled_new_reqs]
                loading = {name: len(load.table) for name, load in world.connector.loading.items()}
                free = world.manager.block_pool.get_num_free_blocks()
                scheduled = dict(step.num_scheduled_tokens)
                seen.append((scheduled, step.preempted_req_ids, blocks, loading, free))
        world.drain()
        assert world.worker.wrong == []
        assert min(world.preemptions, *world.connector.counts.values(), 20) == 0  # no aborts
        assert min(world.connector.counts[kind] for kind in ("sync", "async", "failed")) > 50
        steps.append((seen, world.outputs, world.connector.counts))
    assert steps[0] == steps[1]


def test_one_after_the_other_both_match_the_same_before_each_load(folder: Path) -> None:
    """The connector gets the same local hits, in whole blocks, also after failed loads."""
    settings: dict[str, Any] = {"num_blocks": 20_000}
    found, tokens = [], []
    for ours in (False, True):
        world = make(folder, ours=ours, **settings)
        for name, prompt, more in requests(19, 1000, 4):
            world.add(name, prompt, **more)
            world.drain()
        assert world.worker.wrong == []
        assert min(world.connector.counts[kind] for kind in ("sync", "async", "failed")) > 50
        found.append(world.connector.local)
        tokens.append(world.outputs)
    assert found[0] == found[1]
    assert tokens[0] == tokens[1]


def test_events_are_the_contents_after_every_step(folder: Path) -> None:
    """A load has no event before it has ended."""
    world, index = make(folder, num_blocks=100, budget=40, events=True), Index()
    take_events = world.manager.take_events

    def taken() -> Any:
        events = take_events()
        index.take(events)
        return events

    world.manager.take_events = taken
    for name, tokens, more in requests(5, 1000, 4):
        world.add(name, tokens, **more)
        for _ in range(2):
            world.step()
            taken()
            assert index.held == contents(world)
    assert index.surprises == []
    assert min(world.connector.counts[kind] for kind in ("sync", "async", "failed")) > 50


@pytest.mark.parametrize("is_async", [False, True])
def test_a_prefix_that_is_being_loaded_is_matched_by_no_one(is_async: bool, folder: Path) -> None:
    world = make(folder, faults={"failed": 0, "sent": 0})
    connector, prompt = world.connector, list(range(40))
    connector.fixed = {"first": (32, is_async)}
    world.add("first", prompt)
    world.add("second", [*prompt[:32], 99])
    world.step()
    assert connector.local == {"first": [0], "second": [0]}
    while connector.loading:
        world.step()
    world.add("third", [*prompt[:32], 98])
    world.step()
    assert connector.local["third"] == [32]
    world.drain()
    assert world.worker.wrong == []
    check_all_is_closed(world)


def test_a_request_aborted_during_its_load_keeps_its_blocks_until_it_ends(folder: Path) -> None:
    world = make(folder, faults={"failed": 0, "sent": 0})
    world.connector.fixed = {"aborted": (12, True)}
    world.add("aborted", list(range(14)))
    world.step()
    [load] = world.connector.loading.values()
    load.speed = 0
    world.abort("aborted")
    for _ in range(5):
        world.step()
    assert world.manager.get_block_ids("aborted") == ([1, 2, 3],)
    assert world.manager.tables.kv.usage().active == 4
    assert not world.scheduler.reset_prefix_cache()
    load.speed = 100
    world.drain()
    assert world.manager.tables.kv.stats().registered_blocks == 0
    check_all_is_closed(world)
