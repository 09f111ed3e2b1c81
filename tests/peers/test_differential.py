"""vLLM's real Scheduler over both managers, driven by the same random requests."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is in the peers' environment: make vllm-tests")

from tests.peers.rules import FULL_HIT, SAME, arms, kinds
from tests.peers.world import Settings, World
from tests.support.docs import table

DOCUMENT = "docs/benchmarks/vllm.md"


def requests(
    seed: int, count: int, block_size: int
) -> Iterator[tuple[str, list[int], dict[str, Any]]]:
    """Prompts that share prefixes or all; some with a salt, some that do not read the cache."""
    chance = random.Random(seed)
    known: list[list[int]] = [[]]
    for number in range(count):
        base = chance.choice(known[-40:])
        tokens = base[: chance.randint(0, len(base))] if chance.random() < 0.6 else list(base)
        tokens = tokens + [chance.randrange(50) for _ in range(chance.choice((0, 1, 3, 9, 30)))]
        if chance.random() < 0.3:
            tokens = tokens[: max(len(tokens) // block_size * block_size, 1)]
        tokens = (tokens or [chance.randrange(50)])[:200]
        known.append(tokens)
        yield (
            f"r{number}",
            tokens,
            {
                "max_tokens": chance.choice((1, 2, 5, 9, 24, 60)),
                "salt": chance.choice((None,) * 8 + ("a", "b")),
                "reads": chance.random() > 0.03,
                "priority": chance.randrange(3),
                "arrival": float(number),
            },
        )


def drive(world: World, seed: int, count: int) -> World:
    """All requests, in bursts, with aborts and resets between the steps."""
    chance = random.Random(seed + 1)
    alive: list[str] = []
    for name, tokens, settings in requests(seed, count, world.settings.block_size):
        world.add(name, tokens, **settings)
        alive = [*alive[-30:], name]
        if chance.random() < 0.02:
            world.abort(chance.choice(alive))
        if chance.random() < 0.002:
            world.scheduler.reset_prefix_cache()
        while chance.random() < 0.7:
            world.step()
    world.drain()
    assert world.worker.wrong == []
    return world


def check_nothing_is_held(world: World) -> None:
    """Without requests, only the null block is in use."""
    kv = world.manager.tables.kv
    kv.check()
    usage = kv.usage()
    assert (usage.active, usage.pinned) == (1, 0)
    assert world.scheduler.reset_prefix_cache()
    assert kv.usage().free == world.settings.num_blocks - 1


CASES: dict[str, dict[str, Any]] = {
    "ample": {"num_blocks": 4000},
    "tight": {"num_blocks": 80},
    "overlapping": {"num_blocks": 80, "overlapping": True},
    "priority": {"num_blocks": 80, "policy": "priority"},
    "drafts": {"num_blocks": 80, "drafts": 3},
    "chunks": {"num_blocks": 80, "budget": 24},
    "without a cache": {"num_blocks": 80, "caching": False},
}


@pytest.mark.parametrize("case", CASES)
def test_never_a_wrong_block_and_no_leak(case: str, folder: Path) -> None:
    world = drive(World(Settings(ours=True, **CASES[case]), folder), seed=11, count=2000)
    assert world.worker.reads > 100_000
    assert (world.preemptions > 50) == (case != "ample")
    check_nothing_is_held(world)


def test_where_blocks_are_ample_both_find_the_same_but_for_full_hits(folder: Path) -> None:
    settings: dict[str, Any] = {"num_blocks": 60_000, "max_num_seqs": 64, "budget": 20_000}
    stock, ours = (
        drive(World(Settings(ours=which, **settings), folder), 3, 3000) for which in (False, True)
    )
    assert ours.outputs == stock.outputs
    lengths = {name: len(tokens) for name, tokens, _ in requests(3, 3000, 4)}
    found = kinds([stock.hits, ours.hits], [None, None], lengths, 4)
    assert set(found) == {SAME, FULL_HIT}
    assert min(found.values()) > 100
    check_nothing_is_held(ours)


def test_twenty_thousand_requests_and_why_they_find_more(folder: Path) -> None:
    """Every difference is due to a rule that only one manager has; the page counts them."""
    found: list[dict[str, list[int]]] = []
    outputs, rules = [], []
    for arm in arms(folder, num_blocks=400, max_num_seqs=16):
        world = drive(arm.make(), 7, 20_000)
        found.append(world.hits)
        outputs.append(world.outputs)
        rules.append(arm.adds)
    assert all(each == outputs[0] for each in outputs)
    for before, hits, adds in zip(found, found[1:], rules[1:], strict=False):
        assert (hits == before) == (adds is None), adds
    lengths = {name: len(tokens) for name, tokens, _ in requests(7, 20_000, 4)}
    counts = kinds(found, rules, lengths, 4)
    tokens = [sum(hits[0] for hits in each.values() if hits) for each in found]
    print(dict(counts), "tokens found:", tokens)
    rows = table(DOCUMENT, "requests", "reason for the difference")
    assert {row[1]: int(row[0].replace(",", "")) for row in rows} == dict(counts)
    assert all(hits[0] >= found[0][name][0] for name, hits in found[-1].items() if hits)
    check_nothing_is_held(world)


def test_without_a_cache_both_schedule_the_same_in_every_step(folder: Path) -> None:
    """Where nothing is found, the contract is the same: who is admitted, who is preempted, how many
    blocks each has."""
    settings: dict[str, Any] = {"num_blocks": 80, "caching": False}
    steps = []
    for which in (False, True):
        world, seen = World(Settings(ours=which, **settings), folder), []
        for name, tokens, more in requests(9, 1500, 4):
            world.add(name, tokens, **more)
            for _ in range(3):
                step = world.step()
                blocks = [len(new.block_ids[0]) for new in step.scheduled_new_reqs]
                seen.append((dict(step.num_scheduled_tokens), step.preempted_req_ids, blocks))
        world.drain()
        assert world.worker.wrong == []
        assert world.preemptions > 20
        steps.append(seen)
    assert steps[0] == steps[1]
