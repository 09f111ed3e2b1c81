"""How many drafts are kept."""

from collections.abc import Sequence
from typing import Protocol

from pyengine.speculation.drafter import Context, Draft


class Policy(Protocol):
    """Decides which drafts of a step are worth computing, and learns from what came of them."""

    def keep(
        self, contexts: Sequence[Context], drafts: Sequence[Draft], num_tokens: int
    ) -> Sequence[int]:
        """How many tokens of each draft are computed, in a step of `num_tokens` without them."""
        ...

    def learn(self, context: Context, draft: Draft, num_accepted: int) -> None:
        """So many of the tokens of a draft were right, all of which were computed."""
        ...

    def forget(self, context: Context) -> None:
        """The sample has ended. It may never have been seen."""
        ...


class EveryDraft:
    """Keeps all there is."""

    def keep(
        self, contexts: Sequence[Context], drafts: Sequence[Draft], num_tokens: int
    ) -> Sequence[int]:
        """See `Policy.keep`."""
        return [len(draft.tokens) for draft in drafts]

    def learn(self, context: Context, draft: Draft, num_accepted: int) -> None:
        """See `Policy.learn`."""

    def forget(self, context: Context) -> None:
        """See `Policy.forget`."""
