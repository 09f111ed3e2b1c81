"""vLLM's real Scheduler over both managers, driven by the same random requests."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is in the peers' environment: make vllm-tests")

from tests.peers.world import Settings, World


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


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
    """The ledger, when everybody is gone: the null block alone is in use."""
    kv = world.manager.tables.kv
    kv.check()
    ledger = kv.ledger()
    assert (ledger.active, ledger.leased) == (1, 0)
    assert world.scheduler.reset_prefix_cache()
    assert kv.ledger().free == world.settings.num_blocks - 1


CASES = {
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


def kinds_of_hits(stock: World, ours: World, seed: int, count: int) -> Counter[str]:
    """Request by request, why what was found differs when it was first admitted."""
    size = ours.settings.block_size
    lengths = {name: len(tokens) for name, tokens, _ in requests(seed, count, size)}
    return Counter(
        explain(length, stock.hits[name][:1], ours.hits[name][:1], size)
        for name, length in lengths.items()
    )


def explain(length: int, stock: list[int], ours: list[int], block_size: int) -> str:
    """Why a request found what it found."""
    if stock == ours:
        return "the same"
    if not stock or not ours:
        return "aborted before it was admitted"
    if length % block_size == 0 and ours[0] == length - 1 and stock[0] == length - block_size:
        return "a full hit: one token is computed, not a block"
    return "evicted earlier" if stock[0] > ours[0] else "kept longer"


def test_where_blocks_are_ample_both_find_the_same_but_for_full_hits(folder: Path) -> None:
    settings = {"num_blocks": 60_000, "max_num_seqs": 64, "budget": 20_000}
    stock, ours = (
        drive(World(Settings(ours=which, **settings), folder), 3, 3000) for which in (False, True)
    )
    assert ours.outputs == stock.outputs
    kinds = kinds_of_hits(stock, ours, 3, 3000)
    assert set(kinds) <= {"the same", "a full hit: one token is computed, not a block"}
    assert min(kinds.values()) > 100
    check_nothing_is_held(ours)


def test_twenty_thousand_requests(folder: Path) -> None:
    settings = {"num_blocks": 400, "max_num_seqs": 16}
    stock, ours = (
        drive(World(Settings(ours=which, **settings), folder), 7, 20_000) for which in (False, True)
    )
    assert ours.outputs == stock.outputs
    kinds = kinds_of_hits(stock, ours, 7, 20_000)
    found = [sum(hits[0] for hits in world.hits.values() if hits) for world in (stock, ours)]
    print(dict(kinds), "tokens found:", found)
    assert kinds["the same"] > 17_000
    assert kinds["evicted earlier"] < 100
    assert found[1] > found[0]
    check_nothing_is_held(ours)


def test_without_a_cache_both_schedule_the_same_in_every_step(folder: Path) -> None:
    """Where nothing is found, the contract is the same: who is admitted, who is preempted, how many
    blocks each has."""
    settings = {"num_blocks": 80, "caching": False}
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
