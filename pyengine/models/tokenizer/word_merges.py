"""The merges of a vocabulary of words that lists none: every token is made of two others.

A vocabulary has some hundred thousand tokens, with ten places each where it may be cut. Hashes of
all pieces are compared first, in arrays: few pairs are left whose texts are looked up.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

_Numbers: TypeAlias = npt.NDArray[Any]

_BASE = 0x9E3779B97F4A7C15
"""An odd number, whose powers have inverses modulo 2^64."""
_INVERSE = pow(_BASE, -1, 1 << 64)
_TABLE_BITS = 23
_CHUNK = 1 << 13
"""Tokens that are looked at together: their arrays stay in the processor's cache."""


def merges_of_words(texts: Sequence[str], scores: _Numbers | None = None) -> list[tuple[str, str]]:
    """All pairs of tokens that make a third one, the best first.

    A pair is as good as its token: by `scores`, one for each of `texts`, or else by its place. Of
    the pairs of equally good tokens, that with the longest beginning is the best.
    """
    known = frozenset(texts)
    tokens, cuts = _likely_cuts(texts)
    if scores is None:
        order = np.lexsort((-cuts, tokens))
    else:
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))[tokens]
        order = np.lexsort((cuts - lengths, -cuts, -scores[tokens].astype(np.float64)))
    return [
        (first, second)
        for token, cut in zip(tokens[order].tolist(), cuts[order].tolist(), strict=True)
        if (first := texts[token][:cut]) in known and (second := texts[token][cut:]) in known
    ]


def _likely_cuts(texts: Sequence[str]) -> tuple[_Numbers, _Numbers]:
    """Numbers of tokens, and where they are cut into pieces whose hashes are those of tokens."""
    chunks = [_Chunk(texts[at : at + _CHUNK]) for at in range(0, len(texts), _CHUNK)]
    is_token = np.zeros(1 << _TABLE_BITS, bool)
    for chunk in chunks:
        is_token[chunk.hashes(chunk.starts, chunk.ends)] = True
    found = [chunk.likely_cuts(is_token) for chunk in chunks]
    tokens = [own + number * _CHUNK for number, (own, _) in enumerate(found)]
    return np.concatenate(tokens), np.concatenate([cuts for _, cuts in found])


class _Chunk:
    """Some tokens, and the hashes of their pieces.

    A hash is the difference of two sums of characters times powers of a base, modulo 2^64.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        data = "".join(texts).encode("utf-32-le", "surrogatepass")
        characters = np.frombuffer(data, np.uint32).astype(np.uint64)
        self.lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        self.ends = np.cumsum(self.lengths)
        self.starts = self.ends - self.lengths
        size = len(characters)
        self._sums = np.zeros(size + 1, np.uint64)
        np.cumsum((characters + np.uint64(1)) * _powers(_BASE, size), out=self._sums[1:])

    def hashes(self, first: _Numbers, end: _Numbers) -> _Numbers:
        """The hashes of pieces, as places in a table."""
        mixed = self._sums[end] - self._sums[first]
        mixed *= _powers(_INVERSE, len(self._sums))[first]
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(_BASE)
        mixed >>= np.uint64(64 - _TABLE_BITS)
        return mixed.astype(np.int64)

    def likely_cuts(self, is_token: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Numbers of the chunk's tokens, and where they are cut into likely tokens."""
        tokens = np.repeat(np.arange(len(self.lengths)), self.lengths)
        places = np.arange(len(tokens))
        inner = places > self.starts[tokens]
        tokens, places = tokens[inner], places[inner]
        for of_token, is_first in ((self.starts, True), (self.ends, False)):
            bounds = (of_token[tokens], places) if is_first else (places, of_token[tokens])
            likely = is_token[self.hashes(*bounds)]
            tokens, places = tokens[likely], places[likely]
        return tokens, places - self.starts[tokens]


_known_powers: dict[int, _Numbers] = {}


def _powers(base: int, count: int) -> _Numbers:
    """The first powers of a number, modulo 2^64."""
    known = _known_powers.get(base)
    if known is None or len(known) < count:
        known = np.full(count, base, np.uint64)
        known[:1] = 1
        np.cumprod(known, out=known)
        _known_powers[base] = known
    return known[:count]
