"""A drafter and a policy, and what becomes of a drafter that misbehaves."""

import logging
from collections.abc import Sequence

from pyengine.speculation.drafters import NO_DRAFT, ComputingDrafter, Context, Draft, Drafter
from pyengine.speculation.policy import Policy, StepSize

_log = logging.getLogger(__name__)


class Speculator:
    """Asks the drafter, and keeps what is in order of what it says.

    A drafter that raises, or proposes what no model can compute, costs the sample its drafts and
    nothing else: the log says so once for each sample.
    """

    def __init__(self, drafter: Drafter, policy: Policy, *, most: int, vocab_size: int) -> None:
        """At most `most` tokens are drafted for a sample and step."""
        self._drafter = drafter
        self._policy = policy
        self._most = most
        self._vocab_size = vocab_size
        self._without: set[Context] = set()
        """Those that go on without drafts."""

    def begin_step(self, budget: int) -> None:
        """Set the token budget of a drafter that computes. See `ComputingDrafter`."""
        if isinstance(self._drafter, ComputingDrafter):
            self._drafter.begin_step(budget)

    def propose(self, contexts: Sequence[Context], most: Sequence[int]) -> list[Draft]:
        """A draft for each context, of at most so many tokens; any number of them empty."""
        asked = [
            (at, context, min(count, self._most))
            for at, (context, count) in enumerate(zip(contexts, most, strict=True))
            if count > 0 and context not in self._without
        ]
        drafts = [NO_DRAFT] * len(contexts)
        if not asked:
            return drafts
        given = self._ask([one for _, one, _ in asked], [count for *_, count in asked])
        for (at, context, count), draft in zip(asked, given, strict=True):
            fault = self._fault(draft, count)
            if fault:
                self.give_up(context, fault)
            else:
                drafts[at] = draft
        return drafts

    def keep(
        self, contexts: Sequence[Context], drafts: Sequence[Draft], step: StepSize
    ) -> Sequence[int]:
        """See `Policy.keep`."""
        return self._policy.keep(contexts, drafts, step)

    def give_up(self, context: Context, reason: object) -> None:
        """Let a sample go on without drafts, and say why."""
        self._without.add(context)
        _log.warning("request %r goes on without drafts: %s", context.request.request_id, reason)

    def forget(self, context: Context) -> None:
        """The sample has ended."""
        self._without.discard(context)
        self._policy.forget(context)
        try:
            self._drafter.forget(context)
        except Exception as error:
            _log.warning("the drafter failed to forget a sample: %r", error)

    def _ask(self, contexts: Sequence[Context], most: Sequence[int]) -> Sequence[Draft]:
        """All at once; if that fails one by one, to see who is at fault."""
        try:
            drafts = self._drafter.propose(contexts, most)
            if len(drafts) == len(contexts):
                return drafts
            error: object = f"{len(drafts)} drafts for {len(contexts)} samples"
        except Exception as raised:
            error = repr(raised)
        if len(contexts) == 1:
            self.give_up(contexts[0], f"the drafter failed: {error}")
            return [NO_DRAFT]
        return [
            self._ask([context], [count])[0] for context, count in zip(contexts, most, strict=True)
        ]

    def _fault(self, draft: Draft, most: int) -> str:
        """What is wrong with a draft; empty if nothing is."""
        if len(draft.tokens) > most:
            return f"{len(draft.tokens)} tokens were drafted, at most {most} were asked for"
        if len(draft.tokens):
            for token in (min(draft.tokens), max(draft.tokens)):
                if not 0 <= token < self._vocab_size:
                    return f"token id {token} was drafted, the vocabulary has {self._vocab_size}"
        return ""
