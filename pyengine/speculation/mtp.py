"""The model's MTP layers as a drafter: the hidden states of each sequence, and its drafts."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyengine.executor.executor import Executor
from pyengine.executor.mtp import DraftRow, HiddenState, MTPStep, StepStates
from pyengine.request.request import SequenceState
from pyengine.scheduler.batch import ScheduledStep
from pyengine.speculation.drafters import Draft

_OPEN_STEPS = 2


@dataclass(frozen=True, slots=True)
class _Span:
    """States of a sequence's `count` tokens from `first` on, in consecutive rows of a step's."""

    step: StepStates
    row: int
    first: int
    count: int


class HiddenStateHistory:
    """The hidden states from which each sequence's MTP layers continue.

    Every step leaves those of each sequence's last tokens. The position of the next step selects
    the accepted one. Two steps may be rolled back, so the states of three steps are kept."""

    def __init__(self) -> None:
        self._spans: dict[SequenceState, deque[_Span]] = {}

    def before(self, sequence: SequenceState, position: int) -> HiddenState | None:
        """The states of its token before `position`; None if they are not known."""
        for span in reversed(self._spans.get(sequence, ())):
            if span.first <= position - 1 < span.first + span.count:
                return HiddenState(span.step, span.row + position - 1 - span.first)
        return None

    def extend(self, step: ScheduledStep) -> MTPStep:
        """The MTP layers' part of a step; later steps can go on from its states."""
        after, end = StepStates(), 0
        rows: list[int] = []
        before: list[HiddenState | None] = []
        for sequence in step.decodes:
            first, count = sequence.num_computed - 1, 1 + len(step.drafts.get(sequence, ()))
            before.append(self.before(sequence, first))
            self._keep(sequence, _Span(after, len(rows), first, count))
            rows += range(end, end + count)
            end += count
        for entry in step.chunks:
            end += entry.num_tokens
            before.append(self.before(entry.sequence, entry.start))
            self._keep(
                entry.sequence, _Span(after, len(rows), entry.start + entry.num_tokens - 1, 1)
            )
            rows.append(end - 1)
        return MTPStep(before, np.array(rows, dtype=np.int64), after)

    def _keep(self, sequence: SequenceState, span: _Span) -> None:
        spans = self._spans.setdefault(sequence, deque(maxlen=1 + _OPEN_STEPS))
        while spans and spans[-1].first >= span.first:  # of steps that were undone
            spans.pop()
        spans.append(span)

    def fork(self, sequence: SequenceState, others: Sequence[SequenceState]) -> None:
        """Let `others` start from the states of `sequence`."""
        for other in others:
            self._spans[other] = self._spans[sequence].copy()

    def forget(self, sequence: SequenceState) -> None:
        """Drop a sequence that has ended."""
        self._spans.pop(sequence, None)


class MTPDrafter:
    """Drafts by the model's MTP layers, for sequences that a step is about to decode."""

    def __init__(self, executor: Executor, block_size: int) -> None:
        self.history = HiddenStateHistory()
        self._executor = executor
        self._block_size = block_size
        self.step: ScheduledStep | None = None
        """The step that was just planned; drafts are for its decodes."""

    def propose(self, contexts: Sequence[SequenceState], limits: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`. Each draft ends with the block in which it begins."""
        assert self.step is not None
        places = {sequence: at for at, sequence in enumerate(self.step.decodes)}
        drafts = [Draft()] * len(contexts)
        draft_rows: list[tuple[int, DraftRow]] = []
        for at, sequence in enumerate(contexts):
            position = sequence.num_computed - 1
            before = self.history.before(sequence, position)
            if before is not None:
                count = min(limits[at], self._block_size - position % self._block_size)
                draft_rows.append(
                    (at, DraftRow(places[sequence], sequence.token_ids[-1], before, count))
                )
        if draft_rows:
            answers = self._executor.draft(self.step.plan, [row for _, row in draft_rows])
            for (at, _), tokens in zip(draft_rows, answers, strict=True):
                drafts[at] = Draft(tokens)
        return drafts

    def forget(self, context: SequenceState) -> None:
        """See `Drafter.forget`."""
        self.history.forget(context)
