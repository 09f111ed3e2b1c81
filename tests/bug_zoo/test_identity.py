"""Bugs about what a hit is: whose KV a block holds."""

from collections.abc import Callable

from tests.bug_zoo.bugs import bug
from tests.bug_zoo.simulation import Pool


@bug(
    "vllm-project/vllm/pull/12621", "NVIDIA/Megatron-LM/pull/4158", "vllm-project/aibrix/issues/749"
)
def test_other_tokens_with_the_same_hash(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(8, hash_bits=0)  # all hashes are equal
    first = pool.request(1, 2, 3, 4, 5)
    pool.compute(first)
    other = pool.request(9, 8, 7, 6, 5)
    assert pool.compute(other) == [0]
    assert set(first.table).isdisjoint(other.table)
    assert pool.cached(1, 2, 3, 4) == pool.cached(9, 8, 7, 6) == 4
    assert pool.cached(7, 7, 7, 7) == 0
    # Outside, a hash stands for one prefix: the other goes without.
    assert len(pool.manager.cached_hashes()) == pool.manager.stats().collisions == 1


@bug("vllm-project/vllm/pull/12603")
def test_equal_tokens_after_other_tokens(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(8)
    pool.compute(pool.request(1, 1, 1, 1, 5, 5, 5, 5, 0))
    other = pool.request(2, 2, 2, 2, 5, 5, 5, 5, 0)
    assert pool.compute(other) == [0]
    assert pool.cached(5, 5, 5, 5) == 0


@bug(
    "vllm-project/vllm/issues/30931",
    "vllm-project/vllm/issues/42125",
    "vllm-project/vllm/issues/44250",
)
def test_two_adapters_of_one_name(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(8)
    names = [b"style: digest of the weights 1", b"style: digest of the weights 2"]
    for name in [*names, *names]:
        request = pool.request(1, 2, 3, 4, 5, namespace=name, weights=name)
        pool.compute(request)
        request.sequence.free()
    assert pool.manager.stats().cached_tokens == 8  # the second time, each its own
    assert pool.cached(1, 2, 3, 4) == 0


@bug("InternLM/lmdeploy/issues/4917", "NVIDIA-NeMo/RL/pull/4018")
def test_cached_kv_outlives_the_weights(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(8)
    for step in (b"step 1", b"step 2"):
        request = pool.request(1, 2, 3, 4, 5, weights=step)
        assert pool.compute(request) == [0]
        request.sequence.free()
        assert pool.usage() == (7, 1, 0, 0, 0)
        pool.manager.advance_weights_version()
        assert pool.cached(1, 2, 3, 4) == 0
    assert pool.usage() == (8, 0, 0, 0, 0)


@bug("ovg-project/kvcached/issues/362")
def test_an_evicted_block_keeps_its_hash(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(2)
    old = pool.request(1, 2, 3, 4, 5)
    pool.compute(old)
    old.sequence.free()
    new = pool.request(6, 7, 8, 9, 10)
    pool.compute(new)  # it needs both blocks
    assert pool.manager.stats().evicted_blocks == 1
    assert pool.cached(1, 2, 3, 4) == 0
    new.sequence.free()
    again = pool.request(1, 2, 3, 4, 5)
    assert pool.compute(again) == [0]


@bug("NVIDIA/Megatron-LM/pull/5822", "llm-d/llm-d-inference-sim/issues/705")
def test_a_gap_in_a_prefix_counts_as_cached(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(8)
    request = pool.request(*range(12), 0)
    pool.compute(request)
    request.sequence.free()
    for left in (8, 4, 0):  # the end of a prefix is evicted first
        pool.manager.evict(1)[1].release()
        assert pool.cached(*range(12)) == left
    assert pool.usage() == (8, 0, 0, 0, 0)


@bug("vllm-project/vllm/issues/49125")
def test_a_block_that_is_not_full_is_found(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(8)
    request = pool.request(1, 2, 3, 4, 5, 6)
    pool.compute(request, sampled=7)
    assert len(pool.manager.cached_hashes()) == 1
    step = pool.begin()
    step.decode(request)
    step.commit(8)
    # A prompt that ends inside the block gets its own, with a copy of the equal tokens.
    assert pool.cached(1, 2, 3, 4, 5, 6, 7, 9) == 4
    step = pool.begin()
    step.decode(request)
    step.commit(9)
    other = pool.request(1, 2, 3, 4, 5, 6, 1, 1, 1)
    assert pool.compute(other) == [6]
    assert other.table[0] == request.table[0] and other.table[1] != request.table[1]
    assert len(pool.manager.cached_hashes()) == 3
