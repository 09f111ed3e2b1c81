"""The block manager's contract, seen from Python."""

import pytest

from pyengine.kv_cache import BlockManager, NoRoom, Prefilled, Sequence, StepBuffers
from tests.support.blocks import (
    compute,
    computed,
    counts,
    leave_evictable,
    retain,
    step_arrays,
    unchanged,
)

BLOCK = 4


def tokens(count: int, start: int = 100) -> list[int]:
    return list(range(start, start + count))


def usage(manager: BlockManager) -> tuple[int, int, int, int]:
    now = manager.usage()
    assert (
        now.free + now.evictable + now.active + now.pinned == now.num_blocks == manager.num_blocks
    )
    assert now.available == now.free + now.evictable
    manager.check()
    return now.free, now.evictable, now.active, now.pinned


def prefilled(answer: object) -> tuple[int, int, bool]:
    assert isinstance(answer, Prefilled), answer
    return answer.num_cached_tokens, answer.num_tokens, answer.samples


def no_room(answer: object) -> tuple[int, int]:
    assert isinstance(answer, NoRoom), answer
    return answer.needed, answer.available


# ---- counters and states


def test_the_five_steps_of_two_counters() -> None:
    manager = BlockManager(2, BLOCK)
    retained = retain(manager, tokens(BLOCK))
    (block,) = retained.blocks
    seen = [counts(manager, block)]

    pin = manager.match_prefix(tokens(3 * BLOCK))
    assert pin.blocks == [block]
    seen.append(counts(manager, block))

    sequence = manager.sequence(tokens(3 * BLOCK))
    sequence.attach(pin)
    seen.append(counts(manager, block))

    plan = manager.begin_step(100)
    assert no_room(plan.prefill(sequence, 100)) == (2, 1)
    plan.rollback()
    del pin
    seen.append(counts(manager, block))

    sequence.reset()
    seen.append(counts(manager, block))
    assert seen == [(1, 0), (2, 0), (3, 1), (2, 1), (1, 0)]

    retained.release()
    assert counts(manager, block) == (0, 0)
    assert usage(manager) == (1, 1, 0, 0)


def test_a_block_goes_through_all_four_states() -> None:
    manager = BlockManager(1, BLOCK)
    seen = [(manager.state(0), usage(manager))]
    sequence = computed(manager, tokens(BLOCK))
    seen.append((manager.state(0), usage(manager)))
    pin = sequence.pin()
    sequence.free()
    seen.append((manager.state(0), usage(manager)))
    pin.release()
    seen.append((manager.state(0), usage(manager)))
    assert manager.evict_all() == 1
    seen.append((manager.state(0), usage(manager)))
    assert seen == [
        ("free", (1, 0, 0, 0)),
        ("active", (0, 0, 1, 0)),
        ("pinned", (0, 0, 0, 1)),
        ("evictable", (0, 1, 0, 0)),
        ("free", (1, 0, 0, 0)),
    ]


def test_shape() -> None:
    manager = BlockManager(7, 3)
    assert (manager.num_blocks, manager.block_size, manager.null_block) == (7, 3, 7)
    assert manager.usage() == BlockManager(7, 5).usage()
    assert manager.usage() != BlockManager(8, 3).usage()


def test_preview_counts_what_freeing_gives_back() -> None:
    manager = BlockManager(8, BLOCK)
    first = computed(manager, tokens(10))
    second = computed(manager, [*tokens(8), 1, 2, 3])  # shares two blocks, has one more
    assert (manager.preview(first), manager.preview(second)) == (1, 1)
    for victim, kept in ((second, first), (first, None)):
        promised, before = manager.preview(victim), manager.usage().available
        victim.free()
        assert manager.usage().available - before == promised
        assert kept is None or manager.preview(kept) == 3
    pin = manager.match_prefix(tokens(8))
    third = computed(manager, tokens(10))
    assert manager.preview(third) == 1
    pin.release()
    assert manager.preview(third) == 3


# ---- late merge


def test_identical_prompts_of_one_batch_end_on_one_copy() -> None:
    manager = BlockManager(8, BLOCK, in_flight_sharing=False)
    first, second = manager.sequence(tokens(10)), manager.sequence(tokens(10))
    plan = manager.begin_step(20)
    plan.prefill(first, 10)
    plan.prefill(second, 10)
    mine, duplicates = first.block_table, second.block_table
    remappings = [(r.sequence_id, r.index, r.old_block, r.new_block) for r in plan.commit([7, 8])]
    assert remappings == [(second.id, i, duplicates[i], mine[i]) for i in (0, 1)]
    assert second.block_table == [mine[0], mine[1], duplicates[2]]
    assert [counts(manager, block) for block in second.block_table] == [(2, 2), (2, 2), (1, 1)]
    assert (first.tokens(), second.tokens()) == ([*tokens(10), 7], [*tokens(10), 8])
    assert usage(manager) == (4, 0, 4, 0)
    assert manager.stats().merged_blocks == 2


