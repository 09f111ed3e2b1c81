"""The merges of a vocabulary of words that lists none: every token is made of two others.

A vocabulary has some hundred thousand tokens, with ten places each where it may be cut. The
pieces are compared by hashes, in arrays.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

_Numbers: TypeAlias = npt.NDArray[Any]

_BASE = 0x9E3779B97F4A7C15
"""An odd number, whose powers have inverses modulo 2^64."""
_INVERSE = pow(_BASE, -1, 1 << 64)
_TABLE_BITS = 23
_CHUNK = 1 << 13
"""Tokens of a chunk: their arrays stay in the processor's cache."""


def merges_of_words(texts: Sequence[str], scores: _Numbers | None = None) -> list[tuple[str, str]]:
    """All pairs of tokens that make a third one, the best first.

    A pair is as good as its token: by `scores`, one for each of `texts`, or else by its index. Of
    the pairs of equally good tokens, that with the longest beginning is the best. No two of
    `texts` are equal, and their hashes of 64 bits are taken for different, too.
    """
    cuts = _cuts(texts)
    if scores is None:
        order = np.lexsort((-cuts.offsets, cuts.tokens))
    else:
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))[cuts.tokens]
        goodness = scores[cuts.tokens].astype(np.float64)
        order = np.lexsort((cuts.offsets - lengths, -cuts.offsets, -goodness))
    firsts, seconds = (
        map(texts.__getitem__, numbers[order].tolist()) for numbers in (cuts.firsts, cuts.seconds)
    )
    return list(zip(firsts, seconds, strict=True))


class _Cuts(NamedTuple):
    """Cuts of tokens: the tokens' numbers, the offsets, and both pieces as hashes or as numbers."""

    tokens: _Numbers
    offsets: _Numbers
    firsts: _Numbers
    seconds: _Numbers

    def of(self, chosen: _Numbers) -> "_Cuts":
        """Some of these."""
        return _Cuts(*(column[chosen] for column in self))


def _cuts(texts: Sequence[str]) -> _Cuts:
    """All cuts into pieces whose hashes are those of tokens, whose numbers they get."""
    starts = range(0, len(texts), _CHUNK)
    chunks = [_Chunk(texts[at : at + _CHUNK]) for at in starts]
    hashes = np.concatenate([chunk.hashes(chunk.starts, chunk.ends) for chunk in chunks])
    likely = np.zeros(1 << _TABLE_BITS, bool)
    likely[_buckets(hashes)] = True
    parts = [chunk.cuts(likely) for chunk in chunks]
    tokens = np.concatenate([part.tokens + at for at, part in zip(starts, parts, strict=True)])
    cuts = _Cuts(tokens, *(np.concatenate(column) for column in list(zip(*parts, strict=True))[1:]))
    by_hash = np.argsort(hashes)
    for name in ("firsts", "seconds"):
        pieces = getattr(cuts, name)
        numbers = by_hash[_positions(pieces, hashes[by_hash])]
        cuts = cuts._replace(**{name: numbers}).of(hashes[numbers] == pieces)
    return cuts


def _positions(values: _Numbers, ascending: _Numbers) -> _Numbers:
    """The indices of values in `ascending`, if they are there: sorted values stay in caches."""
    order, cuts = np.argsort(values), np.empty(len(values), np.int64)
    cuts[order] = np.searchsorted(ascending, values[order])
    return np.minimum(cuts, len(ascending) - 1)


def _buckets(hashes: _Numbers) -> _Numbers:
    """Indices in a table: the first bits of hashes."""
    return (hashes >> np.uint64(64 - _TABLE_BITS)).astype(np.int64)


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
        """The hashes of pieces, mixed such that their first bits differ."""
        mixed = self._sums[end] - self._sums[first]
        mixed *= _powers(_INVERSE, len(self._sums))[first]
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(_BASE)
        return mixed

    def cuts(self, likely: _Numbers) -> _Cuts:
        """The cuts of the chunk's tokens into pieces whose buckets are `likely`."""
        tokens = np.repeat(np.arange(len(self.lengths)), self.lengths)
        positions = np.arange(len(tokens))
        inner = positions > self.starts[tokens]
        tokens, positions = tokens[inner], positions[inner]
        firsts = self.hashes(self.starts[tokens], positions)
        may_be = likely[_buckets(firsts)]
        tokens, positions, firsts = tokens[may_be], positions[may_be], firsts[may_be]
        seconds = self.hashes(positions, self.ends[tokens])
        cuts = _Cuts(tokens, positions - self.starts[tokens], firsts, seconds)
        return cuts.of(likely[_buckets(seconds)])


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
