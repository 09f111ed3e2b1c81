"""Partial reuse and replay through the binding: blocks to copy, slots, counters, refusals."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pyengine.integrations.nano_vllm import BlockManager as NanoVllmManager
from pyengine.integrations.vllm_tables import Tables
from pyengine.kv_cache import BlockManager, NoBudget, PlanError, Prefilled, Sequence, StepBuffers

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
    assert manager.state(source) == "pinned"
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


def test_a_commit_whose_copies_were_not_read_is_refused() -> None:
    manager = BlockManager(8, BLOCK, events=True)
    computed(manager, list(range(20)))
    prompt = [*range(13), 60, 61, 62]
    sequence = manager.sequence(prompt)
    plan = manager.begin_step(64)
    plan.prefill(sequence, 64)
    manager.take_events()
    with pytest.raises(PlanError, match=r"step 2 copies 1 block .*copies\(\).*partial_reuse"):
        plan.commit([1])
    with pytest.raises(PlanError, match=r"copies\(\)"):
        plan.commit([1], [1])
    assert manager.take_events() == []
    assert manager.match_prefix(prompt).num_tokens == 8  # nothing unwritten is cached
    manager.check()
    plan.copies()
    plan.commit([1])
    assert manager.match_prefix(prompt).num_tokens == 16
    manager.check()


def test_copies_that_are_planned_after_they_were_read_are_read_again() -> None:
    manager = BlockManager(16, BLOCK)
    computed(manager, list(range(20)))
    first, second = (manager.sequence([*range(13), last, last]) for last in (60, 70))
    plan = manager.begin_step(64)
    plan.prefill(first, 64)
    plan.copies()
    plan.prefill(second, 64)
    with pytest.raises(PlanError, match="step 2 copies 2 blocks"):
        plan.commit([1, 1])
    plan.cancel(second)
    plan.commit([1])  # the copy that is left was read
    manager.check()


def test_a_step_whose_copies_were_not_read_rolls_back() -> None:
    manager = BlockManager(8, BLOCK)
    computed(manager, list(range(20)))
    before = manager.usage()
    sequence = manager.sequence([*range(13), 60, 61, 62])
    plan = manager.begin_step(64)
    plan.prefill(sequence, 64)
    plan.rollback()
    assert manager.usage() == before
    manager.check()


@pytest.mark.parametrize(
    "make",
    [
        lambda: NanoVllmManager(8, BLOCK).kv,
        lambda: Tables(8, BLOCK, caching=True).kv,
    ],
    ids=["nano-vllm", "vllm"],
)
def test_integrations_that_copy_nothing_reuse_whole_blocks(
    make: Callable[[], BlockManager],
) -> None:
    manager = make()
    tokens = list(range(20))
    first = manager.sequence(tokens)
    first.extend(20)
    first.publish(20)
    sequence = manager.sequence([*tokens[:13], 60, 61, 62])
    plan = manager.begin_step(64)
    answer = plan.prefill(sequence, 64)
    assert isinstance(answer, Prefilled)
    assert (answer.num_cached_tokens, plan.copies()) == (8, [])
    plan.rollback()


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
    for item, num_tokens in ((sequence, 18), (fresh, 2)):
        answer = plan.prefill(item, 64, replay=replay)
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