def test_a_collision_costs_a_name_and_nothing_else() -> None:
    manager = BlockManager(8, BLOCK, hash_bits=0)
    first, other = tokens(BLOCK), tokens(2 * BLOCK, start=500)
    named = computed(manager, [*first, 1])
    assert len(manager.cached_hashes()) == 1
    equal_hash = manager.sequence(other)
    plan = manager.begin_step(100)
    assert prefilled(plan.prefill(equal_hash, 100)) == (0, 8, True)
    assert plan.commit([0]) == []
    assert set(equal_hash.block_table).isdisjoint(named.block_table)
    assert manager.match_prefix(other).blocks == equal_hash.block_table[:2]
    assert manager.match_prefix(first).blocks == named.block_table[:1]
    assert manager.stats().collisions == 0  # no call has asked for these hashes
    assert len(manager.cached_hashes()) == 1
    assert manager.stats().collisions == 1
    equal_hash.free()
    assert usage(manager) == (4, 2, 2, 0)
    manager.check()


def test_a_dangling_mapping_is_taken_over() -> None:
    manager = BlockManager(8, BLOCK, in_flight_sharing=False)
    old = leave_evictable(manager, tokens(3 * BLOCK))
    again = computed(manager, tokens(BLOCK + 1), read_cache=False)
    new = again.block_table[0]
    assert new not in old
    assert [manager.state(block) for block in old] == ["free", "evictable", "evictable"]
    assert manager.stats().taken_over_blocks == 1
    assert usage(manager) == (4, 2, 2, 0)
    assert manager.match_prefix(tokens(3 * BLOCK)).blocks == [new, old[1], old[2]]
    assert manager.stats().merged_blocks == 0


def test_what_is_computed_again_is_not_stored_again() -> None:
    manager = BlockManager(8, BLOCK)
    [block, *_] = leave_evictable(manager, tokens(BLOCK))
    again = manager.sequence(tokens(BLOCK + 1), read_cache=False)
    assert compute(manager, again) == []
    assert again.block_table[0] == block
    stats = manager.stats()
    assert (stats.already_cached_blocks, stats.hit_blocks, stats.merged_blocks) == (1, 0, 0)
    assert stats.computed_tokens == 2 * BLOCK + 1


def test_a_content_computed_again_while_in_use_is_merged() -> None:
    manager = BlockManager(8, BLOCK, in_flight_sharing=False)
    first = computed(manager, tokens(5))
    again = manager.sequence(tokens(5), read_cache=False)
    (remapping,) = compute(manager, again)
    assert (remapping.sequence_id, remapping.index) == (again.id, 0)
    assert remapping.new_block == first.block_table[0] == again.block_table[0]
    assert manager.state(remapping.old_block) == "free"


# ---- matching


@pytest.mark.parametrize("residence", ["held", "evictable"])
def test_a_resident_prefix_is_neither_allocated_nor_charged(residence: str) -> None:
    """16 blocks of which 12 are resident: 4 free blocks and 4 blocks of budget are enough."""
    manager = BlockManager(16, BLOCK)
    pin = retain(manager, tokens(12 * BLOCK))
    blocks = pin.blocks
    if residence == "evictable":
        pin.release()
    assert manager.usage().free == 4
    sequence = manager.sequence(tokens(16 * BLOCK))
    plan = manager.begin_step(4 * BLOCK)
    assert prefilled(plan.prefill(sequence, 1000)) == (12 * BLOCK, 4 * BLOCK, True)
    assert (plan.num_tokens, plan.budget_left) == (4 * BLOCK, 0)
    assert sequence.block_table[:12] == blocks
    assert manager.usage().available == 0
    plan.commit([0])
    stats = manager.stats()
    assert (stats.cached_tokens, stats.hit_blocks) == (12 * BLOCK, 12)
    assert stats.prompt_tokens == stats.cached_tokens + stats.computed_tokens


def test_one_block_too_few_is_an_answer() -> None:
    manager = BlockManager(16, BLOCK)
    pin = retain(manager, tokens(12 * BLOCK))
    other = computed(manager, [1])
    sequence = manager.sequence(tokens(16 * BLOCK))
    plan = manager.begin_step(1000)
    with unchanged(manager, without="hashed_blocks"):  # a hash, once known, is kept
        assert no_room(plan.prefill(sequence, 1000)) == (4, 3)
    assert (plan.num_sequences, plan.budget_left, sequence.block_table) == (0, 1000, [])
    assert prefilled(plan.prefill(sequence, 3 * BLOCK)) == (12 * BLOCK, 3 * BLOCK, False)
    assert (other.num_tokens, pin.num_tokens) == (2, 48)


def test_revived_evictable_blocks_count_as_needed() -> None:
    manager = BlockManager(4, BLOCK)
    leave_evictable(manager, tokens(2 * BLOCK))
    plan = manager.begin_step(100)
    taker = manager.sequence([1] * BLOCK)
    plan.prefill(taker, 100)
    hit = manager.sequence(tokens(4 * BLOCK))
    assert no_room(plan.prefill(hit, 100)) == (4, 3)


