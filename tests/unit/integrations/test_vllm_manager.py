"""vLLM's KVCacheManager over the block manager, against fakes of vLLM's classes."""

import inspect
from typing import Any

import pytest

from pyengine.integrations.vllm_manager import Blocks, KVCacheManager
from tests.support.vllm_fakes import CLASSES, Request, RequestStatus, cache_config
from tests.support.vllm_interface import recorded


def make(num_blocks: int = 20, **settings: Any) -> KVCacheManager:
    more = {"max_model_len": 1000, "scheduler_block_size": 4, "log_stats": True}
    config = cache_config(num_blocks, **settings.pop("cache", {}))
    return KVCacheManager(config, classes=CLASSES, **(more | settings))


def admit(
    manager: KVCacheManager, request: Request, budget: int = 1000, **more: Any
) -> Blocks | None:
    """As the Scheduler does it, for a chunk of at most `budget` tokens."""
    cached, hit, _ = manager.get_computed_blocks(request)
    count = min(request.num_tokens - hit, budget)
    blocks = manager.allocate_slots(request, count, hit, cached, **more)
    if blocks is not None:
        manager.record_prefix_cache_stats(request, hit)
        request.num_computed_tokens = hit + count
        request.status = RequestStatus.RUNNING
    return blocks


def decode(manager: KVCacheManager, request: Request, token: int = 99, **more: Any) -> Any:
    """A token was sampled, and the next step computes it."""
    request._all_token_ids.append(token)
    blocks = manager.allocate_slots(request, 1, **more)
    if blocks is not None:
        request.num_computed_tokens += 1
    return blocks


def held(manager: KVCacheManager) -> int:
    """Blocks in use, but for the null block."""
    manager.tables.kv.check()
    usage = manager.tables.kv.usage()
    return usage.active + usage.pinned - 1


def table(manager: KVCacheManager, request: Request) -> list[int]:
    return manager.get_block_ids(request.request_id)[0]


def test_signatures_are_vllms() -> None:
    """Names, order and defaults of all that vLLM calls by position or keyword."""
    for path, theirs in recorded()["signatures"].items():
        if ".KVCacheManager." not in path or path.endswith("__init__"):
            continue
        ours = inspect.signature(getattr(KVCacheManager, path.rpartition(".")[2]))
        bare = [
            str(p.replace(annotation=inspect.Parameter.empty)) for p in ours.parameters.values()
        ]
        assert bare == theirs, path


def test_everything_that_the_scheduler_uses_is_there() -> None:
    manager = make()
    for use in recorded()["uses"]:
        cached: Any = manager
        for name in use.split("."):
            cached = getattr(cached, name)


def test_the_fake_request_has_vllms_names() -> None:
    assert {name for name in vars(Request("r", [1]))} <= set(recorded()["request"])
    assert {status.name for status in RequestStatus} <= set(recorded()["statuses"])


def test_ids_are_vllms_and_block_0_is_nobodys() -> None:
    manager, request = make(), Request("a", list(range(10)))
    blocks = admit(manager, request)
    assert blocks is not None
    assert blocks.get_block_ids() == ([1, 2, 3],)
    assert [block.block_id for block in blocks.blocks[0]] == [1, 2, 3]
    assert [block.ref_cnt for block in blocks.blocks[0]] == [1, 1, 1]
    blocks.get_block_ids()[0].append(7)
    assert table(manager, request) == [1, 2, 3]
    assert manager.usage == pytest.approx(3 / 19)


def test_a_decode_inside_a_block_takes_nothing() -> None:
    manager, request = make(), Request("a", list(range(5)))
    admit(manager, request)
    for _ in range(3):
        assert decode(manager, request) is manager.empty_kv_cache_blocks
    assert manager.empty_kv_cache_blocks.get_block_ids(allow_none=True) is None
    assert decode(manager, request).get_block_ids() == ([3],)
    assert table(manager, request) == [1, 2, 3]


