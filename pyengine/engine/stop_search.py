"""Stop strings in a text that grows: where the first one ends, and what may yet become one."""

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache


class StopSearch:
    """Looks for stop strings at the end of a growing text, of which it keeps as much as it needs.

    The cost per character follows the number of their lengths, not that of the strings.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = _prepared(stops)
        self._tail = ""

    def skip(self, piece: str) -> None:
        """Take note of text in which no match counts."""
        longest = self._stops.lengths[0]
        self._tail = (self._tail + piece)[1 - longest :] if longest > 1 else ""

    def find(self, piece: str) -> tuple[str, int] | None:
        """Return the match that ends first in `piece`, and the number of characters after it."""
        stops, tail = self._stops, self._tail
        text = tail + piece
        for end in range(len(tail) + 1, len(text) + 1):
            if text[end - 1] in stops.last_characters:
                for length in stops.lengths:
                    if length <= end and text[end - length : end] in stops.strings:
                        return text[end - length : end], len(text) - end
        return None

    def length_held_back(self) -> int:
        """Return the length of the longest end of the text with which a stop string begins."""
        tail, ordered = self._tail, self._stops.ordered
        for start, character in enumerate(tail):
            if character in self._stops.first_characters:
                end = tail[start:]
                at = bisect_left(ordered, end)
                if at < len(ordered) and ordered[at] == end:  # it came too early to count
                    at += 1
                if at < len(ordered) and ordered[at].startswith(end):
                    return len(end)
        return 0


@dataclass(frozen=True, slots=True)
class _StopStrings:
    strings: frozenset[str]
    ordered: list[str]
    lengths: list[int]
    """Each once, the longest first."""
    first_characters: frozenset[str]
    last_characters: frozenset[str]


@lru_cache(maxsize=8)
def _prepared(stops: tuple[str, ...]) -> _StopStrings:
    """Return what the search needs; samples of a request, and requests alike, share it."""
    strings = frozenset(stops)
    return _StopStrings(
        strings=strings,
        ordered=sorted(strings),
        lengths=sorted({len(stop) for stop in strings}, reverse=True),
        first_characters=frozenset(stop[0] for stop in strings),
        last_characters=frozenset(stop[-1] for stop in strings),
    )
