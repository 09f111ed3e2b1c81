"""Bugs about steps: KV that is not computed yet, and blocks that a running step still uses."""

from collections.abc import Callable

import pytest

from pyengine.kv_cache import HandleError, NoRoom, PlanError, Prefilled
from tests.bug_zoo.bugs import bug
from tests.bug_zoo.simulation import Pool


@bug("GeeeekExplorer/nano-vllm/issues/208", "GeeeekExplorer/nano-vllm/pull/209")
def test_a_prefix_is_reused_before_it_is_computed(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(8)
    first, second = pool.request(1, 2, 3, 4, 5), pool.request(1, 2, 3, 4, 6)
    step = pool.begin()
    step.prefill(first)
    assert step.prefill(second).num_cached_tokens == 4  # the same step writes it first
    assert pool.cached(1, 2, 3, 4) == 0  # others wait for the commit
    # Without the one that computes it, the other has nothing to read.
    assert step.plan.cancel(first.sequence) == [second.sequence.id]
    step.rollback()
    assert pool.cached(1, 2, 3, 4) == 0
    assert pool.usage() == (8, 0, 0, 0, 0)
    assert pool.compute(first, second) == [0, 4]


@bug("sgl-project/sglang/pull/28374")
def test_kv_of_an_aborted_request_is_cached(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(8)
    request = pool.request(*range(16), 0)
    step = pool.begin()
    step.prefill(request, 8)
    step.commit()
    step = pool.begin()
    step.prefill(request, 8)
    request.sequence.free()  # the second half is never computed
    step.rollback()
    assert pool.cached(*range(16)) == 8
    assert pool.usage() == (6, 2, 0, 0, 0)
    assert pool.compute(pool.request(*range(16), 0)) == [8]


@bug("GeeeekExplorer/nano-vllm/issues/114", "GeeeekExplorer/nano-vllm/pull/199")
def test_a_cached_prompt_leaves_nothing_to_compute(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(8)
    pool.compute(pool.request(*range(8)))
    again = pool.request(*range(8))
    step = pool.begin()
    answer = step.prefill(again)
    assert isinstance(answer, Prefilled)
    assert (answer.num_tokens, answer.samples) == (1, True)
    step.launch()
    assert step.arrays["slot_mapping"][0] == -1  # computed for its logits, not written
    step.commit(0)
    assert pool.manager.stats().allocated_blocks == 2


@bug("vllm-project/vllm/pull/11186")
def test_a_cached_prompt_breaks_the_chain_after_it(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(8)
    pool.compute(pool.request(*range(8)))
    again = pool.request(*range(8))
    pool.compute(again, sampled=8)
    for token in (9, 10, 11, 12):
        step = pool.begin()
        step.decode(again)
        step.commit(token)
    assert again.tokens == list(range(13))
    assert pool.cached(*range(13)) == 12


@bug("vllm-project/vllm/pull/45357", "vllm-project/vllm-ascend/issues/14055")
def test_blocks_are_given_away_while_a_step_uses_them(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(2)
    request = pool.request(1, 2, 3)
    pool.compute(request, sampled=4)
    first, second = pool.begin(), None
    first.decode(request)
    first.launch()
    second = pool.begin()  # planned while the first one runs
    second.decode(request)
    second.launch()
    first.commit(5)  # the request turns out to have ended
    request.sequence.free()
    other = pool.request(7, 7, 7, 7, 7)
    third = pool.begin()
    assert isinstance(third.prefill(other), NoRoom)
    third.rollback()
    second.commit(6)
    assert pool.usage() == (1, 1, 0, 0, 0)
    assert pool.compute(other) == [0]


@bug("vllm-project/vllm-ascend/issues/13501", "vllm-project/vllm/pull/47653")
def test_a_window_leaves_a_block_that_a_step_reads(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(4, groups=[4])
    request = pool.request(*range(14))
    pool.compute(request, sampled=14)
    first = pool.begin()
    first.decode(request)  # position 14 sees positions 11 to 14
    read = first.launch().arrays["block_tables"][0][2]
    second = pool.begin()
    second.decode(request)  # position 15 sees positions 12 to 15: the last block alone
    other = pool.request(*range(20, 30))
    assert isinstance(second.prefill(other), NoRoom)
    assert pool.manager.state(read) == "active"
    second.launch()
    first.commit(15)
    second.commit(16)
    assert pool.manager.state(read) == "evictable"
    assert pool.compute(other) == [0]


@bug("RBLN-SW/vllm-rbln/pull/676")
def test_a_preempted_request_keeps_old_blocks(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(4)
    request = pool.request(1, 2, 3, 4, 5)
    pool.compute(request, sampled=6)
    step = pool.begin()
    step.decode(request)
    with pytest.raises((PlanError, HandleError)):
        request.sequence.reset()  # not while a step has it
    step.commit(7)
    request.sequence.reset()
    assert request.table == []
    other = pool.request(*range(20, 35), 0)
    pool.compute(other)  # it takes all blocks
    other.sequence.free()
    assert pool.compute(request) == [0]
    assert len(request.table) == 2


@bug(
    "sgl-project/sglang-jax/pull/982",
    "sgl-project/sglang/issues/28702",
    "FlashML-org/FreeToken/issues/204",
)
def test_blocks_are_freed_twice(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(4)
    request = pool.request(1, 2, 3, 4)
    pool.compute(request)
    step = pool.begin()
    step.plan.decode([request.sequence], lookahead=4)  # a slot beyond the end
    step.rollback()
    assert request.sequence.trim(4) == 0
    sequence = request.sequence
    sequence.free()
    with pytest.raises(HandleError):
        sequence.free()
    with pytest.raises(HandleError):
        sequence.trim(4)
    del sequence, request
    assert pool.usage() == (3, 1, 0, 0, 0)
    requests = [pool.request(at, at, at) for at in range(10, 14)]
    pool.compute(*requests)
    blocks = [block for request in requests for block in request.table]
    assert sorted(blocks) == [0, 1, 2, 3]  # none has two owners
