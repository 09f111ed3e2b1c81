"""The model's own MTP layers as a drafter: which states a sample goes on from, and what they
say."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from pyengine.executor.executor import Executor
from pyengine.executor.interface import DraftRow, HiddenState, MTPStep, StepStates
from pyengine.scheduler.batch import Job, ScheduledStep
from pyengine.speculation.drafters import Context, Draft

if TYPE_CHECKING:
    from pyengine.engine.request import Sample

_OPEN_STEPS = 2


@dataclass(frozen=True, slots=True)
class _Span:
    """States of a sample's tokens at `first` and after, in consecutive rows of a step's."""

    step: StepStates
    row: int
    first: int
    count: int


class HiddenStateHistory:
    """Where the states stand that each sample's MTP layers go on from.

    Every step leaves those of each sample's last tokens. The next step of it says by its position
    which of them were accepted. Two steps may be rolled back, so of each sample the states of three
    are kept.
    """

    def __init__(self) -> None:
        self._spans: dict[Context, deque[_Span]] = {}

    def before(self, sample: Job, position: int) -> HiddenState | None:
        """The states of its token before `position`; None if they are not known."""
        for span in reversed(self._spans.get(cast("Sample", sample), ())):
            if span.first <= position - 1 < span.first + span.count:
                return HiddenState(span.step, span.row + position - 1 - span.first)
        return None

    def extend(self, step: ScheduledStep) -> MTPStep:
        """What a step is to the MTP layers; those after it can go on from its states."""
        after, end = StepStates(), 0
        rows: list[int] = []
        before: list[HiddenState | None] = []
        for job in step.decodes:
            first, count = job.num_computed - 1, 1 + len(step.drafts.get(job, ()))
            before.append(self.before(job, first))
            self._keep(job, _Span(after, len(rows), first, count))
            rows += range(end, end + count)
            end += count
        for entry in step.chunks:
            end += entry.num_tokens
            before.append(self.before(entry.job, entry.start))
            self._keep(entry.job, _Span(after, len(rows), entry.end - 1, 1))
            rows.append(end - 1)
        return MTPStep(before, np.array(rows, dtype=np.int64), after)

    def _keep(self, job: Job, span: _Span) -> None:
        spans = self._spans.setdefault(cast("Sample", job), deque(maxlen=1 + _OPEN_STEPS))
        while spans and spans[-1].first >= span.first:  # of steps that were undone
            spans.pop()
        spans.append(span)

    def fork(self, sample: "Sample", others: "Sequence[Sample]") -> None:
        """`others` go on from where `sample` stands."""
        for other in others:
            self._spans[other] = self._spans[sample].copy()

    def forget(self, sample: Context) -> None:
        """It has ended."""
        self._spans.pop(sample, None)


class MTPDrafter:
    """Drafts by the model's MTP layers, for samples that a step is about to decode."""

    def __init__(self, executor: Executor, block_size: int) -> None:
        self.history = HiddenStateHistory()
        self._executor = executor
        self._block_size = block_size
        self.step: ScheduledStep | None = None
        """The step that was just planned. Drafts are for its decodes."""

    def propose(self, contexts: Sequence[Context], most: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`. Each draft ends with the block in which it begins."""
        assert self.step is not None
        places = {job: at for at, job in enumerate(self.step.decodes)}
        drafts = [Draft()] * len(contexts)
        asked: list[tuple[int, DraftRow]] = []
        for at, sample in enumerate(cast("Sequence[Sample]", contexts)):
            position = sample.num_computed - 1
            before = self.history.before(sample, position)
            if before is not None:
                count = min(most[at], self._block_size - position % self._block_size)
                asked.append((at, DraftRow(places[sample], sample.token_ids[-1], before, count)))
        if asked:
            found = self._executor.draft(self.step.plan, [row for _, row in asked])
            for (at, _), tokens in zip(asked, found, strict=True):
                drafts[at] = Draft(tokens)
        return drafts

    def forget(self, context: Context) -> None:
        """See `Drafter.forget`."""
        self.history.forget(context)
