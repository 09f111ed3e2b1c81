"""Planning a step while the one before is open: what it may contain, and when it has to wait."""

from pyengine.kv_cache import BlockManager
from pyengine.request.request import SequenceState
from pyengine.scheduler.batch import ScheduledStep
from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.support.requests import entries_of, make_sequence


def make(num_blocks: int = 32, budget: int = 32, slots: int = 4) -> Scheduler:
    manager = BlockManager(num_blocks, 4)
    limits = SchedulerLimits(max_num_batched_tokens=budget, max_num_seqs=slots)
    return Scheduler(manager, limits)


def add(scheduler: Scheduler, name: str, length: int, **settings: int) -> None:
    tokens = [1000 * int(name) + at for at in range(length)]
    scheduler.add(make_sequence(name, tokens, **settings))  # type: ignore[arg-type]


def finish(scheduler: Scheduler, *names: str) -> None:
    """End requests by their names."""
    sequences = [*scheduler.waiting, *scheduler.running]
    scheduler.finish([sequence for sequence in sequences if sequence.request.request_id in names])


def planned(step: ScheduledStep | None) -> list[tuple[str, int, int]]:
    assert step is not None
    return [
        (entry.sequence.request.request_id, entry.start, entry.start + entry.num_tokens)
        for entry in entries_of(step)
    ]


def test_it_decodes_what_is_being_sampled_and_goes_on_with_chunks_and_admits() -> None:
    scheduler = make(budget=10)
    add(scheduler, "0", 3)
    add(scheduler, "1", 14)
    first = scheduler.schedule()
    assert planned(first) == [("0", 0, 3), ("1", 0, 4)]
    add(scheduler, "2", 2)
    second = scheduler.schedule(ahead=True)
    assert planned(second) == [("0", 3, 4), ("1", 4, 12), ("2", 0, 1)]
    assert first and second
    scheduler.commit(first, [7])
    scheduler.commit(second, [8])
    third = scheduler.schedule()
    assert planned(third) == [("0", 4, 5), ("2", 1, 2), ("1", 12, 14)]
    assert third
    scheduler.commit(third, [9, 9, 9])
    counts = [(sequence.num_computed, sequence.num_tokens) for sequence in scheduler._running]
    assert counts == [(5, 6), (14, 15), (2, 3)]


def test_rolled_back_newest_first_nothing_was_planned() -> None:
    scheduler = make(budget=10)
    add(scheduler, "0", 3)
    add(scheduler, "1", 14)
    first, second = scheduler.schedule(), scheduler.schedule(ahead=True)
    assert first and second
    before = planned(first), planned(second)
    scheduler.rollback(second)
    assert [(sequence.num_computed, sequence.num_tokens) for sequence in scheduler._running] == [
        (3, 4),
        (4, 14),
    ]
    scheduler.rollback(first)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 2)
    assert [(sequence.num_computed, sequence.num_tokens) for sequence in scheduler.waiting] == [
        (0, 3),
        (0, 14),
    ]
    again, ahead = scheduler.schedule(), scheduler.schedule(ahead=True)
    assert (planned(again), planned(ahead)) == before


def test_who_gets_the_last_token_is_not_planned_again() -> None:
    scheduler = make()
    add(scheduler, "0", 3, max_tokens=4)
    add(scheduler, "1", 3, max_tokens=5)
    first = scheduler.schedule()
    assert len(planned(first)) == 2
    second = scheduler.schedule(ahead=True)
    assert planned(second) == [("1", 3, 4)]
    assert first and second
    scheduler.commit(first, [1, 1])
    finish(scheduler, "0")
    assert scheduler.schedule(ahead=True) is None
    scheduler.commit(second, [1])
    finish(scheduler, "1")
    assert not scheduler.has_work
    assert scheduler.schedule() is None


def test_it_waits_where_somebody_must_be_preempted() -> None:
    scheduler = make(num_blocks=3)
    add(scheduler, "0", 4)
    add(scheduler, "1", 4)
    first = scheduler.schedule()
    assert len(planned(first)) == 2
    assert scheduler.schedule(ahead=True) is None  # two blocks are needed, one is left
    assert scheduler._manager.usage().active == 2
    assert scheduler.num_preemptions == 0
    assert first
    scheduler.commit(first, [5, 6])
    assert planned(scheduler.schedule()) == [("0", 4, 5)]
    assert scheduler.num_preemptions == 1


def test_it_waits_where_a_chunk_finds_no_room() -> None:
    """One decodes and grows; the other computes one token of its prompt a step."""
    scheduler = make(num_blocks=5, budget=2, slots=2)
    asked: list[str] = []
    preempt_for = scheduler._preempt_for

    def watched(step: ScheduledStep, sequence: SequenceState) -> SequenceState:
        asked.append(sequence.request.request_id)
        return preempt_for(step, sequence)

    scheduler._preempt_for = watched  # type: ignore[method-assign]
    add(scheduler, "0", 2)
    add(scheduler, "1", 14)
    step = scheduler.schedule()
    while step is not None:
        following = scheduler.schedule(ahead=True)
        scheduler.commit(step, [1] * len(step.sampling_sequences))
        last, step = step, following
    assert asked == ["1"]
    assert last.is_ahead
    assert scheduler.num_preemptions == 0
    assert planned(scheduler.schedule())[0][0] == "0"
    assert scheduler.num_preemptions == 1
    scheduler._manager.check()
