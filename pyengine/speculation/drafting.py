"""Which decodes of a step get drafts: what drafters propose, cut to what could be accepted."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from pyengine.executor.interface import HeadStep
from pyengine.scheduler.batch import ScheduledStep
from pyengine.scheduler.scheduler import Scheduler
from pyengine.speculation.drafters import Draft
from pyengine.speculation.mtp import HeadDrafter
from pyengine.speculation.policy import StepSize
from pyengine.speculation.speculator import Speculator

if TYPE_CHECKING:
    from pyengine.engine.request import Sample


class Drafting:
    """The engine's side of speculation."""

    def __init__(
        self, speculator: Speculator, scheduler: Scheduler, heads: HeadDrafter | None = None
    ) -> None:
        """`heads` is the speculator's drafter, where that is the model's own heads."""
        self._speculator = speculator
        self._scheduler = scheduler
        self._heads = heads
        self._asked: frozenset[Sample] = frozenset()
        """For whom drafts were looked for when the newest step was planned."""
        self.num_drafts = 0
        """Decodes that were computed with drafts."""

    def expect(self, step: ScheduledStep) -> None:
        """See who else has to wait for what `step`, which runs, gives: those who then get drafts.

        They are looked for without that token, which is not known yet; where they were when `step`
        was planned, there are none. Heads cannot go on without it: whoever they draft for waits.
        """
        samples = [
            one
            for one in cast("list[Sample]", step.sampling_jobs)
            if one.speculates and one.finish_reason is None and not one.waits_for_tokens
        ]
        if self._heads is not None:
            for sample in samples:
                sample.wants_drafts = True
            return
        unasked = [one for one in samples if one not in self._asked]
        found = self._found(unasked, step)
        for sample in samples:
            sample.wants_drafts = sample in found

    def extend(self, step: ScheduledStep) -> None:
        """Let a step that was just planned compute drafts with its decodes."""
        samples = [
            one
            for one in cast("tuple[Sample, ...]", step.decodes)
            if one.speculates and one.is_known
        ]
        if self._heads is not None:
            self._heads.step = step
        self._asked = frozenset(samples)
        self._scheduler.draft(step, self._found(samples, step))

    def head_step(self, step: ScheduledStep) -> HeadStep | None:
        """What a step that is about to run is to the model's heads; None if they do not draft."""
        return None if self._heads is None else self._heads.trail.extend(step)

    def fork(self, sample: "Sample", others: "Sequence[Sample]") -> None:
        """`others` go on from where `sample` stands."""
        if self._heads is not None:
            self._heads.trail.fork(sample, others)

    def give_up(self, sample: "Sample", reason: object) -> None:
        """Let a sample go on without drafts."""
        sample.speculates = False
        self._speculator.give_up(sample, reason)

    def forget(self, samples: "Sequence[Sample]") -> None:
        """These have ended."""
        for sample in samples:
            self._speculator.forget(sample)

    def _found(
        self, samples: "Sequence[Sample]", step: ScheduledStep
    ) -> "dict[Sample, Sequence[int]]":
        """Drafts that are worth computing beside a step."""
        if not samples:
            return {}
        budget = self._scheduler.limits.max_num_batched_tokens - step.num_tokens
        self._speculator.begin_step(max(0, budget))
        most = [one.max_output - len(one.token_ids) - 1 for one in samples]
        given = self._speculator.propose(samples, most)
        drafts = [_possible(sample, draft) for sample, draft in zip(samples, given, strict=True)]
        num_drawn = sum([one.is_drawn for one in cast("tuple[Sample, ...]", step.decodes)])
        size = StepSize(step.num_tokens, len(step.decodes), num_drawn)
        counts = self._speculator.keep(samples, drafts, size)
        return {
            sample: draft.tokens[:count]
            for sample, draft, count in zip(samples, drafts, counts, strict=True)
            if count
        }


def _possible(sample: "Sample", draft: Draft) -> Draft:
    """A draft up to the first token that would end the sample, or that its form does not allow."""
    tokens, stop_ids, matcher = draft.tokens, sample.stop_ids, sample.sampling.matcher
    if not stop_ids.isdisjoint(tokens):
        tokens = tokens[: [token in stop_ids for token in tokens].index(True)]
    if matcher is not None and len(tokens):
        tokens = tokens[: matcher.num_allowed(tokens)]
    return draft if tokens is draft.tokens else replace(draft, tokens=tokens)
