"""From which states a sample's MTP layers go on, step by step."""

from types import SimpleNamespace
from typing import Any

from pyengine.executor.mtp import HiddenState, MTPStep
from pyengine.speculation.mtp import HiddenStateHistory


class SequenceState:
    def __init__(self) -> None:
        self.num_computed = 0


def decoded(history: HiddenStateHistory, drafts: dict[Any, int]) -> MTPStep:
    """A step that decodes these sequences, each with so many drafts. The plan has counted one
    token."""
    for sequence in drafts:
        sequence.num_computed += 1
    given = {sequence: [9] * count for sequence, count in drafts.items() if count}
    step: Any = SimpleNamespace(decodes=tuple(drafts), chunks=[], drafts=given)
    return history.extend(step)


def chunk(history: HiddenStateHistory, sequence: Any, count: int, cached: int = 0) -> MTPStep:
    start = sequence.num_computed + cached
    sequence.num_computed = start + count
    entry = SimpleNamespace(sequence=sequence, start=start, num_tokens=count, end=start + count)
    step: Any = SimpleNamespace(decodes=(), chunks=[entry], drafts={})
    return history.extend(step)


def test_a_step_follows_the_one_before_as_far_as_drafts_were_accepted() -> None:
    history, sequence, other = HiddenStateHistory(), SequenceState(), SequenceState()
    first, second = chunk(history, sequence, 5), chunk(history, sequence, 3)
    assert first.before == [None] and first.rows.tolist() == [4]
    assert second.before == [HiddenState(first.after, 0)]
    chunk(history, other, 4)
    third = decoded(history, {other: 0, sequence: 3})
    assert third.rows.tolist() == [0, 1, 2, 3, 4]
    assert third.before[1] == HiddenState(second.after, 0)
    sequence.num_computed += 2  # two drafts were right
    fourth = decoded(history, {sequence: 1})
    assert fourth.before == [HiddenState(third.after, 3)]
    assert history.before(sequence, sequence.num_computed) == HiddenState(fourth.after, 0)  # type: ignore[arg-type]


def test_steps_that_are_undone_are_forgotten_however_often() -> None:
    history, sequence = HiddenStateHistory(), SequenceState()
    chunk(history, sequence, 5)
    stands = decoded(history, {sequence: 0})
    for _ in range(5):
        for _ in range(2):
            decoded(history, {sequence: 0})
        sequence.num_computed -= 2
    assert decoded(history, {sequence: 0}).before == [HiddenState(stands.after, 0)]


def test_a_preempted_one_begins_anew_and_behind_a_hit_nothing_is_known() -> None:
    history, sequence = HiddenStateHistory(), SequenceState()
    chunk(history, sequence, 5)
    decoded(history, {sequence: 0})
    sequence.num_computed = 0
    assert chunk(history, sequence, 3, cached=2).before == [None]
    again = chunk(history, sequence, 2)
    assert decoded(history, {sequence: 0}).before == [HiddenState(again.after, 0)]


def test_forks_go_on_from_their_parent_and_ended_ones_leave_nothing() -> None:
    history, sequence, other = HiddenStateHistory(), SequenceState(), SequenceState()
    prompt = chunk(history, sequence, 5)
    history.fork(sequence, [other])  # type: ignore[arg-type, list-item]
    for _ in range(4):
        decoded(history, {sequence: 0})
    other.num_computed = 5
    assert decoded(history, {other: 0}).before == [HiddenState(prompt.after, 0)]
    for item in (sequence, other, SequenceState()):
        history.forget(item)  # type: ignore[arg-type]
    assert not history._spans
