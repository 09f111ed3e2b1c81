"""Through the Python API: the reason why a prompt is not cached."""

import pytest

from pyengine.kv_cache import BlockManager, Prefilled, TokenError
from tests.support.blocks import computed

BLOCK = 4


def tokens(count: int, start: int = 1) -> list[int]:
    return list(range(start, start + count))


def test_where_a_prompt_leaves_the_nearest_cached_prefix() -> None:
    manager = BlockManager(16, BLOCK, explain=True)
    computed(manager, tokens(12)).free()
    explanation = manager.explain([*tokens(9), 99, 100, 101])
    assert explanation.num_pool_tokens == 8 and explanation.num_copied_tokens == 1
    assert (explanation.reason, explanation.position) == ("diverged", 8)
    assert (explanation.diverged_at, explanation.diverged_tokens) == (9, [10, 11, 12])
    assert explanation.evicted_by is None and explanation.num_evicted_since is None
    assert repr(explanation) == (
        "Explanation(num_pool_tokens=8, num_in_flight_tokens=0, num_copied_tokens=1, "
        "reason='diverged')"
    )


def test_a_hit_has_no_reason() -> None:
    manager = BlockManager(16, BLOCK, explain=True)
    computed(manager, tokens(8)).free()
    explanation = manager.explain(tokens(9))
    assert (explanation.num_pool_tokens, explanation.position, explanation.reason) == (
        8,
        None,
        None,
    )
    assert explanation.diverged_at is None and explanation.diverged_tokens == []


def test_an_eviction() -> None:
    manager = BlockManager(4, BLOCK, explain=True)
    computed(manager, tokens(8)).free()
    computed(manager, tokens(12, start=100)).free()
    explanation = manager.explain(tokens(8))
    assert (explanation.reason, explanation.position) == ("evicted", 4)
    assert (explanation.evicted_by, explanation.num_evicted_since) == ("lru", BLOCK)
    manager.evict_all()
    assert manager.explain(tokens(8)).evicted_by == "evict_all"


def test_a_namespace_answers_for_itself() -> None:
    manager = BlockManager(16, BLOCK, explain=True)
    computed(manager, tokens(8)).free()
    assert manager.explain(tokens(8), namespace=b"other").reason == "new"


def test_a_sequence_remembers_why() -> None:
    manager = BlockManager(16, BLOCK, explain=True)
    computed(manager, tokens(12)).free()
    sequence = manager.sequence([*tokens(9), 99, 100, 101])
    plan = manager.begin_step(64)
    plan.prefill(sequence, 64)
    assert len(plan.copies()) == 1
    plan.commit([0])
    explanation = sequence.explain()
    assert (explanation.num_pool_tokens, explanation.num_copied_tokens) == (8, 1)
    assert (explanation.reason, explanation.diverged_at) == ("diverged", 9)


def test_sequences_of_one_step() -> None:
    manager = BlockManager(16, BLOCK, explain=True)
    first, second = manager.sequence(tokens(9)), manager.sequence(tokens(9))
    plan = manager.begin_step(64)
    assert isinstance(plan.prefill(first, 64), Prefilled)
    assert isinstance(plan.prefill(second, 64), Prefilled)
    plan.commit([7, 7])
    assert second.explain().num_in_flight_tokens == 8
    assert (first.explain().reason, second.explain().reason) == ("new", None)


def test_without_explain_no_reason_is_kept() -> None:
    manager = BlockManager(16, BLOCK)
    sequence = computed(manager, tokens(8))
    assert sequence.explain().reason is None
    assert manager.explain(tokens(8, start=50)).reason == "new"  # asked for, it is looked up


@pytest.mark.parametrize("bad", [[-1], ["a"], [1.5]])
def test_tokens_that_are_none(bad: list[object]) -> None:
    with pytest.raises(TokenError):
        BlockManager(16, BLOCK).explain(bad)  # type: ignore[arg-type]
