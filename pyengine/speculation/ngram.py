"""Prompt look-up: what came after the last few tokens when they were there before.

Saxena, "Prompt Lookup Decoding" (2023). The longest n-gram of up to `longest` tokens at the end of
prompt and answer is looked for in them, and of equal ones the latest is taken.
"""

from collections.abc import Sequence

from pyengine.speculation.drafter import NO_DRAFT, Context, Draft


class NgramDrafter:
    """Drafts from the request's own tokens. O(`longest`) per token, and as much memory."""

    def __init__(self, *, shortest: int = 2, longest: int = 4) -> None:
        """N-grams of `shortest` to `longest` tokens are looked for."""
        self._lengths = range(shortest, longest + 1)
        self._seen: dict[Context, _Seen] = {}

    def propose(self, contexts: Sequence[Context], most: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`."""
        return [self._draft(context, count) for context, count in zip(contexts, most, strict=True)]

    def _draft(self, context: Context, most: int) -> Draft:
        seen = self._seen.get(context)
        if seen is None:
            prompt = [int(token) for token in context.request.prompt_token_ids]
            seen = self._seen[context] = _Seen(prompt, self._lengths)
        seen.extend(context.token_ids[len(seen.tokens) - seen.num_prompt :])
        return seen.draft(most)

    def forget(self, context: Context) -> None:
        """See `Drafter.forget`."""
        self._seen.pop(context, None)


class _Seen:
    """The tokens of one sample, and where each n-gram was last followed by another token."""

    __slots__ = ("_at_end", "_ends", "_lengths", "num_prompt", "tokens")

    def __init__(self, prompt: list[int], lengths: range) -> None:
        self.tokens: list[int] = []
        self.num_prompt = len(prompt)
        self._lengths = lengths[::-1]
        self._ends: dict[tuple[int, ...], int] = {}
        self._at_end: list[tuple[int, ...]] = []
        """The n-grams at the end, longest first."""
        self.extend(prompt)

    def extend(self, new: Sequence[int]) -> None:
        """Take tokens in; those n-grams are noted that have one after them now."""
        tokens, ends, lengths = self.tokens, self._ends, self._lengths
        longest = lengths[0]
        for token in new:
            end = len(tokens)
            for ngram in self._at_end:
                ends[ngram] = end
            tokens.append(token)
            last = tuple(tokens[-longest:])
            self._at_end = [last[-length:] for length in lengths if length <= len(last)]

    def draft(self, most: int) -> Draft:
        """What followed the longest n-gram at the end that was there before.

        Where what followed reaches the end, it goes on with itself: a text that repeats.
        """
        for ngram in self._at_end:
            end = self._ends.get(ngram)
            if end is not None:
                following = self.tokens[end : end + most]
                while len(following) < most:
                    following += following[: most - len(following)]
                return Draft(following, len(ngram))
        return NO_DRAFT
