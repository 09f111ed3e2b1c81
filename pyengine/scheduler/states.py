"""The slots of running states, for models with recurrent layers: one for each running sequence."""

from collections.abc import Iterable
from heapq import heappop, heappush

from pyengine.request.request import SequenceState
from pyengine.scheduler.batch import ScheduledStep


class RunningStates:
    """Assigns a slot to each sequence from its first step until it ends or is preempted."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        self._forks: dict[SequenceState, int] = {}
        """Sequences that begin with the state of another one, and its slot."""
        self._unknown: dict[SequenceState, None] = {}

    def slots_of(self, step: ScheduledStep) -> list[int]:
        """The slots of the sequences of a step, in its order."""
        sequences = step.sequences
        for sequence in sequences:
            if sequence.state_slot < 0:
                sequence.state_slot = heappop(self._free)
        return [sequence.state_slot for sequence in sequences]

    def fork(self, parent: SequenceState, child: SequenceState) -> None:
        """Give `child` a copy of a running state, made before the next step.

        Until then the slot of `parent` stays unchanged, even if it ends and another one gets it.
        """
        child.state_slot = heappop(self._free)
        self._forks[child] = parent.state_slot

    def take_forks(self, step: ScheduledStep) -> list[tuple[int, int]]:
        """The copies of slots to make before this step, (source, destination)."""
        forks, self._forks = self._forks, {}
        step.forked = tuple(forks)
        return [(source, child.state_slot) for child, source in forks.items()]

    def release(self, sequence: SequenceState) -> None:
        """Free the slot of a sequence, if it has one."""
        self._forks.pop(sequence, None)
        self._unknown.pop(sequence, None)
        if sequence.state_slot >= 0:
            heappush(self._free, sequence.state_slot)
            sequence.state_slot = -1

    def failed(self, step: ScheduledStep) -> None:
        """Forget the states that a submitted step may have changed."""
        self._unknown |= dict.fromkeys([*step.sequences, *step.forked])

    def take_unknown(self) -> Iterable[SequenceState]:
        """Running sequences whose states are unknown: they are to be computed again."""
        unknown, self._unknown = self._unknown, {}
        return [sequence for sequence in unknown if sequence.is_running]
