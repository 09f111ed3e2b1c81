"""Bugs about blocks that several sequences share, and blocks that should be one."""

from collections.abc import Callable

import pytest

from pyengine.kv_cache import NoRoom, PlanError, Removed, Stored
from tests.bug_zoo.bugs import bug
from tests.bug_zoo.simulation import Pool, Request


def pair_with_equal_tokens(pool: Pool) -> tuple[Request, Request]:
    """Two requests, one token before they both fill a block with the same tokens."""
    pair = pool.request(1, 2, 3), pool.request(1, 2, 3)
    pool.compute(*pair, sampled=4)
    return pair


@bug("sgl-project/mini-sglang/pull/142")
def test_a_table_names_the_duplicate_that_was_freed(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(4)
    first, second = pair_with_equal_tokens(pool)
    step = pool.begin()
    step.decode(first, second)
    [remapping] = step.commit(5, 6)
    assert second.table == first.table == [remapping.new_block]
    assert pool.manager.state(remapping.old_block) == "free"
    other = pool.request(7, 7, 7, 7, 7)
    pool.compute(other)
    assert remapping.old_block in other.table  # written with other tokens
    step = pool.begin()
    step.decode(second)
    step.commit(0)  # reads all of its tokens


@bug("GeeeekExplorer/nano-vllm/pull/243")
def test_a_merge_reuses_a_block_in_the_free_queue(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(4)
    first, second = pair_with_equal_tokens(pool)
    step = pool.begin()
    step.decode(first)
    step.commit(5)
    first.sequence.free()  # its block is cached and can be evicted
    [evictable] = [at for at in range(4) if pool.manager.state(at) == "evictable"]
    step = pool.begin()
    step.decode(second)
    assert step.commit(6) == []  # the new block takes its place in the index
    assert evictable not in second.table
    assert pool.manager.state(evictable) == "free"
    assert pool.cached(1, 2, 3, 4) == 4
    assert pool.manager.stats().taken_over_blocks == 1


@bug("GeeeekExplorer/nano-vllm/issues/219", "ovg-project/kvcached/issues/401")
def test_equal_prompts_of_one_step_are_stored_twice(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(8)
    requests = [pool.request(*range(8), last) for last in range(3)]
    assert pool.compute(*requests) == [0, 8, 8]
    assert pool.usage() == (3, 0, 5, 0, 0)
    assert len(pool.manager.cached_hashes()) == 2
    for request in requests[:2]:
        request.sequence.free()
    assert pool.cached(*range(8)) == 8


@bug("vllm-project/vllm/pull/55092", "vllm-project/vllm/pull/48933", "ai-dynamo/dynamo/pull/8012")
def test_a_removed_event_while_a_copy_is_left(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(4, events=True)
    first, second = pair_with_equal_tokens(pool)
    step = pool.begin()
    step.decode(first, second)
    step.commit(5, 6)
    [stored] = pool.manager.take_events()
    assert isinstance(stored, Stored) and stored.tokens == [1, 2, 3, 4]
    first.sequence.free()
    pool.manager.evict_all()
    assert pool.manager.take_events() == []  # the second one has it
    second.sequence.free()
    pool.manager.evict(1)[1].release()
    [removed] = pool.manager.take_events()
    assert isinstance(removed, Removed) and removed.hash == stored.hash


@bug("xLLM-AI/xllm/pull/1984")
def test_forks_write_to_the_block_they_share(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(4)
    first = pool.request(1, 2)
    pool.compute(first, sampled=3)
    second = Request(first.sequence.fork(3), list(first.tokens), first.weights)
    step = pool.begin()
    step.decode(first, second)
    with pytest.raises(PlanError):
        step.plan.commit([4, 5])  # the copy was not made
    step.commit(4, 5)
    assert first.table != second.table
    step = pool.begin()
    step.decode(first, second)
    step.commit(6, 7)
    assert (first.tokens, second.tokens) == ([1, 2, 3, 4, 6], [1, 2, 3, 5, 7])


@bug("xLLM-AI/xllm/issues/828", "xLLM-AI/xllm/pull/1264", "sgl-project/sglang/issues/35270")
def test_a_shared_block_is_counted_for_each_request(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(8)
    requests = [pool.request(*range(8), last) for last in range(4)]
    pool.compute(*requests)
    assert pool.usage() == (2, 0, 6, 0, 0)
    pin = requests[0].sequence.pin()
    shared = requests[0].table[0]
    assert (pool.manager.refs(shared), pool.manager.seq_refs(shared)) == (5, 4)
    for request in requests:
        request.sequence.free()
    assert pool.usage() == (6, 0, 0, 2, 0)  # in no table any more, and not evictable
    pin.release()
    assert pool.usage() == (6, 2, 0, 0, 0)


@bug("vllm-project/vllm/pull/11565")
def test_a_refused_request_leaves_references(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(4)
    request = pool.request(*range(8), 0)
    pool.compute(request)
    request.sequence.free()
    before = pool.usage()
    longer = pool.request(*range(8), *range(20, 32))
    step = pool.begin()
    assert isinstance(step.prefill(longer), NoRoom)
    assert pool.usage() == before  # while the step is open, too
    assert longer.table == []
    step.rollback()
    assert pool.usage() == before == (2, 2, 0, 0, 0)


@bug("NVIDIA/Megatron-LM/pull/5822", "dphnAI/sonar/pull/661")
def test_a_request_evicts_the_blocks_it_matched(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(4)
    request = pool.request(*range(12), 0)
    pool.compute(request)
    request.sequence.free()
    assert pool.usage() == (1, 3, 0, 0, 0)
    # Four blocks can be allocated, but three of them are its own prefix.
    step = pool.begin()
    answer = step.prefill(pool.request(*range(12), *range(20, 25)))
    assert isinstance(answer, NoRoom) and (answer.needed, answer.available) == (5, 4)
    step.rollback()
    assert pool.compute(pool.request(*range(12), 20)) == [12]
    assert pool.manager.stats().evicted_blocks == 0
