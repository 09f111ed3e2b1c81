"""From which states a sample's heads go on, step by step."""

from types import SimpleNamespace
from typing import Any

from pyengine.executor.interface import HeadState, HeadStep
from pyengine.speculation.mtp import StateTrail


class Job:
    def __init__(self) -> None:
        self.num_computed = 0


def decoded(trail: StateTrail, drafts: dict[Any, int]) -> HeadStep:
    """A step that decodes these jobs, each with so many drafts. The plan has counted one token."""
    for job in drafts:
        job.num_computed += 1
    given = {job: [9] * count for job, count in drafts.items() if count}
    step: Any = SimpleNamespace(decodes=tuple(drafts), chunks=[], drafts=given)
    return trail.extend(step)


def chunk(trail: StateTrail, job: Any, count: int, cached: int = 0) -> HeadStep:
    start = job.num_computed + cached
    job.num_computed = start + count
    entry = SimpleNamespace(job=job, start=start, num_tokens=count, end=start + count)
    step: Any = SimpleNamespace(decodes=(), chunks=[entry], drafts={})
    return trail.extend(step)


def test_a_step_follows_the_one_before_as_far_as_drafts_were_accepted() -> None:
    trail, job, other = StateTrail(), Job(), Job()
    first, second = chunk(trail, job, 5), chunk(trail, job, 3)
    assert first.before == [None] and first.rows.tolist() == [4]
    assert second.before == [HeadState(first.after, 0)]
    chunk(trail, other, 4)
    third = decoded(trail, {other: 0, job: 3})
    assert third.rows.tolist() == [0, 1, 2, 3, 4]
    assert third.before[1] == HeadState(second.after, 0)
    job.num_computed += 2  # two drafts were right
    fourth = decoded(trail, {job: 1})
    assert fourth.before == [HeadState(third.after, 3)]
    assert trail.before(job, job.num_computed) == HeadState(fourth.after, 0)  # type: ignore[arg-type]


def test_steps_that_are_undone_are_forgotten_however_often() -> None:
    trail, job = StateTrail(), Job()
    chunk(trail, job, 5)
    stands = decoded(trail, {job: 0})
    for _ in range(5):
        for _ in range(2):
            decoded(trail, {job: 0})
        job.num_computed -= 2
    assert decoded(trail, {job: 0}).before == [HeadState(stands.after, 0)]


def test_a_preempted_one_begins_anew_and_behind_a_hit_nothing_is_known() -> None:
    trail, job = StateTrail(), Job()
    chunk(trail, job, 5)
    decoded(trail, {job: 0})
    job.num_computed = 0
    assert chunk(trail, job, 3, cached=2).before == [None]
    again = chunk(trail, job, 2)
    assert decoded(trail, {job: 0}).before == [HeadState(again.after, 0)]


def test_forks_go_on_from_their_parent_and_ended_ones_leave_nothing() -> None:
    trail, job, other = StateTrail(), Job(), Job()
    prompt = chunk(trail, job, 5)
    trail.fork(job, [other])  # type: ignore[arg-type, list-item]
    for _ in range(4):
        decoded(trail, {job: 0})
    other.num_computed = 5
    assert decoded(trail, {other: 0}).before == [HeadState(prompt.after, 0)]
    for item in (job, other, Job()):
        trail.forget(item)  # type: ignore[arg-type]
    assert not trail._spans
