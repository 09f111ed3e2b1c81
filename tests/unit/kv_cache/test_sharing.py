"""Through the Python API: in-flight sharing, forks, speculation, two steps open, events."""

from collections.abc import Callable

import numpy as np
import pytest

from pyengine.kv_cache import (
    BlockManager,
    Cleared,
    ConfigError,
    Lost,
    PlanError,
    Prefilled,
    Removed,
    ReplicaIndex,
    Sequence,
    StepBuffers,
    Stored,
    TokenError,
)
from tests.support.blocks import computed, step_arrays, unchanged

BLOCK = 4


def tokens(count: int, start: int = 1) -> list[int]:
    return list(range(start, start + count))


def test_32_equal_prompts_cost_one_prefill_and_31_tokens() -> None:
    manager = BlockManager(1024, 16)
    sequences = [manager.sequence(tokens(512)) for _ in range(32)]
    plan = manager.begin_step(16384)
    answers = [plan.prefill(sequence, 512) for sequence in sequences]
    assert plan.num_tokens == 512 + 31
    assert all(isinstance(answer, Prefilled) for answer in answers)
    assert manager.usage().active == 32
    assert plan.commit([7] * 32) == []
    assert {tuple(sequence.block_table) for sequence in sequences} == {tuple(range(32))}
    assert [manager.refs(block) for block in range(32)] == [32] * 32
    stats = manager.stats()
    assert (stats.in_flight_blocks, stats.merged_blocks) == (31 * 32, 0)  # memory saved
    assert stats.cached_tokens == 31 * 511  # prefill saved
    assert (stats.registered_blocks, stats.allocated_blocks) == (32, 32)


def test_without_sharing_the_same_blocks_after_the_commit() -> None:
    manager = BlockManager(2048, 16, in_flight_sharing=False)
    sequences = [manager.sequence(tokens(512)) for _ in range(32)]
    plan = manager.begin_step(16384)
    for sequence in sequences:
        plan.prefill(sequence, 512)
    assert plan.num_tokens == 32 * 512
    remappings = plan.commit([7] * 32)
    assert len(remappings) == 31 * 32
    assert [
        (remapping.sequence_id, remapping.index, remapping.new_block) for remapping in remappings
    ] == [(sequence.id, index, index) for sequence in sequences[1:] for index in range(32)]
    assert manager.usage().active == 32
    assert {tuple(sequence.block_table) for sequence in sequences} == {tuple(range(32))}
    stats = manager.stats()
    assert (stats.in_flight_blocks, stats.merged_blocks) == (0, 31 * 32)  # memory saved
    assert (stats.cached_tokens, stats.registered_blocks) == (0, 32)  # no prefill saved


def sharing_pair(manager: BlockManager) -> tuple[Sequence, Sequence]:
    return manager.sequence(tokens(9)), manager.sequence(tokens(10))


def test_cancelling_takes_those_along_that_share() -> None:
    manager = BlockManager(8, BLOCK)
    first, second = sharing_pair(manager)
    other = manager.sequence(tokens(3, start=50))
    plan = manager.begin_step(100)
    for sequence in (first, other, second):
        plan.prefill(sequence, 100)
    assert plan.cancel(first) == [second.id]
    assert (plan.num_sequences, plan.num_tokens) == (1, 3)
    assert first.block_table == second.block_table == []
    assert manager.match_prefix(tokens(8)).num_tokens == 0
    plan.commit([1])
    manager.check()


def test_a_rolled_back_step_leaves_no_one_with_content_that_was_never_written() -> None:
    manager = BlockManager(8, BLOCK)
    first, second = sharing_pair(manager)
    plan = manager.begin_step(100)
    plan.prefill(first, 100)
    plan.prefill(second, 100)
    assert manager.match_prefix(tokens(8)).num_tokens == 0  # not ready: no pin on it
    plan.rollback()
    assert first.block_table == second.block_table == []
    assert manager.cached_hashes() == []
    assert manager.usage().free == 8


