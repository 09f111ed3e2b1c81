"""Partial reuse and replay through the binding: blocks to copy, slots, counters, refusals."""

from typing import Any

import numpy as np
import pytest

from pyengine.cache import BlockManager, NoBudget, Prefilled, Sequence, StepBuffers

BLOCK = 8


def computed(manager: BlockManager, tokens: list[int]) -> Sequence:
    """A sequence of these tokens, each computed."""
    sequence = manager.sequence(tokens)
    plan = manager.begin_step(len(tokens))
    assert isinstance(plan.prefill(sequence, len(tokens)), Prefilled)
    plan.commit([1])
    return sequence


def slots(plan: Any) -> list[int]:
    """The slot of each token of a plan of one prompt."""
    names = "input_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens"
    arrays = {name: np.zeros(64, np.int64) for name in (*names, "logits_indices")}
    plan.fill(StepBuffers(**arrays, block_tables=np.zeros((4, 16), np.int64)))
    return arrays["slot_mapping"][: plan.num_tokens].tolist()


def test_what_is_equal_is_copied_and_the_rest_is_computed() -> None:
    manager = BlockManager(8, BLOCK)
    computed(manager, list(range(20)))
    sequence = manager.sequence([*range(13), 60, 61, 62])
    plan = manager.begin_step(64)
    answer = plan.prefill(sequence, 64)
    assert isinstance(answer, Prefilled)
    assert (answer.num_cached_tokens, answer.num_tokens, answer.samples) == (13, 3, True)
    [(source, copy)] = plan.copies()
    assert manager.state(source) == "leased"
    assert sequence.block_table[1] == copy
    assert slots(plan) == [copy * BLOCK + at for at in (5, 6, 7)]
    plan.commit([1])
    assert sequence.num_cached_tokens == 13
    stats = manager.stats()
    assert (stats.partial_hits, stats.partial_tokens, stats.copied_blocks) == (1, 5, 1)
    assert stats.cached_tokens == 13
    manager.check()


@pytest.mark.parametrize(
    "settings", [{"partial_reuse": False}, {"prefix_caching": False}, {"read_cache": False}]
)
def test_it_can_be_switched_off(settings: dict[str, bool]) -> None:
    read_cache = settings.pop("read_cache", True)
    manager = BlockManager(8, BLOCK, **settings)
    computed(manager, list(range(20)))
    sequence = manager.sequence([*range(13), 60, 61, 62], read_cache=read_cache)
    plan = manager.begin_step(64)
    plan.prefill(sequence, 64)
    assert plan.copies() == []
    plan.commit([1])
    assert manager.stats().partial_hits == 0


def test_cached_tokens_are_replayed() -> None:
    manager = BlockManager(8, BLOCK)
    computed(manager, list(range(16)))
    sequence = manager.sequence([*range(16), 60, 61])
    plan = manager.begin_step(6)
    assert isinstance(plan.prefill(sequence, 2, replay=3), NoBudget)
    answer = plan.prefill(sequence, 64, replay=3)
    assert isinstance(answer, Prefilled)
    assert (answer.num_cached_tokens, answer.num_tokens) == (13, 5)
    assert plan.budget_left == 1
    assert slots(plan)[:3] == [-1, -1, -1]
    plan.commit([1])
    assert sequence.num_cached_tokens == 13
    assert manager.stats().rematches == 0
    manager.check()


@pytest.mark.parametrize("replay", [16, 17, 2**40])
def test_no_more_is_replayed_than_was_found(replay: int) -> None:
    manager = BlockManager(8, BLOCK)
    computed(manager, list(range(16)))
    sequence, fresh = manager.sequence([*range(16), 60, 61]), manager.sequence([70, 71])
    plan = manager.begin_step(64)
    for one, num_tokens in ((sequence, 18), (fresh, 2)):
        answer = plan.prefill(one, 64, replay=replay)
        assert isinstance(answer, Prefilled)
        assert (answer.num_cached_tokens, answer.num_tokens) == (0, num_tokens)
    assert slots(plan)[:16] == [-1] * 16 and min(slots(plan)[16:20]) >= 0
    plan.commit([1, 2])
    manager.check()


def test_what_is_found_later_is_counted() -> None:
    manager = BlockManager(16, BLOCK)
    sequence = manager.sequence(list(range(40)))
    plan = manager.begin_step(8)
    plan.prefill(sequence, 8)
    plan.commit([])
    computed(manager, list(range(24)))
    plan = manager.begin_step(64)
    answer = plan.prefill(sequence, 64)
    assert isinstance(answer, Prefilled) and answer.num_cached_tokens == 16
    plan.commit([1])
    assert manager.stats().rematches == 1
