"""The limit of an answer's thinking, which forces the tokens that end it."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ThinkingMarkers:
    """The tokens before and after a model's thinking: at least one each."""

    begin: tuple[int, ...]
    end: tuple[int, ...]


class ThinkingBudget:
    """Counts the tokens of thinking of one sequence, those in its prompt included, as vLLM does.

    Once there are `budget`, the tokens of the end marker are forced. The count is that of the whole
    answer: thinking that begins again afterwards ends at once.
    """

    def __init__(
        self, budget: int, markers: ThinkingMarkers, prompt_token_ids: Sequence[int]
    ) -> None:
        self._budget, self._markers = budget, markers
        prompt = tuple(np.asarray(prompt_token_ids).tolist())
        begin = _last(prompt, markers.begin)
        self._is_inside = begin > _last(prompt, markers.end)
        self._count = len(prompt) - begin if self._is_inside else 0
        self._recent = prompt[-self._longest :]
        self._is_forcing, self._num_forced = False, 0
        self._force_end()

    @property
    def _longest(self) -> int:
        return max(len(self._markers.begin), len(self._markers.end))

    @property
    def forced(self) -> int | None:
        """The only next token; None: any may come."""
        return self._markers.end[self._num_forced] if self._is_forcing else None

    def sibling(self) -> "ThinkingBudget":
        """Return that of another sequence in the same state."""
        return copy(self)

    def append(self, token: int) -> None:
        """Count a generated token."""
        begin, end = self._markers.begin, self._markers.end
        self._recent = (*self._recent, token)[-self._longest :]
        if self._is_forcing:
            self._num_forced += 1
        if self._recent[-len(end) :] == end:
            self._is_inside = self._is_forcing = False
        elif self._is_inside:
            self._count += 1
        elif self._recent[-len(begin) :] == begin:
            self._is_inside = True
        if not self._is_forcing:
            self._force_end()

    def _force_end(self) -> None:
        """Begin to force the end marker if the budget is spent; its first tokens may be there."""
        self._is_forcing = self._is_inside and self._count >= self._budget
        end = self._markers.end
        fits = range(len(end) - 1, 0, -1)
        here = [size for size in fits if self._recent[-size:] == end[:size]]
        self._num_forced = here[0] if here else 0


def _last(tokens: tuple[int, ...], marker: tuple[int, ...]) -> int:
    """The position after the last occurrence of a marker; 0 if there is none."""
    size = len(marker)
    ends = range(len(tokens), size - 1, -1)
    return next((end for end in ends if tokens[end - size : end] == marker), 0)