def test_a_prefix_is_shared_from_its_allocation_on() -> None:
    manager = make()
    first, second = Request("a", list(range(10))), Request("b", [*range(8), 50, 51])
    admit(manager, first)
    cached, hit, boundary = manager.get_computed_blocks(second)
    assert (cached.get_block_ids(), hit, boundary) == (([1, 2],), 8, 0)
    admit(manager, second)
    assert table(manager, second) == [1, 2, 4]
    assert manager.estimate_cached_tokens(second) == 8
    stats = manager.make_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits) == (2, 20, 8)
    assert manager.make_prefix_cache_stats().requests == 0


def test_a_full_hit_computes_one_token_into_a_copy() -> None:
    manager = make()
    first, second = Request("a", list(range(12))), Request("b", list(range(12)))
    admit(manager, first)
    cached, hit, _ = manager.get_computed_blocks(second)
    assert (cached.get_block_ids(), hit) == (([1, 2, 3],), 11)
    assert admit(manager, second).get_block_ids() == ([4],)
    assert table(manager, second) == [1, 2, 4]
    copies, retained = manager.take_kv_cache_block_copies()
    assert [tuple(copy) for copy in copies] == [(3, 4)]
    [source] = retained
    assert source.pin.blocks[-1] == 3
    manager.block_pool.free_blocks(retained)
    assert source.pin.is_released
    assert manager.take_kv_cache_block_copies() == ([], [])
    assert manager.estimate_cached_tokens(second) == 12


def test_the_source_of_a_copy_is_not_handed_out_before_it_is_made() -> None:
    manager = make(num_blocks=6)
    first = Request("a", list(range(8)))
    admit(manager, first)
    manager.free(first)
    manager.new_step_starts()
    second, third = Request("b", list(range(8))), Request("c", [70, 71, 72, 73, 74])
    admit(manager, second)
    blocks = admit(manager, third)
    [copy], retained = manager.take_kv_cache_block_copies()
    assert copy.src_block_id == 2
    assert 2 not in (table(manager, second) + blocks.get_block_ids()[0])
    manager.take_new_block_ids()
    manager.block_pool.free_blocks(retained)
    manager.free(second)
    manager.free(third)
    assert held(manager) == 0


def test_a_request_that_goes_before_its_copy_is_made_takes_it_along() -> None:
    manager = make()
    first, second = Request("a", list(range(8))), Request("b", list(range(8)))
    admit(manager, first)
    admit(manager, second)
    manager.free(second)
    assert manager.take_kv_cache_block_copies() == ([], [])
    manager.free(first)
    assert held(manager) == 0


def test_a_block_that_this_step_computes_is_not_copied() -> None:
    manager = make()
    first, second, third = (Request(name, list(range(8))) for name in "abc")
    manager.new_step_starts()
    admit(manager, first)
    assert manager.get_computed_blocks(second)[1] == 4
    admit(manager, second)
    assert manager.take_kv_cache_block_copies() == ([], [])
    manager.take_new_block_ids()
    assert (table(manager, first), table(manager, second)) == ([1, 2], [1, 3])
    manager.new_step_starts()
    assert manager.get_computed_blocks(third)[1] == 7
    manager.take_new_block_ids()


def test_no_room_is_none_and_changes_nothing() -> None:
    manager = make(num_blocks=5)
    first, second = Request("a", list(range(9))), Request("b", [*range(8), *range(20, 30)])
    admit(manager, first)
    before = manager.tables.kv.usage()
    assert admit(manager, second) is None
    assert manager.tables.kv.usage() == before
    assert held(manager) == 3
    third = Request("c", list(range(40, 44)))
    assert admit(manager, third) is not None
    decode(manager, first), decode(manager, first), decode(manager, first)
    assert decode(manager, first) is None
    assert table(manager, first) == [1, 2, 3]


