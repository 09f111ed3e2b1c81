"""Several groups of layers, and sliding windows, in vLLM's real Scheduler."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is in the peers' environment: make vllm-tests")

from tests.peers.rules import FULL_HIT, SAME, kinds
from tests.peers.test_differential import drive, requests
from tests.peers.world import Settings, World

GROUPS: dict[str, tuple[int | None, ...]] = {
    "one window": (8,),
    "full and window": (None, 8),
    "two windows": (None, 6, 13),
    "two full": (None, None, 8),
}
CASES: dict[str, dict[str, Any]] = {
    "one at a time": {},
    "overlapping": {"overlapping": True},
    "drafts": {"drafts": 3},
    "chunks": {"budget": 24},
    "without a cache": {"caching": False},
}


def check_nothing_is_held(world: World) -> None:
    """Without requests, no block is in use."""
    kv = world.manager.tables.kv
    kv.check()
    usage = kv.usage()
    assert (usage.active, usage.pinned) == (0, 0)
    assert world.scheduler.reset_prefix_cache()
    assert kv.usage().free == world.settings.num_blocks - 1


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("case", CASES)
def test_never_a_wrong_block_and_no_leak(case: str, groups: str, folder: Path) -> None:
    windows = GROUPS[groups]
    blocks = 70 * len(windows) if None in windows else 50
    settings = Settings(ours=True, num_blocks=blocks, windows=windows, **CASES[case])
    world = drive(World(settings, folder), seed=11, count=600)
    assert world.worker.reads > 30_000
    assert world.preemptions > 0 or groups == "one window"
    check_nothing_is_held(world)


@pytest.mark.parametrize("groups", ["one window", "full and window", "two full"])
def test_where_blocks_are_ample_both_find_the_same_but_for_full_hits(
    groups: str, folder: Path
) -> None:
    """Windows are whole blocks: otherwise vLLM's may need a block less than ours."""
    settings: dict[str, Any] = {"num_blocks": 60_000, "max_num_seqs": 64, "budget": 20_000}
    settings["windows"] = GROUPS[groups]
    stock, ours = (
        drive(World(Settings(ours=which, **settings), folder), 3, 600) for which in (False, True)
    )
    assert ours.outputs == stock.outputs
    lengths = {name: len(tokens) for name, tokens, _ in requests(3, 600, 4)}
    assert set(kinds([stock.hits, ours.hits], [None, None], lengths, 4)) == {SAME, FULL_HIT}
    check_nothing_is_held(ours)
