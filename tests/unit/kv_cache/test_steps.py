"""One step after another: plan, commit, roll back, and what is dropped on the way."""

import gc

import pytest

from pyengine.kv_cache import BlockManager, NoBudget, NoRoom, PlanError, Prefilled, Sequence
from tests.support.blocks import compute, computed, leave_evictable, retain, unchanged

BLOCK = 4


def tokens(count: int, start: int = 100) -> list[int]:
    return list(range(start, start + count))


def usage(manager: BlockManager) -> tuple[int, int, int, int]:
    now = manager.usage()
    manager.check()
    return now.free, now.evictable, now.active, now.pinned


# ---- dropped on the way


@pytest.mark.parametrize("how", ["free", "forget"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_sequence_dropped_between_plan_and_commit(how: str, end: str) -> None:
    manager = BlockManager(8, BLOCK)
    sequence = manager.sequence(tokens(10))
    plan = manager.begin_step(100)
    plan.prefill(sequence, 100)
    if how == "free":
        sequence.free()
        assert not sequence.is_live
    else:
        del sequence
    assert usage(manager) == (5, 0, 3, 0)  # it lives in the plan
    assert (plan.num_sequences, plan.num_samples) == (1, 1)
    if end == "commit":
        assert plan.commit([3]) == []
        assert usage(manager) == (6, 2, 0, 0)
        assert manager.match_prefix(tokens(10)).num_tokens == 8
    else:
        plan.rollback()
        assert usage(manager) == (8, 0, 0, 0)
        assert manager.match_prefix(tokens(10)).num_tokens == 0


def test_others_of_the_batch_merge_into_a_dropped_sequence() -> None:
    manager = BlockManager(8, BLOCK, in_flight_sharing=False)
    dropped, kept = manager.sequence(tokens(8)), manager.sequence(tokens(8))
    plan = manager.begin_step(100)
    plan.prefill(dropped, 100)
    plan.prefill(kept, 100)
    blocks = dropped.block_table
    dropped.free()
    assert [r.sequence_id for r in plan.commit([1, 2])] == [kept.id, kept.id]
    assert kept.block_table == blocks
    assert usage(manager) == (6, 0, 2, 0)


def test_dropping_a_plan_rolls_it_back() -> None:
    manager = BlockManager(8, BLOCK)
    blocks = leave_evictable(manager, tokens(4))
    sequence = manager.sequence(tokens(10))
    before = usage(manager)
    plan = manager.begin_step(100)
    plan.prefill(sequence, 100)
    assert usage(manager) != before
    del plan
    assert usage(manager) == before
    assert (sequence.block_table, sequence.num_computed_tokens) == ([], 0)
    assert sequence.num_cached_tokens == 0
    assert manager.stats().rolled_back_steps == 1
    assert manager.match_prefix(tokens(10)).blocks == blocks
    compute(manager, sequence)  # the next step may begin


@pytest.mark.parametrize("look", ["block_table", "num_computed_tokens", "stats"])
def test_a_dropped_plan_is_gone_for_whoever_looks_first(look: str) -> None:
    manager = BlockManager(8, BLOCK)
    leave_evictable(manager, tokens(4))
    sequence = manager.sequence(tokens(10))
    plan = manager.begin_step(100)
    plan.prefill(sequence, 100)
    del plan
    seen = {
        "block_table": lambda: sequence.block_table == [],
        "num_computed_tokens": lambda: sequence.num_computed_tokens == 0,
        "stats": lambda: manager.stats().rolled_back_steps == 1,
    }
    assert seen[look]()


def test_dropping_a_closed_plan_does_nothing() -> None:
    manager = BlockManager(8, BLOCK)
    sequence = manager.sequence(tokens(8))
    plan = manager.begin_step(100)
    plan.prefill(sequence, 100)
    plan.commit([1])
    following = manager.begin_step(100)
    del plan
    assert following.is_open
    assert manager.stats().rolled_back_steps == 0


def test_forgetting_a_sequence_frees_it() -> None:
    manager = BlockManager(8, BLOCK)
    cycle: list[object] = [computed(manager, tokens(10))]
    cycle.append(cycle)
    assert usage(manager) == (5, 0, 3, 0)
    del cycle
    gc.collect()
    assert usage(manager) == (6, 2, 0, 0)


def test_handles_outlive_the_manager_object() -> None:
    manager = BlockManager(8, BLOCK)
    sequence = computed(manager, tokens(8))
    pin = sequence.pin()
    del manager
    gc.collect()
    assert len(sequence.block_table) == 2
    sequence.free()
    pin.release()
    assert pin.is_released


# ---- undoing


def test_rollback_leaves_the_sequences_as_they_were() -> None:
    manager = BlockManager(8, BLOCK)
    running, waiting = computed(manager, tokens(8)), manager.sequence(tokens(12))
    before = [(s.block_table, s.num_computed_tokens, s.tokens()) for s in (running, waiting)]
    plan = manager.begin_step(100)
    assert plan.decode([running]) == []
    assert isinstance(plan.prefill(waiting, 100), Prefilled)
    plan.rollback()
    assert not plan.is_open
    after = [(s.block_table, s.num_computed_tokens, s.tokens()) for s in (running, waiting)]
    assert after == before
    assert usage(manager) == (6, 0, 2, 0)
    stats = manager.stats()
    assert (stats.committed_steps, stats.rolled_back_steps) == (1, 1)


def test_cancel_takes_one_sequence_out() -> None:
    manager = BlockManager(8, BLOCK)
    first, second = manager.sequence(tokens(6)), manager.sequence(tokens(6, start=500))
    plan = manager.begin_step(20)
    plan.prefill(first, 20)
    plan.prefill(second, 20)
    plan.cancel(first)
    figures = (plan.num_tokens, plan.num_sequences, plan.num_samples, plan.budget_left)
    assert figures == (6, 1, 1, 14)
    assert (first.block_table, usage(manager)) == ([], (6, 0, 2, 0))
    plan.prefill(first, 20)
    plan.commit([1, 2])
    assert (second.tokens()[-1], first.tokens()[-1]) == (1, 2)


def test_reset_keeps_the_tokens_and_comes_back_from_the_cache() -> None:
    manager = BlockManager(8, BLOCK)
    sequence = computed(manager, tokens(10), namespace=b"x")
    blocks = sequence.block_table
    sequence.reset()
    assert sequence.tokens() == [*tokens(10), 0]
    assert (sequence.block_table, sequence.num_computed_tokens) == ([], 0)
    assert usage(manager) == (6, 2, 0, 0)
    hashed = manager.stats().hashed_blocks
    plan = manager.begin_step(100)
    answer = plan.prefill(sequence, 100)
    assert isinstance(answer, Prefilled)
    assert (answer.num_cached_tokens, answer.num_tokens) == (8, 3)
    assert sequence.block_table[:2] == blocks[:2]
    assert manager.stats().hashed_blocks == hashed


# ---- budget and free blocks


def test_a_chunk_ends_on_a_block_boundary_if_it_can() -> None:
    manager = BlockManager(8, BLOCK)
    sequence = manager.sequence(tokens(20))
    computed_so_far = []
    for max_tokens in (7, 3, 3, 6):
        plan = manager.begin_step(max_tokens)
        assert isinstance(plan.prefill(sequence, 100), Prefilled)
        plan.commit([])
        computed_so_far.append(sequence.num_computed_tokens)
    assert computed_so_far == [4, 7, 8, 12]


def test_no_budget_changes_nothing() -> None:
    manager = BlockManager(8, BLOCK)
    leave_evictable(manager, tokens(4))
    sequence, other = manager.sequence(tokens(8)), manager.sequence([1, 2])
    plan = manager.begin_step(2)
    with unchanged(manager, without="hashed_blocks"):
        assert isinstance(plan.prefill(sequence, 0), NoBudget)
    plan.prefill(other, 2)
    with unchanged(manager, without="hashed_blocks"):
        assert isinstance(plan.prefill(sequence, 100), NoBudget)
    assert (sequence.block_table, plan.num_sequences) == ([], 1)


def test_spare_blocks_are_beside_those_of_all_known_tokens() -> None:
    manager = BlockManager(5, BLOCK)
    sequence = manager.sequence(tokens(16))
    plan = manager.begin_step(100)
    with unchanged(manager, without="hashed_blocks"):
        answer = plan.prefill(sequence, 4, spare_blocks=2)
        assert isinstance(answer, NoRoom)
        assert (answer.needed, answer.available) == (6, 5)
    assert isinstance(plan.prefill(sequence, 4, spare_blocks=1), Prefilled)
    assert usage(manager) == (4, 0, 1, 0)


def test_decode_says_who_did_not_fit() -> None:
    manager = BlockManager(4, BLOCK)
    sequences: list[Sequence] = [computed(manager, [i] * 4) for i in (1, 2)]
    sequences.append(computed(manager, [3] * 3))
    plan = manager.begin_step(100)
    assert plan.decode(sequences) == [1]  # one block left; the third writes into its own
    assert (plan.num_tokens, sequences[1].block_table) == (2, sequences[1].block_table[:1])
    plan.commit([10, 30])
    assert [s.tokens()[-1] for s in sequences] == [10, 0, 30]
    plan = manager.begin_step(1)
    assert plan.decode([sequences[0], sequences[2]]) == [1]
    assert usage(manager) == (0, 0, 4, 0)


def test_decoded_blocks_are_registered_too() -> None:
    manager = BlockManager(4, BLOCK)
    sequence = computed(manager, tokens(2))
    for token in (7, 8, 9):
        plan = manager.begin_step(1)
        assert plan.decode([sequence]) == []
        plan.commit([token])
    assert manager.match_prefix([100, 101, 0, 7]).num_tokens == 4
    assert manager.match_prefix([100, 101, 0, 8]).num_tokens == 0


# ---- pins


def test_a_pin_keeps_its_blocks_from_allocation() -> None:
    manager = BlockManager(3, BLOCK)
    with retain(manager, tokens(8)) as pin:
        assert (pin.num_tokens, pin.is_released) == (8, False)
        plan = manager.begin_step(100)
        sequence = manager.sequence([1] * 8)
        answer = plan.prefill(sequence, 100)
        assert isinstance(answer, NoRoom)
        assert (answer.needed, answer.available) == (2, 1)
    assert (pin.num_tokens, pin.blocks, pin.is_released) == (0, [], True)
    pin.release()
    assert isinstance(plan.prefill(sequence, 100), Prefilled)
    assert usage(manager) == (0, 1, 2, 0)


def test_a_match_of_nothing_is_a_pin_on_nothing() -> None:
    manager = BlockManager(3, BLOCK)
    pin = manager.match_prefix(tokens(8))
    assert (pin.num_tokens, pin.blocks, pin.is_released) == (0, [], False)
    sequence = manager.sequence([1])
    sequence.attach(pin)
    assert sequence.block_table == []


def test_an_attached_pin_is_a_hit() -> None:
    manager = BlockManager(4, BLOCK)
    pin = retain(manager, tokens(8))
    whole, longer = manager.sequence(tokens(8)), manager.sequence(tokens(9))
    whole.attach(pin)
    longer.attach(pin)
    assert (whole.num_computed_tokens, longer.num_computed_tokens) == (7, 8)
    assert whole.block_table == longer.block_table == pin.blocks
    plan = manager.begin_step(2)
    assert isinstance(plan.prefill(whole, 2), Prefilled)
    assert isinstance(plan.prefill(longer, 2), Prefilled)
    assert (plan.num_tokens, plan.num_samples) == (2, 2)
    plan.commit([1, 2])
    assert usage(manager) == (1, 0, 3, 0)


def test_a_lookahead_that_no_pool_has_does_not_fit() -> None:
    manager = BlockManager(8, BLOCK)
    sequence = computed(manager, tokens(3))
    for lookahead in (32, 2**40, 2**64 - 2, 2**64 - 1):
        plan = manager.begin_step(10)
        assert plan.decode([sequence], lookahead=lookahead) == [0]
        plan.rollback()


# ---- stats


def test_stats_are_monotonic_and_named() -> None:
    manager = BlockManager(3, BLOCK)
    last = manager.stats().as_dict()
    assert set(last.values()) == {0}
    for start in (0, 0, 100, 200, 0):
        leave_evictable(manager, tokens(8, start))
        stats = manager.stats()
        now = stats.as_dict()
        assert now == {name: getattr(stats, name) for name in now}
        assert all(now[name] >= last[name] for name in last)
        assert now["prompt_tokens"] == now["cached_tokens"] + now["computed_tokens"]
        last = now
    assert (last["cached_tokens"], last["committed_steps"]) == (7, 5)
    assert last["evicted_blocks"] > 0


def test_drafts_for_a_batch_take_what_is_left() -> None:
    manager = BlockManager(8, BLOCK)
    first, second = computed(manager, [1, 2]), computed(manager, [3, 4])
    plan = manager.begin_step(5)
    assert plan.decode([first, second]) == []
    assert plan.draft([first, second], [10, 11, 20, 21], [2, 2]) == [2, 1]
    assert (plan.num_tokens, plan.num_samples, plan.budget_left) == (5, 5, 0)
    plan.commit([10, 99, 77], [2, 1])
    assert first.tokens()[-2:] == [10, 99]
    assert (first.num_computed_tokens, second.num_computed_tokens) == (4, 3)
    manager.check()


@pytest.mark.parametrize(
    ("drafts", "counts", "said"),
    [([1], [1, 1], "2 counts"), ([1], [], "0 were given"), ([1, 2], [1], "2 were given")],
)
def test_drafts_that_do_not_belong_together(
    drafts: list[int], counts: list[int], said: str
) -> None:
    manager = BlockManager(8, BLOCK)
    sequence = computed(manager, [1, 2])
    plan = manager.begin_step(8)
    assert plan.decode([sequence]) == []
    with pytest.raises(PlanError, match=said):
        plan.draft([sequence], drafts, counts)
    assert (plan.num_tokens, plan.budget_left) == (1, 7)
    manager.check()