def test_gates_of_admission() -> None:
    manager = make(num_blocks=11, watermark=0.2)
    request = Request("a", list(range(40)))
    assert manager.watermark_blocks == 2
    assert admit(manager, request, 8, full_sequence_must_fit=True) is None
    gates = {"full_sequence_must_fit": True, "has_scheduled_reqs": False}
    assert admit(manager, request, 8, **gates) is not None
    other = Request("b", [77] * 28)
    assert admit(manager, other, 28) is None  # 7 of 8, and 2 to spare
    assert admit(manager, other, 28, has_scheduled_reqs=False, reserved_blocks=2) is None
    assert admit(manager, other, 28, has_scheduled_reqs=False) is not None


def test_lookahead_takes_slots_and_only_known_tokens_are_registered() -> None:
    manager, request = make(), Request("a", list(range(7)))
    admit(manager, request, num_lookahead_tokens=3)
    assert table(manager, request) == [1, 2, 3]
    request._all_token_ids.append(70)
    manager.allocate_slots(request, 4, num_lookahead_tokens=3)  # a token and three drafts
    assert table(manager, request) == [1, 2, 3, 4]
    assert manager.estimate_cached_tokens(request) == 8
    manager.cache_blocks(request, 12)  # not known yet
    assert manager.estimate_cached_tokens(request) == 8


def test_slots_end_at_the_longest_sequence() -> None:
    manager, request = make(max_model_len=8), Request("a", list(range(8)))
    admit(manager, request, num_lookahead_tokens=5)
    assert table(manager, request) == [1, 2]


def test_duplicates_stay_with_their_request_until_the_workers_know() -> None:
    manager = make()
    first = Request("a", list(range(8)))
    second = Request("b", list(range(8)), skip_reading_prefix_cache=True)
    manager.new_step_starts()
    admit(manager, first)
    admit(manager, second)
    assert manager.merged_tables([first, second]) == {}
    manager.take_new_block_ids()
    assert (table(manager, first), table(manager, second)) == ([1, 2], [3, 4])
    assert held(manager) == 4
    manager.new_step_starts()
    decode(manager, first), decode(manager, second)
    assert manager.merged_tables([first, second]) == {"b": ([1, 2, 6],)}
    manager.take_new_block_ids()
    assert table(manager, second) == [1, 2, 6]
    assert held(manager) == 4
    manager.free(first), manager.free(second)
    assert held(manager) == 0


def test_duplicates_that_nobody_is_told_of_go_with_their_request() -> None:
    manager = make()
    first = Request("a", list(range(8)))
    second = Request("b", list(range(8)), skip_reading_prefix_cache=True)
    admit(manager, first), admit(manager, second)
    for token in range(6):
        decode(manager, first, token), decode(manager, second, token)
    shared = set(table(manager, first)) & set(table(manager, second))
    assert shared == set()
    manager.free(second)
    assert held(manager) == 4
    manager.free(first)
    assert held(manager) == 0


def test_of_merged_blocks_those_alone_are_kept() -> None:
    """Another block becomes free with the same call, as its evictable content is taken over."""
    manager = make()
    gone, reader = Request("a", list(range(8))), Request("b", [*range(4), 50])
    again = Request("c", list(range(8)), skip_reading_prefix_cache=True)
    admit(manager, gone)
    manager.free(gone)
    admit(manager, reader)
    admit(manager, again)
    assert held(manager) == len({*table(manager, reader), *table(manager, again), 1}) == 4
    manager.free(again), manager.free(reader)
    assert held(manager) == 0


def test_what_a_preempted_request_was_to_compute_is_not_registered() -> None:
    manager = make()
    first, later = Request("a", list(range(7))), Request("b", [*range(7), 99, 1])
    admit(manager, first)
    manager.new_step_starts()
    decode(manager, first)  # fills the second block, if it runs
    manager.free(first)  # it does not
    manager.take_new_block_ids()
    assert manager.get_computed_blocks(later)[1] == 4


