"""Retention: which idle contents go first, for good or for a while."""

import time
from typing import Any

import pytest

from pyengine.cache import BlockManager, ConfigError
from tests.support.blocks import leave_idle, unchanged

BLOCK = 4


def prompt(start: int, blocks: int = 2) -> list[int]:
    return list(range(start, start + blocks * BLOCK))


def cached(manager: BlockManager, tokens: list[int]) -> int:
    """Tokens of these that are in the cache."""
    with manager.match_prefix(tokens) as lease:
        return lease.num_tokens


def test_low_goes_first_then_normal_then_high() -> None:
    manager = BlockManager(6, BLOCK)
    for start in (0, 100, 200):
        leave_idle(manager, prompt(start))
    assert manager.retain(prompt(0), "high") == 8
    assert manager.retain(prompt(200), "low") == 8
    for start, held in ((300, (8, 8, 0)), (400, (8, 0, 0))):
        leave_idle(manager, prompt(start))
        manager.retain(prompt(start), "high")
        assert tuple(cached(manager, prompt(old)) for old in (0, 100, 200)) == held
    leave_idle(manager, prompt(500))  # everything is high: least recently used first
    assert sum(cached(manager, prompt(start)) for start in (0, 300, 400, 500)) == 6 * BLOCK
    manager.check()


def test_retention_takes_nothing_away_from_admission() -> None:
    manager = BlockManager(2, BLOCK)
    leave_idle(manager, prompt(0))
    manager.retain(prompt(0), "high")
    assert (manager.ledger().idle, manager.ledger().available) == (2, 2)
    leave_idle(manager, prompt(100))
    assert cached(manager, prompt(0)) == 0


def test_only_what_is_cached_is_covered() -> None:
    manager = BlockManager(4, BLOCK)
    leave_idle(manager, prompt(0))
    assert manager.retain([*prompt(0), 9, 9, 9, 9], "high") == 8
    assert manager.retain(prompt(0)[:7], "high") == 4
    assert manager.retain(prompt(100), "high") == 0
    assert manager.retain(prompt(0), "high", namespace=b"other") == 0


def test_a_priority_ends_with_its_time() -> None:
    manager = BlockManager(4, BLOCK)
    leave_idle(manager, prompt(0))
    manager.retain(prompt(0), "high", ttl=0.01)
    leave_idle(manager, prompt(100))
    time.sleep(0.02)
    leave_idle(manager, prompt(200))  # the first step after it: as if it had been used then
    leave_idle(manager, prompt(300))
    assert [cached(manager, prompt(start)) for start in (0, 100, 200, 300)] == [0, 0, 8, 8]


def test_a_later_word_counts() -> None:
    manager = BlockManager(4, BLOCK)
    leave_idle(manager, prompt(0))
    manager.retain(prompt(0), "high", ttl=0.01)
    manager.retain(prompt(0), "high")
    time.sleep(0.02)
    for start in range(100, 500, 100):
        leave_idle(manager, prompt(start))
    assert cached(manager, prompt(0)) == 8
    manager.retain(prompt(0), "normal")
    for start in range(500, 700, 100):
        leave_idle(manager, prompt(start))
    assert cached(manager, prompt(0)) == 0


@pytest.mark.parametrize("name", ["", "HIGH", "urgent", "0"])
def test_a_priority_that_does_not_exist(name: str) -> None:
    manager = BlockManager(4, BLOCK)
    leave_idle(manager, prompt(0))
    with unchanged(manager), pytest.raises(ConfigError, match=rf'"{name}".*low, normal, high'):
        manager.retain(prompt(0), name)


@pytest.mark.parametrize("ttl", [0, -1, -0.5, float("nan"), float("inf"), 1e300])
def test_a_time_that_is_none(ttl: Any) -> None:
    manager = BlockManager(4, BLOCK)
    leave_idle(manager, prompt(0))
    with unchanged(manager), pytest.raises(ConfigError, match="ttl="):
        manager.retain(prompt(0), "high", ttl=ttl)