def test_the_death_of_the_one_that_computes() -> None:
    manager = BlockManager(8, BLOCK)
    first, second = sharing_pair(manager)
    plan = manager.begin_step(100)
    plan.prefill(first, 100)
    plan.prefill(second, 100)
    first.free()
    plan.commit([1, 2])  # its KV was computed with the batch
    assert manager.refs(second.block_table[0]) == 1
    assert manager.match_prefix(tokens(8)).num_tokens == 8
    manager.check()


def test_reuses_at_each_boundary_what_has_come_since() -> None:
    """A second request that comes while the first is half through its 4,096 tokens."""
    manager = BlockManager(1024, 16)
    sequences = [manager.sequence(tokens(4096))]
    planned: list[list[tuple[int, int]]] = []
    while any(sequence.num_computed_tokens < 4096 for sequence in sequences):
        if len(sequences) == 1 and sequences[0].num_computed_tokens == 2048:
            sequences.append(manager.sequence(tokens(4096)))
        plan = manager.begin_step(1024)
        planned.append([])
        for sequence in sequences:
            if sequence.num_computed_tokens < 4096:
                answer = plan.prefill(sequence, 512)
                assert isinstance(answer, Prefilled)
                planned[-1].append((answer.num_cached_tokens, answer.num_tokens))
        plan.commit([9] * plan.num_samples)
    assert planned == [  # (reused, computed) of the first and the second
        *([(0, 512)] for _ in range(4)),
        [(0, 512), (2048 + 512, 512)],  # 512 of them are computed in the same step
        [(512, 512), (512, 512)],  # each goes on where the other has come to
        [(511, 1)],
    ]
    assert sum(computed for step in planned for _, computed in step) == 4096 + 1
    first, second = sequences
    assert first.block_table == second.block_table
    assert manager.usage().active == 256
    manager.check()


# ---- forks


def test_a_fork_copies_its_partial_block_when_it_writes() -> None:
    manager = BlockManager(8, BLOCK)
    parent = computed(manager, tokens(6))
    child = parent.fork(6)
    child.append([99])
    assert child.block_table == parent.block_table
    assert manager.refs(parent.block_table[1]) == 2
    plan = manager.begin_step(10)
    assert plan.decode([parent, child]) == []
    [(source, target)] = plan.copies()
    assert parent.block_table[1] == target
    assert child.block_table[1] == source  # the last owner writes in place
    plan.commit([1, 2])
    assert manager.stats().copied_blocks == 1
    manager.check()


def test_a_fork_inside_a_cached_block_does_not_write_to_it() -> None:
    manager = BlockManager(8, BLOCK)
    parent = computed(manager, tokens(8))
    child = parent.fork(6)
    child.append([99])
    parent.free()
    plan = manager.begin_step(10)
    plan.decode([child])
    assert len(plan.copies()) == 1
    plan.commit([1])
    assert manager.match_prefix(tokens(8)).num_tokens == 8
    assert manager.match_prefix([*tokens(6), 99, 1]).num_tokens == 4
    manager.check()


@pytest.mark.parametrize("length", [0, 9, -1])
def test_forks_of_a_wrong_length(length: int) -> None:
    manager = BlockManager(8, BLOCK)
    parent = computed(manager, tokens(6))
    error = ConfigError if length < 0 else TokenError
    with unchanged(manager), pytest.raises(error, match=str(length)):
        parent.fork(length)


# ---- speculation


def test_drafts_are_computed_and_those_accepted_stay() -> None:
    manager = BlockManager(8, BLOCK)
    sequence = computed(manager, tokens(6))
    known = sequence.tokens()
    plan = manager.begin_step(10)
    assert isinstance(plan.speculate(sequence, [11, 12, 13, 14]), Prefilled)
    assert (plan.num_tokens, plan.num_samples) == (5, 5)
    arrays = step_arrays(sequences=8)
    plan.fill(StepBuffers(**arrays))
    assert arrays["input_ids"][:5].tolist() == [known[-1], 11, 12, 13, 14]
    assert arrays["logits_indices"][:5].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(PlanError, match="1 to 5 tokens"):
        plan.commit([11, 99, 5], [3])  # 99 was no draft
    plan.commit([11, 12, 50], [3])
    assert sequence.tokens() == [*known, 11, 12, 50]
    assert sequence.num_computed_tokens == len(known) + 2
    assert len(sequence.block_table) == 3
    assert sequence.trim(len(known) + 2) == 0  # nine positions fill three blocks
    with pytest.raises(PlanError, match="cannot be trimmed to 3"):
        sequence.trim(3)
    manager.check()