def test_a_full_block_is_found_within_its_step() -> None:
    manager = make()
    first, later = Request("a", list(range(7))), Request("b", [*range(7), 99, 1])
    admit(manager, first)
    manager.new_step_starts()
    decode(manager, first)
    assert manager.get_computed_blocks(later)[1] == 8
    manager.take_new_block_ids()
    assert held(manager) == 2


def test_finished_twice_aborted_between_look_up_and_allocation_unknown() -> None:
    manager, request = make(), Request("a", list(range(8)))
    admit(manager, request)
    manager.free(request)
    manager.free(request)
    manager.free(Request("unknown", [1]))
    assert manager.get_block_ids("unknown") == ([],)
    assert manager.pop_blocks_for_free(request) == []
    again = Request("b", list(range(8)))
    assert manager.get_computed_blocks(again)[1] == 7
    assert held(manager) > 0
    manager.free(again)
    assert held(manager) == 0
    manager.get_computed_blocks(again)
    manager.take_new_block_ids()
    assert held(manager) == 0


def test_blocks_freed_later() -> None:
    manager, request = make(), Request("a", list(range(8)))
    admit(manager, request)
    rows = manager.pop_blocks_for_free(request)
    assert held(manager) == 2
    manager.block_pool.free_blocks(rows)
    assert held(manager) == 0


def test_a_look_up_of_another_time() -> None:
    manager = make(num_blocks=7)
    first, second, third = (Request(name, list(range(8))) for name in "abc")
    admit(manager, first)
    cached, hit, _ = manager.get_computed_blocks(second)
    manager.get_computed_blocks(third)
    assert manager.allocate_slots(second, 1, hit, cached) is not None  # looked up again
    manager.free(first), manager.free(second)
    cached, hit, _ = manager.get_computed_blocks(third)
    assert manager.reset_prefix_cache()
    with pytest.raises(RuntimeError, match="had 7 cached tokens at look-up and has 0 now"):
        manager.allocate_slots(third, 1, hit, cached)
    assert manager.allocate_slots(third, 8) is not None
    manager.free(third)
    assert held(manager) == 0


def test_reset_forgets_all_and_refuses_while_somebody_holds_blocks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager, request = make(), Request("a", list(range(8)))
    admit(manager, request)
    assert not manager.reset_prefix_cache()
    assert "2 blocks are in use" in caplog.text
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert manager.make_prefix_cache_stats().reset
    assert manager.get_computed_blocks(request)[1] == 0


def test_preempted_and_resumed() -> None:
    manager, request = make(), Request("a", list(range(6)))
    admit(manager, request)
    for token in range(5):
        decode(manager, request, token)
    manager.free(request)
    request.num_computed_tokens, request.status = 0, RequestStatus.PREEMPTED
    request.num_preemptions = 1
    assert manager.get_computed_blocks(request)[1] == 8
    admit(manager, request)
    assert table(manager, request)[:2] == [1, 2]
    stats = manager.make_prefix_cache_stats()
    assert (stats.requests, stats.preempted_requests) == (1, 1)


def test_without_a_cache_nothing_is_found_or_registered() -> None:
    manager = make(enable_caching=False, enable_kv_cache_events=True)
    first, second = Request("a", list(range(8))), Request("b", list(range(8)))
    for request in (first, second):
        assert manager.get_computed_blocks(request)[1] == 0
        admit(manager, request)
        for _ in range(5):
            decode(manager, request)
    assert not set(table(manager, first)) & set(table(manager, second))
    assert manager.take_events() == []
    manager.free(first), manager.free(second)
    assert manager.tables.kv.usage().free == 19


def test_new_blocks_are_named_where_they_are_to_be_zeroed() -> None:
    manager, request = make(cache={"needs_kv_cache_zeroing": True}), Request("a", list(range(7)))
    admit(manager, request)
    decode(manager, request), decode(manager, request)
    assert manager.take_new_block_ids() == [1, 2, 3]
    assert manager.take_new_block_ids() == []


