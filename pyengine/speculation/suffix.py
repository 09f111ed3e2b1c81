"""What came after the longest part of a text's end, in the text and in earlier answers.

As suffix decoding (Oliaro et al., 2024): requests that are made of templates, and agents that go in
circles, get answers that stand there already. The search is in Rust (`rust/suffix-index`).
"""

from collections.abc import Sequence

from pyengine.cache import SuffixIndex
from pyengine.speculation.drafter import NO_DRAFT, Context, Draft

_ARCHIVED = 1 << 20
"""Tokens of earlier answers that are kept: up to 100 MB."""


class SuffixDrafter:
    """Drafts from the request's own tokens and from earlier answers of its namespace.

    The oldest answers are forgotten beyond `max_tokens` tokens, all namespaces together.
    """

    def __init__(self, max_tokens: int = _ARCHIVED) -> None:
        self._index = SuffixIndex(max_tokens)
        self._texts: dict[Context, tuple[int, int]] = {}
        """What each is called there, and how much of its answer is known there."""

    def propose(self, contexts: Sequence[Context], most: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`."""
        drafts = []
        for context, count in zip(contexts, most, strict=True):
            tokens, support = self._index.draft(self._grown(context), count)
            drafts.append(Draft(tokens, support) if tokens else NO_DRAFT)
        return drafts

    def _grown(self, context: Context) -> int:
        """Make known what is new of a text; what it is called."""
        found, answer = self._texts.get(context), context.token_ids
        if found is None:
            request = context.request
            name = self._index.start(request.prompt_token_ids, namespace=request.namespace)
            found = name, 0
        name, known = found
        if known < len(answer):
            self._index.extend(name, answer[known:])
        self._texts[context] = name, len(answer)
        return name

    def forget(self, context: Context) -> None:
        """See `Drafter.forget`. The answer is kept for later ones."""
        if context in self._texts:
            name = self._grown(context)
            del self._texts[context]
            self._index.finish(name)