def test_lookahead_slots_are_given_back_to_the_block() -> None:
    manager = BlockManager(8, BLOCK)
    sequence = computed(manager, tokens(6))
    plan = manager.begin_step(10)
    assert plan.decode([sequence], lookahead=9) == []
    plan.commit([5])
    assert len(sequence.block_table) == 4
    assert sequence.trim(sequence.num_tokens) == 2
    assert manager.usage().active == 2


# ---- two steps open


def test_a_step_is_planned_before_the_tokens_of_the_one_before_are_known() -> None:
    manager = BlockManager(16, BLOCK)
    sequences = [computed(manager, tokens(count)) for count in (6, 7, 8)]
    running = manager.begin_step(10)
    running.decode(sequences)
    following = manager.begin_step(10)
    assert following.decode(sequences[::-1]) == []
    arrays = step_arrays()
    following.fill(StepBuffers(**arrays))
    assert arrays["input_ids"][:3].tolist() == [-3, -2, -1]  # rows 2, 1 and 0 of the step before
    assert arrays["positions"][:3].tolist() == [9, 8, 7]
    sequences[0].free()  # it turns out to have ended
    running.commit(np.array([21, 22, 23]))
    following.fill(StepBuffers(**arrays))
    assert arrays["input_ids"][:3].tolist() == [23, 22, 21]
    following.commit([31, 32, 33])
    assert sequences[2].tokens()[-2:] == [23, 31]
    manager.check()
    del sequences
    assert manager.usage().active == 0


def test_a_block_that_an_open_step_reads_is_not_handed_out() -> None:
    manager = BlockManager(5, BLOCK, in_flight_sharing=False)
    first, second = manager.sequence(tokens(4)), manager.sequence(tokens(4))
    running = manager.begin_step(10)
    running.prefill(first, 4)
    running.prefill(second, 4)
    duplicate = second.block_table[0]
    following = manager.begin_step(10)
    following.decode([second])
    [remapping] = running.commit([1, 2])
    assert remapping.old_block == duplicate
    assert manager.state(duplicate) == "pinned"  # the open step may still read it
    following.commit([3])
    assert manager.state(duplicate) == "free"
    manager.check()


# ---- events


def test_events_tell_what_enters_and_leaves() -> None:
    manager = BlockManager(4, BLOCK, events=True, hash_seed=0)
    computed(manager, tokens(9)).free()
    first, second = manager.take_events()
    assert isinstance(first, Stored) and isinstance(second, Stored)
    assert (first.tokens, first.parent, first.namespace) == (tokens(4), None, b"")
    assert (second.tokens, second.parent) == (tokens(4, start=5), first.hash)
    assert set(manager.cached_hashes()) == {first.hash, second.hash}
    computed(manager, tokens(9)).free()  # reused: nothing new
    assert manager.take_events() == []
    held = computed(manager, tokens(11, start=50))
    kinds = [type(event) for event in manager.take_events()]
    assert kinds == [Removed, Stored, Stored]
    held.free()
    manager.evict_all()
    [event] = manager.take_events()
    assert isinstance(event, Cleared)
    assert manager.cached_hashes() == []


def test_events_that_nobody_takes_are_bounded_and_the_whole_set_is_stated_then() -> None:
    manager, replicas = (
        BlockManager(4, BLOCK, events=True, hash_seed=0),
        ReplicaIndex(4, hash_seed=0),
    )
    for prompt in range(40_000):
        computed(manager, [prompt] * 5).free()
    lost, cleared, *stored = manager.take_events()
    assert isinstance(lost, Lost) and isinstance(cleared, Cleared)
    assert (lost.num_events, repr(lost)) == (79_997, "Lost(num_events=79997)")
    hashes = {event.hash for event in stored if isinstance(event, Stored)}
    assert hashes == set(manager.cached_hashes()) and len(stored) == 3
    assert manager.take_events() == []
    replicas.apply(0, b"\1", bytes(16))
    for prompt in range(40_000):
        computed(manager, [prompt] * 5).free()
    kinds, packed = manager.take_packed_events()
    assert (kinds, replicas.apply(0, kinds, packed)) == (b"\2\1\1\1", 3)
    assert set(replicas.cached_blocks(0)) == set(manager.cached_hashes())