def test_a_call_for_nothing_is_refused() -> None:
    manager, request = make(), Request("a", [1, 2])
    with pytest.raises(ValueError, match="num_new_tokens"):
        manager.allocate_slots(request, 0)
    assert manager.take_boundary_state_offloads() == {}
    assert manager.finalize_partial_tail_offloads(request) == []
    assert manager.get_num_common_prefix_blocks("a") == [0]
    assert repr(Blocks([[1]], manager._view, 0)) == "<Blocks [[1]]>"


def load(manager: KVCacheManager, request: Request, count: int, **more: Any) -> Blocks | None:
    """As the Scheduler does it: a connector loads `count` tokens asynchronously."""
    cached, hit, _, diverged = manager.get_computed_blocks_for_connector(request)
    assert not diverged
    blocks = manager.allocate_slots(
        request,
        0,
        hit,
        cached,
        num_external_computed_tokens=count,
        delay_cache_blocks=True,
        **more,
    )
    if blocks is not None:
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = hit + count
    return blocks


def cached(manager: KVCacheManager, tokens: list[int]) -> int:
    """How many of these tokens, and one more, a new request finds."""
    return manager.get_computed_blocks(Request("probe", [*tokens, 999]))[1]


def test_an_asynchronous_load_is_registered_when_it_has_ended() -> None:
    manager, request = make(), Request("a", list(range(10)))
    assert load(manager, request, 9).get_block_ids() == ([1, 2, 3],)
    blocks = manager.get_blocks("a")
    assert blocks.get_unhashed_block_ids() == [1, 2, 3]
    assert cached(manager, request._all_token_ids) == 0
    manager.new_step_starts()
    manager.cache_blocks(request, 9)
    assert manager.get_blocks("a").get_unhashed_block_ids_all_groups() == [[3]]
    assert [block.block_hash is None for block in manager.get_blocks("a").blocks[0]] == [0, 0, 1]
    assert cached(manager, request._all_token_ids) == 8
    request.status = RequestStatus.WAITING
    assert manager.allocate_slots(request, 1) is manager.empty_kv_cache_blocks
    manager.take_new_block_ids()
    request.num_computed_tokens, request.status = 10, RequestStatus.RUNNING
    decode(manager, request), decode(manager, request)
    assert cached(manager, request._all_token_ids) == 12
    manager.free(request)
    manager.tables.drop_lookup()
    assert held(manager) == 0


def test_the_block_of_a_token_that_is_computed_again_is_registered_with_it() -> None:
    manager, request = make(), Request("a", list(range(8)))
    load(manager, request, 8)
    manager.new_step_starts()
    manager.cache_blocks(request, 8)
    request.num_computed_tokens = 7
    assert cached(manager, request._all_token_ids) == 4
    manager.allocate_slots(request, 1)
    manager.take_new_block_ids()
    assert cached(manager, request._all_token_ids) == 8


def test_blocks_that_failed_are_computed_in_place() -> None:
    manager, request = make(cache={"needs_kv_cache_zeroing": True}), Request("a", list(range(14)))
    load(manager, request, 12, skip_zeroing_group_ids=(0,))
    assert manager.take_new_block_ids() == []
    request.num_computed_tokens = 4  # the second block failed
    manager.cache_blocks(request, 4)
    manager.record_blocks_for_zeroing("a", 4)
    assert manager.take_new_block_ids() == [2, 3]
    assert cached(manager, request._all_token_ids) == 4
    manager.evict_blocks({2, 3})
    manager.allocate_slots(request, 10)
    assert table(manager, request) == [1, 2, 3, 4]
    assert cached(manager, request._all_token_ids) == 12
    assert manager.take_new_block_ids() == [4]


