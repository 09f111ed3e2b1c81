"""The step itself: what is kept while the same sequences decode, and who is in it."""

from pyengine.kv_cache import BlockManager
from pyengine.scheduler.batch import ScheduledStep
from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.support.requests import entries_of, make_sequence


def started(*lengths: int) -> Scheduler:
    """Prompts with nothing in common, all of them through."""
    limits = SchedulerLimits(max_num_batched_tokens=256, max_num_seqs=8)
    scheduler = Scheduler(BlockManager(64, 4), limits)
    for name, length in enumerate(lengths):
        submit(scheduler, str(name), length)
    stepped(scheduler)
    return scheduler


def submit(scheduler: Scheduler, name: str, length: int) -> None:
    tokens = [100 * int(name) + at for at in range(length)]
    scheduler.add(make_sequence(name, tokens))


def finish(scheduler: Scheduler, *names: str) -> None:
    """End requests by their names."""
    sequences = [*scheduler.waiting, *scheduler.running]
    scheduler.finish([sequence for sequence in sequences if sequence.request.request_id in names])


def stepped(scheduler: Scheduler) -> ScheduledStep:
    step = scheduler.schedule()
    assert step is not None
    scheduler.commit(step, [1] * len(step.sampling_sequences))
    return step


def names(step: ScheduledStep) -> list[str]:
    return [sequence.request.request_id for sequence in step.decodes]


def test_the_same_decodes_are_the_same_object() -> None:
    scheduler = started(5, 9, 3)
    first = stepped(scheduler)
    assert (names(first), first.chunks) == (["0", "1", "2"], [])
    assert all(stepped(scheduler).decodes is first.decodes for _ in range(20))


def test_whoever_comes_or_goes_makes_them_others() -> None:
    scheduler = started(5, 9, 3)
    first = stepped(scheduler)
    finish(scheduler, "1")
    second = stepped(scheduler)
    assert names(second) == ["0", "2"]
    submit(scheduler, "3", 6)
    third = stepped(scheduler)
    assert third.decodes is second.decodes  # the newcomer's prompt runs beside them
    assert [entry.sequence.request.request_id for entry in third.chunks] == ["3"]
    assert names(stepped(scheduler)) == ["0", "2", "3"]
    assert names(first) == ["0", "1", "2"]


def test_a_step_that_was_rolled_back_is_planned_again() -> None:
    scheduler = started(5, 9)
    first = scheduler.schedule()
    assert first is not None
    scheduler.rollback(first)
    second = stepped(scheduler)
    assert second.decodes is first.decodes


def test_entries_are_in_plan_order_and_know_their_positions() -> None:
    scheduler = started(5, 9)
    submit(scheduler, "2", 6)
    step = scheduler.schedule()
    assert step is not None
    found = [
        (
            entry.sequence.request.request_id,
            entry.start,
            entry.start + entry.num_tokens,
            entry.samples,
        )
        for entry in entries_of(step)
    ]
    assert found == [("0", 5, 6, True), ("1", 9, 10, True), ("2", 0, 6, True)]
    assert (
        step.sampling_sequences == step.sequences == [entry.sequence for entry in entries_of(step)]
    )
    scheduler.rollback(step)
