"""Bugs about KV that is moved from or to the pool while requests come and go."""

from collections.abc import Callable

from pyengine.kv_cache import Loading, NoRoom, Transfer
from tests.bug_zoo.bugs import bug
from tests.bug_zoo.simulation import Pool, Request


def load(pool: Pool, request: Request, num_tokens: int) -> Transfer:
    """Begin to load the first tokens of a request."""
    transfer = request.sequence.reserve(num_tokens)
    assert isinstance(transfer, Transfer)
    return transfer


def arrives(pool: Pool, request: Request, transfer: Transfer, blocks: int) -> None:
    """The KV of the first blocks of a transfer is written."""
    size = pool.manager.block_size
    for index, _, block in transfer.blocks[:blocks]:
        pool.write(block, request.kv((index + 1) * size - 1))


@bug("LMCache/LMCache/issues/3388", "ai-dynamo/dynamo/issues/15079")
def test_a_failed_load_is_used(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(8)
    request = pool.request(*range(12), 0)
    transfer = load(pool, request, 12)
    arrives(pool, request, transfer, 1)
    assert transfer.complete(transfer.blocks[:1]) == 4  # the others have not come
    assert pool.cached(*range(12)) == 4
    assert pool.usage() == (7, 0, 1, 0, 0)
    load(pool, request, 12).fail()
    assert pool.cached(*range(12)) == 4
    assert pool.compute(request) == [0]  # computes the other eight, and reads right KV
    assert request.sequence.num_restored_tokens == 4


@bug("vllm-project/vllm/issues/50433")
def test_a_prefix_is_loaded_twice(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(8)
    first, second = pool.request(*range(8), 0), pool.request(*range(8), 1)
    transfer = load(pool, first, 8)
    step = pool.begin()
    assert isinstance(step.prefill(second), Loading)
    assert isinstance(second.sequence.reserve(8), Loading)  # and no second load
    assert pool.cached(*range(8)) == 0
    pool.manager.evict_all()
    arrives(pool, first, transfer, 2)
    assert transfer.complete() == 8
    assert step.prefill(second).num_cached_tokens == 8
    step.commit(0)


@bug("sgl-project/sglang/pull/32564", "sgl-project/sglang/pull/35049")
def test_an_abort_frees_blocks_that_a_load_writes(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(4)
    request = pool.request(*range(12), 0)
    transfer = load(pool, request, 12)
    request.sequence.free()  # the abort does not wait for the transfer
    assert pool.usage() == (1, 0, 0, 0, 3)
    other = pool.request(*range(20, 28), 0)
    step = pool.begin()
    assert isinstance(step.prefill(other), NoRoom)
    step.rollback()
    transfer.fail()  # nothing writes any more
    assert pool.usage() == (4, 0, 0, 0, 0)
    assert pool.compute(other) == [0]


@bug("vllm-project/vllm/issues/46951", "vllm-project/vllm/pull/48596")
def test_a_block_is_reused_while_it_is_stored(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(2)
    old = pool.request(1, 2, 3, 4, 5)
    pool.compute(old)
    old.sequence.free()
    [evicted], pin = pool.manager.evict(1)  # to be copied elsewhere
    assert evicted.tokens == [1, 2, 3, 4]
    other = pool.request(6, 7, 8, 9, 10)
    step = pool.begin()
    assert isinstance(step.prefill(other), NoRoom)
    step.rollback()
    assert pool.slots[evicted.block * 4 + 3] == (b"", (1, 2, 3, 4))
    pin.release()  # the copy has ended
    assert pool.compute(other) == [0]


@bug("vllm-project/vllm/issues/47282", "vllm-project/vllm/pull/47324")
def test_a_load_writes_where_a_step_still_reads(new_pool: Callable[..., Pool]) -> None:
    pool = new_pool(3)
    running = pool.request(1, 2, 3, 4)
    pool.compute(running, sampled=5)
    step = pool.begin()
    step.decode(running)
    step.launch()
    running.sequence.free()
    waiting = pool.request(*range(20, 28), 0)
    answer = waiting.sequence.reserve(8)
    assert isinstance(answer, NoRoom) and answer.available == 1
    step.commit(6)
    transfer = load(pool, waiting, 8)
    arrives(pool, waiting, transfer, 2)
    assert transfer.complete() == 8