def test_a_load_is_held_after_an_abort_until_it_is_freed() -> None:
    manager, request = make(), Request("a", list(range(10)))
    load(manager, request, 10)
    assert manager.get_block_ids_for_computed_tokens("a", 7) == ([1, 2],)
    manager.remove_skipped_blocks("a", 10)
    assert held(manager) == 3
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert held(manager) == 0
    assert manager.tables.kv.stats().registered_blocks == 0


def test_a_load_after_a_hit_that_is_cut_to_whole_blocks() -> None:
    manager, first, second = make(), Request("a", list(range(8))), Request("b", list(range(8)))
    admit(manager, first)
    cached, hit, _ = manager.get_computed_blocks(second)
    assert hit == 7
    whole = manager.truncate_computed_blocks(cached, 4)
    assert whole.get_block_ids() == ([1],)
    assert whole.new_empty().get_block_ids() == ([],)
    settings: dict[str, Any] = {"num_external_computed_tokens": 4, "delay_cache_blocks": True}
    with pytest.raises(ValueError, match="inside a block"):
        manager.allocate_slots(second, 0, 7, cached, **settings)
    manager.allocate_slots(second, 0, 4, whole, **settings)
    assert table(manager, second) == [1, 3]
    assert manager.take_kv_cache_block_copies() == ([], [])


def test_two_loads_of_a_prefix_have_their_own_blocks() -> None:
    manager = make()
    requests = [Request(name, list(range(10))) for name in "ab"]
    for request in requests:
        load(manager, request, 9)
    for request in requests:
        manager.cache_blocks(request, 9)
    assert [table(manager, request) for request in requests] == [[1, 2, 3], [4, 5, 6]]
    manager.free(requests[0])
    assert held(manager) == 5  # both of one, and the last two of the other with what they equal
    manager.free(requests[1])
    assert held(manager) == 0


def test_a_request_without_a_hash_loads_and_shares_nothing() -> None:
    manager = make(enable_caching=False)
    request = Request("a", list(range(10)))
    load(manager, request, 9)
    manager.cache_blocks(request, 9)
    manager.allocate_slots(request, 1)
    assert manager.tables.kv.stats().registered_blocks == 0


def test_admission_of_a_load_leaves_what_others_need() -> None:
    manager, request = make(num_blocks=6), Request("a", list(range(12)))
    assert load(manager, request, 12, reserved_blocks=3) is None
    assert load(manager, request, 12, reserved_blocks=2) is not None
    needed = manager.coordinator.get_num_blocks_to_allocate
    assert needed("a", 17, apply_admission_cap=True) == 2
    assert needed("a", 8) == 0
    assert needed("unknown", 8) == 2


def test_a_prompt_of_one_token_is_loaded_again_if_others_leave_a_block() -> None:
    """vLLM computes its only token again, so it looks like a new request, and has a block."""
    manager, request = make(num_blocks=6), Request("a", [1])
    load(manager, request, 1)
    manager.cache_blocks(request, 1)
    request.num_computed_tokens = 0
    assert load(manager, request, 1, reserved_blocks=5) is None
    assert load(manager, request, 1, reserved_blocks=4) is manager.empty_kv_cache_blocks
    assert table(manager, request) == [1]


def test_a_preempted_request_has_no_load_that_ends() -> None:
    manager, request = make(), Request("a", list(range(10)))
    manager.get_computed_blocks(request)
    manager.allocate_slots(request, 2, num_external_computed_tokens=8)
    manager.loads_planned("step")
    manager.free(request)
    admit(manager, request)
    manager.loads_ended("step", ())
    assert not manager._loads
    assert manager.estimate_cached_tokens(request) == 8


def test_a_failure_that_comes_too_late_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    manager, request = make(), Request("a", list(range(10)))
    admit(manager, request)
    manager.evict_blocks({3})
    assert caplog.messages == []
    manager.evict_blocks({2, 3, 1})
    assert caplog.messages == ["Loads of blocks [1, 2] failed after their step: they stay cached"]