def test_of_evictions_that_nobody_takes_the_latest_are_kept() -> None:
    manager = BlockManager(4, BLOCK, keep_evicted=True)
    for prompt in range(1000):
        computed(manager, [prompt] * 5).free()
    evicted = manager.take_evicted()
    assert 4 <= len(evicted) <= 8
    assert [record.tokens[0] for record in evicted] == list(range(997 - len(evicted), 997))


# ---- eviction


LOOKS: dict[str, Callable[[BlockManager, Sequence], object]] = {
    "explain": lambda manager, _: [
        manager.explain([name] * 9, namespace=space) for name in range(8) for space in (b"", b"x")
    ],
    "explain a sequence": lambda _, sequence: sequence.explain(),
    "preview": lambda manager, sequence: manager.preview(sequence),
    "states": lambda manager, _: [
        (manager.state(block), manager.refs(block), manager.seq_refs(block)) for block in range(16)
    ],
    "hashes and events": lambda manager, _: (manager.cached_hashes(), manager.take_events()),
    "counts": lambda manager, _: (manager.stats(), manager.usage(), manager.snapshot()),
    "check": lambda manager, _: manager.check(),
    "a match of another namespace": lambda manager, _: [
        manager.match_prefix([name] * 9, namespace=b"x").release() for name in range(8)
    ],
    "sequences that never run": lambda manager, _: [
        manager.sequence([name] * 9, namespace=space).free()
        for name in range(8)
        for space in (b"", b"x")
    ],
    "an empty step": lambda manager, _: manager.begin_step(8).rollback(),
}
"""Calls that look at a pool, or at it from another namespace."""


@pytest.mark.parametrize("eviction", ["lru", "2q"])
@pytest.mark.parametrize("look", [None, *LOOKS])
def test_looking_changes_no_order_of_eviction(eviction: str, look: str | None) -> None:
    manager = BlockManager(
        16, BLOCK, eviction=eviction, explain=True, keep_evicted=True, events=True, hash_seed=1
    )
    for name in (0, 1, 2, 3, 4, 5, 6, 7, 2):
        computed(manager, [name] * 9).free()
    sequence = computed(manager, [77])
    if look is not None:
        LOOKS[look](manager, sequence)
    manager.take_evicted()
    order = list[int]()
    for name in range(100, 107):
        computed(manager, [name] * 9).free()
        order += [record.tokens[0] for record in manager.take_evicted()]
    kept = [2, 2] if eviction == "lru" else [100, 100]
    assert order == [0, 1, 1, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, *kept]


def test_two_queues_keep_what_comes_back() -> None:
    """Prompts that never return flush an LRU; they do not flush what is used again."""

    def hits(policy: str) -> int:
        manager = BlockManager(8, BLOCK, eviction=policy)
        for round_ in range(20):
            computed(manager, tokens(9)).free()  # comes back every time
            for strange in range(4):
                computed(manager, tokens(9, start=100 + 50 * (5 * round_ + strange))).free()
        manager.check()
        return manager.stats().hit_blocks

    assert hits("lru") == 0
    assert hits("2q") > 30


@pytest.mark.parametrize(("keep", "cached"), [(None, 4), (0, 0), (7, 1), (8, 2), (1000, 4)])
def test_a_beginning_stays_cached(keep: int | None, cached: int) -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    sequence = manager.sequence(list(range(16)))
    plan = manager.begin_step(64)
    plan.prefill(sequence, 64)
    plan.commit([1])
    sequence.free(keep=keep)
    assert manager.usage().evictable == cached
    assert manager.stats().discarded_blocks == 4 - cached
    with manager.match_prefix(list(range(16))) as pin:
        assert pin.num_tokens == 4 * cached
    manager.check()