def test_a_full_hit_computes_one_token_takes_no_block_and_writes_nothing() -> None:
    manager = BlockManager(11, BLOCK)
    blocks = leave_evictable(manager, tokens(10 * BLOCK))
    allocated = manager.stats().allocated_blocks
    sequence = manager.sequence(tokens(10 * BLOCK))
    plan = manager.begin_step(100)
    assert prefilled(plan.prefill(sequence, 100)) == (39, 1, True)
    arrays = step_arrays(width=10)
    plan.fill(StepBuffers(**arrays))
    assert (arrays["slot_mapping"][0], arrays["positions"][0]) == (-1, 39)
    assert (sequence.block_table, usage(manager)) == (blocks, (1, 0, 10, 0))
    plan.commit([9])
    assert manager.stats().allocated_blocks == allocated
    assert sequence.tokens() == [*tokens(10 * BLOCK), 9]
    plan = manager.begin_step(1)
    assert plan.decode([sequence]) == []  # the next token goes to a new block
    assert sequence.block_table[:10] == blocks
    assert manager.usage().free == 0


def test_a_waiting_sequence_reuses_what_another_computed_meanwhile() -> None:
    manager = BlockManager(16, BLOCK)
    slow, fast = manager.sequence(tokens(14)), manager.sequence(tokens(14))
    plan = manager.begin_step(100)
    assert prefilled(plan.prefill(slow, 4)) == (0, 4, False)
    plan.commit([])
    plan = manager.begin_step(100)
    assert prefilled(plan.prefill(fast, 100)) == (4, 10, True)
    plan.commit([0])
    plan = manager.begin_step(100)
    assert prefilled(plan.prefill(slow, 100)) == (8, 2, True)
    plan.commit([0])
    assert slow.block_table[:3] == fast.block_table[:3]
    assert slow.num_cached_tokens == 8


def test_namespaces_separate_everything_under_them() -> None:
    manager = BlockManager(8, BLOCK)
    plain = computed(manager, tokens(BLOCK))
    tenant = computed(manager, tokens(BLOCK), namespace=b"tenant")
    assert plain.block_table != tenant.block_table
    assert manager.match_prefix(tokens(BLOCK)).blocks == plain.block_table
    assert manager.match_prefix(tokens(BLOCK), namespace=b"").blocks == plain.block_table
    assert manager.match_prefix(tokens(BLOCK), namespace=b"tenant").blocks == tenant.block_table
    assert manager.match_prefix(tokens(BLOCK), namespace=b"other").blocks == []


def test_the_same_tokens_behind_another_prefix_are_another_content() -> None:
    manager = BlockManager(8, BLOCK)
    first = computed(manager, tokens(BLOCK) + tokens(BLOCK))
    assert len(set(first.block_table)) == 2
    assert manager.match_prefix([1] * BLOCK + tokens(BLOCK)).blocks == []
    assert manager.match_prefix(tokens(BLOCK) + tokens(BLOCK)).blocks == first.block_table


def test_read_cache_false_computes_everything() -> None:
    manager = BlockManager(8, BLOCK)
    leave_evictable(manager, tokens(8))
    plan = manager.begin_step(100)
    sequence = manager.sequence(tokens(8), read_cache=False)
    assert prefilled(plan.prefill(sequence, 100)) == (0, 8, True)


def test_without_prefix_caching_nothing_is_shared_or_kept() -> None:
    manager = BlockManager(8, BLOCK, prefix_caching=False)
    first, second = manager.sequence(tokens(8)), manager.sequence(tokens(8))
    assert compute(manager, first, second) == []
    assert set(first.block_table).isdisjoint(second.block_table)
    assert manager.stats().hashed_blocks == 0
    assert manager.match_prefix(tokens(8)).blocks == []
    first.free()
    second.free()
    assert usage(manager) == (8, 0, 0, 0)


# ---- the free queue


def test_a_prefix_outlives_its_continuation_and_the_oldest_goes_first() -> None:
    manager = BlockManager(4, BLOCK)
    leave_evictable(manager, tokens(2 * BLOCK))
    leave_evictable(manager, tokens(2 * BLOCK, start=500))
    takers: list[Sequence] = []
    survivors = []
    for _ in range(4):
        takers.append(computed(manager, [1]))
        survivors.append(
            [manager.match_prefix(tokens(8, start)).num_tokens for start in (100, 500)]
        )
    assert survivors == [[4, 8], [0, 8], [0, 4], [0, 0]]
    assert manager.stats().evicted_blocks == 4


def test_free_blocks_go_before_evictable_ones_and_the_last_freed_first() -> None:
    manager = BlockManager(4, BLOCK)
    evictable = leave_evictable(manager, tokens(BLOCK))
    first, second = computed(manager, [1]), computed(manager, [2])
    (freed,) = first.block_table
    first.free()
    taker = computed(manager, [3])
    assert taker.block_table == [freed]
    assert manager.state(evictable[0]) == "evictable"
    assert second.is_live
