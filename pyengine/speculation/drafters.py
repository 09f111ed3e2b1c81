"""The interface of drafters, and drafters by look-up.

`NgramDrafter`: the tokens after an earlier occurrence of the last n-gram (Saxena, "Prompt Lookup
Decoding", 2023), the longest of up to `longest` tokens, and of several the latest. There is no
index: each draft compares all tokens, in NumPy, which is cheap beside a step that reads some
thousands of bytes for each of them.

`SuffixDrafter`: the tokens after the longest matching suffix, in this text and in earlier answers
(suffix decoding: Oliaro et al., 2024). Requests from templates, and agents in loops, repeat earlier
answers. The search is in Rust (`rust/suffix-index`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyengine.kv_cache import SuffixIndex
from pyengine.request.request import SequenceState


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next, in order.

    `match_length` is the number of tokens before them that match an earlier text: drafts of equal
    match length have about equal acceptance rates.
    """

    tokens: Sequence[int] = ()
    match_length: int = 0


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Drafts the next tokens. Called by the engine thread."""

    def propose(self, contexts: Sequence[SequenceState], limits: Sequence[int]) -> Sequence[Draft]:
        """A draft for each context, of at most `limits[i]` tokens; empty without a guess.

        Accepted tokens of earlier drafts are part of the contexts.
        """

    def forget(self, context: SequenceState) -> None:
        """Drop a sample that has ended; it may be unknown."""


class NgramDrafter:
    """Drafts from the request's tokens, by a search of them all."""

    def __init__(self, *, shortest: int = 2, longest: int = 4) -> None:
        """Search for n-grams of `shortest` to `longest` tokens."""
        self._lengths = range(shortest, longest + 1)
        self._histories: dict[SequenceState, _History] = {}

    def propose(self, contexts: Sequence[SequenceState], limits: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`."""
        return [self._draft(*pair) for pair in zip(contexts, limits, strict=True)]

    def _draft(self, context: SequenceState, max_tokens: int) -> Draft:
        history = self._histories.get(context)
        if history is None:
            history = self._histories[context] = _History(context.request.prompt_token_ids)
        history.extend(context.token_ids[history.num_output :])
        return history.draft(max_tokens, self._lengths)

    def forget(self, context: SequenceState) -> None:
        """See `Drafter.forget`."""
        self._histories.pop(context, None)


class _History:
    """The tokens of one sample, int32, in an array with capacity for more."""

    __slots__ = ("_array", "_count", "_num_prompt")

    def __init__(self, prompt: Sequence[int]) -> None:
        self._array = np.asarray(prompt, dtype=np.int32)
        self._count = self._num_prompt = len(self._array)

    @property
    def num_output(self) -> int:
        """Tokens after the prompt."""
        return self._count - self._num_prompt

    def extend(self, new: Sequence[int]) -> None:
        """Append tokens. The array grows by an eighth, so a token costs the same at any length."""
        count = self._count + len(new)
        if count > len(self._array):
            larger = np.empty(count + count // 8 + 64, dtype=np.int32)
            larger[: self._count] = self._array[: self._count]
            self._array = larger
        self._array[self._count : count] = new
        self._count = count

    def draft(self, max_tokens: int, lengths: range) -> Draft:
        """The continuation of the longest n-gram at the end that occurred before.

        At the end of the text the continuation repeats itself.
        """
        end, length = self._latest_match(lengths)
        if not length:
            return NO_DRAFT
        following: list[int] = self._array[end : min(end + max_tokens, self._count)].tolist()
        while len(following) < max_tokens:
            following += following[: max_tokens - len(following)]
        return Draft(following, length)

    def _latest_match(self, lengths: range) -> tuple[int, int]:
        """The position after the latest occurrence of the longest n-gram, and its length.

        Both are 0 without one.
        """
        tokens, count = self._array[: self._count], self._count
        end = matched = 0
        equal: npt.NDArray[np.bool_] | None = None
        """For positions from `length` on: true if the n-gram of that length ends before them."""
        for length in range(1, min(lengths[-1], count - 1) + 1):
            same = tokens[: count - length] == tokens[count - length]
            equal = same if equal is None else np.logical_and(equal[1:], same, out=same)
            if length < lengths[0]:
                continue
            latest = _last_true(equal)
            if latest is None:
                break
            end, matched = latest + length, length
        return end, matched


def _last_true(flags: npt.NDArray[np.bool_]) -> int | None:
    """The index of the last true flag; None without one."""
    last = len(flags) - 1 - int(flags[::-1].argmax())
    return last if flags[last] else None


_ARCHIVED = 1 << 20  # tokens of earlier answers that are kept: up to 100 MB


class SuffixDrafter:
    """Drafts from the request's tokens and from earlier answers of its namespace.

    The oldest answers are dropped beyond `max_tokens` tokens, in all namespaces together.
    """

    def __init__(self, max_tokens: int = _ARCHIVED) -> None:
        self._suffixes = SuffixIndex(max_tokens)
        self._texts: dict[SequenceState, tuple[int, int]] = {}
        """Each context's id in the index, and how many tokens of its answer the index has."""

    def propose(self, contexts: Sequence[SequenceState], limits: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`."""
        drafts = []
        for context, count in zip(contexts, limits, strict=True):
            tokens, match_length = self._suffixes.draft(self._grown(context), count)
            drafts.append(Draft(tokens, match_length) if tokens else NO_DRAFT)
        return drafts

    def _grown(self, context: SequenceState) -> int:
        """Add the new tokens of a text to the index; return its id."""
        entry, answer = self._texts.get(context), context.token_ids
        if entry is None:
            request = context.request
            name = self._suffixes.start(request.prompt_token_ids, namespace=request.namespace)
            entry = name, 0
        name, known = entry
        if known < len(answer):
            self._suffixes.extend(name, answer[known:])
        self._texts[context] = name, len(answer)
        return name

    def forget(self, context: SequenceState) -> None:
        """See `Drafter.forget`. The answer is kept for later ones."""
        if context in self._texts:
            name = self._grown(context)
            del self._texts[context]
            self._suffixes.finish(name)
