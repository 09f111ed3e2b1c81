"""Which decodes of a step get drafts: what drafters propose, cut to what could be accepted."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from pyengine.engine.request import Sample
from pyengine.scheduler import ScheduledStep, Scheduler
from pyengine.speculation import Draft, Speculator


class Drafting:
    """The engine's side of speculation."""

    def __init__(self, speculator: Speculator, scheduler: Scheduler) -> None:
        self._speculator = speculator
        self._scheduler = scheduler
        self._planned: dict[Sample, Draft] = {}
        """What open steps compute."""
        self.num_drafts = 0
        """Drafts that were computed."""

    def expect(self, step: ScheduledStep) -> None:
        """See who else has to wait for what `step`, which runs, gives: those who then get drafts.

        They are looked for without that token, which is not known yet.
        """
        samples = [
            one
            for one in cast(list[Sample], step.sampling_jobs)
            if one.speculates and one.finish_reason is None and not one.waits_for_tokens
        ]
        found = self._found(samples, step.num_tokens)
        for sample in samples:
            sample.wants_drafts = sample in found

    def extend(self, step: ScheduledStep) -> None:
        """Let a step that was just planned compute drafts with its decodes."""
        samples = [
            one for one in cast(tuple[Sample, ...], step.decodes) if one.speculates and one.is_known
        ]
        found = self._found(samples, step.num_tokens)
        self._scheduler.draft(step, {sample: draft.tokens for sample, draft in found.items()})
        for sample, tokens in cast(dict[Sample, Sequence[int]], step.drafts).items():
            self._planned[sample] = replace(found[sample], tokens=tokens)

    def learn(self, step: ScheduledStep, counts: Sequence[int]) -> None:
        """Take note of how many tokens each of a step's sampling jobs got."""
        for sample, count in zip(cast(list[Sample], step.sampling_jobs), counts, strict=True):
            if sample in step.drafts:
                self.num_drafts += 1
                draft = self._planned.pop(sample, None)
                if draft is not None:  # else it has ended meanwhile
                    self._speculator.learn(sample, draft, count - 1)

    def give_up(self, sample: Sample, reason: object) -> None:
        """Let a sample go on without drafts."""
        sample.speculates = False
        self._speculator.give_up(sample, reason)

    def forget(self, samples: Sequence[Sample]) -> None:
        """These have ended."""
        for sample in samples:
            self._planned.pop(sample, None)
            self._speculator.forget(sample)

    def _found(self, samples: Sequence[Sample], num_tokens: int) -> dict[Sample, Draft]:
        """Drafts that are worth computing in a step of so many tokens beside them."""
        if not samples:
            return {}
        most = [one.max_output - len(one.token_ids) - 1 for one in samples]
        given = self._speculator.propose(samples, most)
        drafts = [
            replace(draft, tokens=_possible(sample, draft.tokens))
            for sample, draft in zip(samples, given, strict=True)
        ]
        counts = self._speculator.keep(samples, drafts, num_tokens)
        return {
            sample: replace(draft, tokens=draft.tokens[:count])
            for sample, draft, count in zip(samples, drafts, counts, strict=True)
            if count
        }


def _possible(sample: Sample, tokens: Sequence[int]) -> Sequence[int]:
    """Tokens up to the first that would end the sample, or that its form does not allow."""
    for at, token in enumerate(tokens):
        if token in sample.stop_ids:
            tokens = tokens[:at]
            break
    matcher = sample.sampling.matcher
    return tokens if matcher is None or not tokens else tokens[: matcher.num_allowed(tokens)]
