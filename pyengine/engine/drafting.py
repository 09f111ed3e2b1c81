"""The choice of decodes that get drafts, and the handling of a drafter that fails."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyengine.engine.parts import EnginePart
from pyengine.engine.step_rows import SubmittedStep
from pyengine.request.request import Request, SequenceState
from pyengine.scheduler.batch import ScheduledStep
from pyengine.scheduler.scheduler import Scheduler
from pyengine.speculation.draft_model import DraftModel
from pyengine.speculation.drafters import NO_DRAFT, Draft, Drafter
from pyengine.speculation.mtp import MTPDrafter
from pyengine.speculation.policy import DraftPolicy, StepSize

_log = logging.getLogger(__name__)


class Drafting(EnginePart):
    """Speculation: the decodes that get drafts, and the drafter.

    If the drafter raises, or proposes invalid tokens, the sequence goes on without drafts, and the
    log says so once per sequence.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        drafter: Drafter,
        policy: DraftPolicy,
        *,
        max_tokens: int,
        vocab_size: int,
    ) -> None:
        """Draft at most `max_tokens` tokens per sequence and step."""
        self._scheduler = scheduler
        self._drafter = drafter
        self._mtp = drafter if isinstance(drafter, MTPDrafter) else None
        self._policy = policy
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._asked: frozenset[SequenceState] = frozenset()
        """The sequences that were asked for drafts when the newest step was planned."""
        self._disabled: set[SequenceState] = set()
        """Unfinished sequences that go on without drafts."""
        self.num_drafts = 0
        """Decodes with drafts."""

    reads_each_token = True

    def before_plan(self, scheduler: Scheduler, previous: ScheduledStep | None) -> None:
        """Mark the sequences that wait for their tokens of `previous` to get drafts.

        The drafter is asked without the unknown token; sequences that were asked when `previous`
        was planned have none. MTP layers need the token, so all of their sequences wait.
        """
        if previous is None:
            return
        sequences = [
            sequence
            for sequence in previous.sampling_sequences
            if self._speculates(sequence)
            and sequence.output.finish_reason is None
            and not sequence.waits_for_tokens
        ]
        if self._mtp is not None:
            for sequence in sequences:
                sequence.wants_drafts = True
            return
        unasked = [other for other in sequences if other not in self._asked]
        drafts = self._drafts_of(unasked, previous)
        for sequence in sequences:
            sequence.wants_drafts = sequence in drafts

    def planned(self, step: ScheduledStep) -> None:
        """Add drafts to the decodes of a step, and the part of the model's MTP layers."""
        if step.may_draft:
            sequences = [
                sequence
                for sequence in step.decodes
                if self._speculates(sequence) and sequence.is_known
            ]
            if self._mtp is not None:
                self._mtp.step = step
            self._asked = frozenset(sequences)
            self._scheduler.draft(step, self._drafts_of(sequences, step))
        if self._mtp is not None:
            step.mtp = self._mtp.history.extend(step)

    def committed(self, submitted: SubmittedStep) -> None:
        """Count decodes with drafts."""
        self.num_drafts += len(submitted.step.drafts)

    def prompt_done(self, request: Request) -> Iterable[Request]:
        """Let further samples start from the states of the first one."""
        if self._mtp is not None and len(request.sequences) > 1:
            self._mtp.history.fork(request.sequences[0], request.sequences[1:])
        return ()

    def without_token(self, sequences: Sequence[SequenceState], error: Exception) -> None:
        """Disable the drafts of sequences for which the logits gave no token."""
        for sequence in sequences:
            self._disable(sequence, error)

    def finished(self, sequences: Sequence[SequenceState]) -> None:
        """Drop sequences that have ended."""
        for sequence in sequences:
            self._disabled.discard(sequence)
            self._policy.forget(sequence)
            try:
                self._drafter.forget(sequence)
            except Exception as error:
                _log.warning("the drafter failed to forget a sequence: %r", error)

    def engine_stats(self) -> Mapping[str, Any]:
        """See `EnginePart.engine_stats`."""
        return {"num_drafts": self.num_drafts}

    def _speculates(self, sequence: SequenceState) -> bool:
        """True if the next tokens of a sequence may be drafted."""
        return sequence.request.params.may_speculate and sequence not in self._disabled

    def _disable(self, sequence: SequenceState, reason: object) -> None:
        """Run a sequence without drafts from now on, and log the reason."""
        self._disabled.add(sequence)
        _log.warning("request %r goes on without drafts: %s", sequence.request.request_id, reason)

    def _drafts_of(
        self, sequences: Sequence[SequenceState], step: ScheduledStep
    ) -> dict[SequenceState, Sequence[int]]:
        """The drafts that a step computes."""
        if not sequences:
            return {}
        if isinstance(self._drafter, DraftModel):
            budget = self._scheduler.limits.max_num_batched_tokens - step.num_tokens
            self._drafter.begin_step(max(0, budget))
        limits = [other.output.rules.max_output - len(other.token_ids) - 1 for other in sequences]
        proposed = self.propose(sequences, limits)
        drafts = [
            _possible(sequence, draft) for sequence, draft in zip(sequences, proposed, strict=True)
        ]
        num_drawn = sum([sequence.output.sampling.is_drawn for sequence in step.decodes])
        size = StepSize(step.num_tokens, len(step.decodes), num_drawn)
        counts = self._policy.keep(sequences, drafts, size)
        return {
            sequence: draft.tokens[:count]
            for sequence, draft, count in zip(sequences, drafts, counts, strict=True)
            if count
        }

    def propose(self, sequences: Sequence[SequenceState], limits: Sequence[int]) -> list[Draft]:
        """A valid draft for each sequence, of at most `limits[i]` tokens; it may be empty."""
        eligible = [
            (at, sequence, min(count, self._max_tokens))
            for at, (sequence, count) in enumerate(zip(sequences, limits, strict=True))
            if count > 0 and self._speculates(sequence)
        ]
        drafts = [NO_DRAFT] * len(sequences)
        if not eligible:
            return drafts
        proposed = self._ask([item for _, item, _ in eligible], [count for *_, count in eligible])
        for (at, sequence, count), draft in zip(eligible, proposed, strict=True):
            fault = self._fault(draft, count)
            if fault:
                self._disable(sequence, fault)
            else:
                drafts[at] = draft
        return drafts

    def _ask(self, sequences: Sequence[SequenceState], limits: Sequence[int]) -> Sequence[Draft]:
        """Ask for all at once; if that fails, one by one, to find the sequence at fault."""
        try:
            drafts = self._drafter.propose(sequences, limits)
            if len(drafts) == len(sequences):
                return drafts
            error: object = f"{len(drafts)} drafts for {len(sequences)} sequences"
        except Exception as raised:
            error = repr(raised)
        if len(sequences) == 1:
            self._disable(sequences[0], f"the drafter failed: {error}")
            return [NO_DRAFT]
        return [
            self._ask([sequence], [count])[0]
            for sequence, count in zip(sequences, limits, strict=True)
        ]

    def _fault(self, draft: Draft, limit: int) -> str:
        """The error of a draft; empty if it is valid."""
        if len(draft.tokens) > limit:
            return f"{len(draft.tokens)} tokens were drafted, at most {limit} were asked for"
        if len(draft.tokens):
            for token in (min(draft.tokens), max(draft.tokens)):
                if not 0 <= token < self._vocab_size:
                    return f"token id {token} was drafted, the vocabulary has {self._vocab_size}"
        return ""


def _possible(sequence: SequenceState, draft: Draft) -> Draft:
    """A draft up to the first token that ends the sequence, or that its grammar forbids."""
    tokens, output = draft.tokens, sequence.output
    stop_ids, matcher = output.rules.stop_ids, output.sampling.matcher
    if not stop_ids.isdisjoint(tokens):
        tokens = tokens[: [token in stop_ids for token in tokens].index(True)]
    if matcher is not None and len(tokens):
        tokens = tokens[: matcher.num_allowed(tokens)]
    return draft if tokens is draft.tokens else replace(draft, tokens=tokens)
