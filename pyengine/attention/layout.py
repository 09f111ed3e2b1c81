"""Which blocks each query row of a step has to see: NumPy only, once per step and window.

Rows are taken apart into *pieces* that one call of the attention kernel serves:

- a sequence with several new tokens gives `Span`s of at most `MAX_SPAN_ROWS` rows;
- sequences with one new token are collected into `Batch`es of similar length.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyengine.attention.metadata import Int32Array

MAX_SPAN_ROWS = 512
"""Rows of one prefill piece: bounds the mask, and what a sliding window gathers in vain."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows `start .. start + count` of one sequence.

    `blocks` are the ids of the blocks the rows see, in order of position; the first of them
    holds the keys from position `first_key` on (a multiple of the block size), and keys up to
    `num_keys` after it are visible to the last row. The first row stands at `position`.
    """

    start: int
    count: int
    position: int
    first_key: int
    num_keys: int
    blocks: Int32Array


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of sequences with one new token each, padded to the same number of blocks.

    `rows` `[R]` are their places in the step; `blocks` `[R, W]` the blocks they see (padding
    repeats the row's first block); row `r` sees the keys `lows[r] .. highs[r]` of its
    `W * block_size`.
    """

    rows: npt.NDArray[np.int64]
    blocks: Int32Array
    lows: npt.NDArray[np.int64]
    highs: npt.NDArray[np.int64]

    @property
    def is_uniform(self) -> bool:
        """Whether every row sees the keys from 0 to the same end: no mask needed."""
        return not self.lows.any() and bool((self.highs == self.highs[0]).all())


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The host side of a step, and the size of a block."""

    query_start_loc: Int32Array
    seq_lens: Int32Array
    block_tables: Int32Array
    block_size: int

    def spans(self, window: int | None, more_than: int = 1) -> Iterator[Span]:
        """Pieces of the sequences that have more new tokens than `more_than`."""
        lengths = np.diff(self.query_start_loc)
        for row in np.flatnonzero(lengths > more_than).tolist():
            begin, end = self.query_start_loc[row : row + 2].tolist()
            context = int(self.seq_lens[row]) - (end - begin)
            for start in range(begin, end, MAX_SPAN_ROWS):
                count = min(MAX_SPAN_ROWS, end - start)
                position = context + start - begin
                first = 0 if window is None else max(0, position - window + 1)
                first_block = first // self.block_size
                last = position + count
                yield Span(
                    start=start,
                    count=count,
                    position=position,
                    first_key=first_block * self.block_size,
                    num_keys=last - first_block * self.block_size,
                    blocks=self.block_tables[row, first_block : -(-last // self.block_size)],
                )

    def batches(self, window: int | None, max_blocks: int) -> Iterator[Batch]:
        """Sequences with one new token, shortest first, at most `max_blocks` blocks a batch.

        A row that alone exceeds `max_blocks` is a batch of its own. Batches are kept small
        because a padded gather is fast only while it stays in the processor's cache.
        """
        decoding = np.flatnonzero(np.diff(self.query_start_loc) == 1)
        if not decoding.size:
            return
        ends = self.seq_lens[decoding].astype(np.int64)
        first_keys = np.zeros_like(ends) if window is None else np.maximum(0, ends - window)
        first_blocks = first_keys // self.block_size
        widths = -(-ends // self.block_size) - first_blocks
        order = np.argsort(widths, kind="stable")
        for chosen in _by_width(order, widths, max_blocks):
            columns = np.arange(widths[chosen[-1]])
            columns = np.where(columns < widths[chosen, None], columns, 0)
            columns += first_blocks[chosen, None]
            base = first_blocks[chosen] * self.block_size
            yield Batch(
                rows=self.query_start_loc[decoding[chosen]].astype(np.int64),
                blocks=self.block_tables[decoding[chosen, None], columns],
                lows=first_keys[chosen] - base,
                highs=ends[chosen] - base,
            )


def _by_width(
    order: npt.NDArray[np.intp], widths: npt.NDArray[np.int64], max_blocks: int
) -> Iterator[npt.NDArray[np.intp]]:
    """Cut rows sorted by width so that rows times the widest stays within `max_blocks`."""
    begin = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or (end + 1 - begin) * widths[order[end]] > max_blocks:
            yield order[begin:end]
            begin = end
