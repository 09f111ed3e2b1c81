"""Groups of recurrent layers beside one of full attention, in vLLM's real Scheduler."""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is in the peers' environment: make vllm-tests")

from pyengine.integrations.vllm_manager import KVCacheManager
from tests.peers.test_differential import check_nothing_is_held, drive, requests
from tests.peers.world import STATE, Settings, World

GROUPS: dict[str, tuple[int | str | None, ...]] = {
    "one": (None, STATE),
    "three": (None, STATE, STATE, STATE),
    "states first": (STATE, None, STATE),
}
CASES: dict[str, dict[str, Any]] = {
    "one at a time": {},
    "overlapping": {"overlapping": True},
    "priority": {"policy": "priority"},
    "chunks": {"budget": 24},
    "exported states": {"checkpoint_alignment": 1},
    "some states": {"retention_interval": 0},
    "some exported states, overlapping chunks": {
        "checkpoint_alignment": 8,
        "overlapping": True,
        "budget": 50,
        "retention_interval": 0,
    },
    "without a cache": {"caching": False},
}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("case", CASES)
def test_never_a_wrong_state_and_no_leak(case: str, groups: str, folder: Path) -> None:
    settings = Settings(ours=True, num_blocks=110, windows=GROUPS[groups], **CASES[case])
    world = World(settings, folder)
    assert isinstance(world.manager, KVCacheManager)
    drive(world, seed=11, count=400)
    assert world.worker.reads > 20_000
    assert world.preemptions > 0
    if settings.caching:
        assert world.manager.tables.kv.stats().loaded_snapshots > 50
    check_nothing_is_held(world)


def nulls(tables: Any) -> list[list[bool]]:
    """Where the tables of a request have a block."""
    return [[block != 0 for block in table] for table in tables]


@pytest.mark.parametrize(
    "settings",
    [
        {"caching": False},
        {"caching": False, "overlapping": True},
        {},
        {"overlapping": True, "budget": 30},
        {"checkpoint_alignment": 1},
        {"checkpoint_alignment": 4, "budget": 50},
        {"retention_interval": 0},
        {"retention_interval": 12, "overlapping": True},
        {"retention_interval": 0, "checkpoint_alignment": 1, "budget": 30},
        {"retention_interval": 8, "checkpoint_alignment": 1, "budget": 30},
    ],
    ids=str,
)
@pytest.mark.parametrize("groups", GROUPS)
def test_both_schedule_the_same_in_every_step(
    settings: dict[str, Any], groups: str, folder: Path
) -> None:
    """The chunks, the hits, the columns that have blocks, and the number of free blocks: without a
    cache in a small pool, and with one if no two requests compute the same."""
    caching = settings.get("caching", True)
    pool: dict[str, Any] = {"num_blocks": 60_000, "max_num_seqs": 1}
    if not caching:
        pool = {"num_blocks": 90}
    steps = []
    for which in (False, True):
        world = World(Settings(ours=which, windows=GROUPS[groups], **pool, **settings), folder)
        assert isinstance(world.manager, KVCacheManager) == which
        seen: list[Any] = []
        for name, tokens, more in requests(9, 200, 4):
            world.add(name, tokens, **more)
            for _ in range(5):
                step = world.step()
                free = world.manager.block_pool.get_num_free_blocks()
                seen.append((dict(step.num_scheduled_tokens), step.preempted_req_ids))
                seen += [
                    (new.req_id, new.num_computed_tokens, nulls(new.block_ids))
                    for new in step.scheduled_new_reqs
                ]
                tables = map(world.manager.get_block_ids, step.num_scheduled_tokens)
                seen += [free, *map(nulls, tables)]
        world.drain()
        assert world.worker.wrong == []
        assert caching or world.preemptions > 5
        steps.append(seen)
    for stock, ours in zip(*steps, strict=True):
        assert stock == ours


@pytest.mark.parametrize("case", ["one at a time", "overlapping", "exported states", "some states"])
def test_where_blocks_are_ample_both_find_the_same(case: str, folder: Path) -> None:
    settings: dict[str, Any] = {"num_blocks": 60_000, "max_num_seqs": 64, "budget": 20_000}
    settings |= CASES[case] | {"windows": GROUPS["states first"]}
    stock, ours = (
        drive(World(Settings(ours=which, **settings), folder), 3, 600) for which in (False, True)
    )
    assert ours.outputs == stock.outputs
    assert ours.hits == stock.hits
    assert sum(hits[0] > 0 for hits in ours.hits.values() if hits) > 200
    check_nothing_is_held(ours)


def test_a_chunk_that_crosses_a_boundary_leaves_no_state_there(folder: Path) -> None:
    """vLLM's Scheduler ends chunks at boundaries. A caller that does not gets no hit: the column
    before the boundary has the state of an earlier position."""
    world = World(Settings(ours=True, windows=(None, STATE)), folder)
    world.add("cut", list(range(20)))
    request, manager = world.scheduler.requests["cut"], world.manager
    for count in (6, 4, 6, 3):
        assert manager.allocate_slots(request, count) is not None
        request.num_computed_tokens += count
        tokens = [*range(request.num_computed_tokens), 99]
        prefix = manager.tables.kv.match_prefix(tokens)
        assert prefix.num_tokens == request.num_computed_tokens // 4 * 4
        assert prefix.num_state_tokens == (16 if request.num_computed_tokens >= 16 else 0)
        prefix.release()
    manager.free(request)
    check_nothing_is_held(world)


def test_a_state_that_this_step_computes_is_not_continued_in_it(folder: Path) -> None:
    world = World(Settings(ours=True, windows=(None, STATE)), folder)
    world.add("first", list(range(17)))
    world.add("second", [*range(16), 40, 41])
    first = world.step()
    assert list(first.num_scheduled_tokens) == ["first"]
    second = world.step()
    assert {new.req_id: new.num_computed_tokens for new in second.scheduled_new_reqs} == {
        "second": 16
    }
    world.drain()
    assert world.worker.wrong == []
    check_nothing_is_held(world)


def test_a_chunk_ends_where_attention_has_more_than_states(folder: Path) -> None:
    """The end of a prefix that others share gets a state, so that the next one continues it."""
    world = World(Settings(ours=True, windows=(None, STATE), retention_interval=0), folder)
    chance = random.Random(5)
    shared = [chance.randrange(50) for _ in range(21)]
    for number in range(3):
        world.add(f"r{number}", shared + [chance.randrange(50) for _ in range(30)])
        world.drain()
    assert [world.hits[f"r{number}"] for number in range(3)] == [[0], [0], [20]]
    assert world.worker.wrong == []
    check_nothing_is_held(world)
