"""Blocks that sequences of a step share, for a kernel that reads them once.

Rows attend to the shared prefix, then to the rest of their sequence; the results are merged by
their logarithms of sums.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyengine.attention.backend import Int32Array, StepInputs
from pyengine.attention.paged import PageTable, cumulative

MAX_PREFIXES = 32
"""Maximum prefixes of a step; a graph has memory for as many."""


@dataclass(frozen=True, slots=True)
class Cascade:
    """The shared prefixes of a step in one layer group. Each begins at position 0.

    `rows` are the tokens of the step that attend to them, int64 `[R]`, those of prefix `p` at
    `starts[p] : starts[p + 1]`. `lengths` are the tokens of each prefix, in whole `pages`.
    `own_blocks` `[B]` is the number of leading blocks of each sequence that are in a prefix. The KV
    of `saved_tokens` is read less often.
    """

    group: int
    rows: npt.NDArray[np.int64]
    starts: Int32Array
    lengths: Int32Array
    pages: PageTable
    own_blocks: Int32Array
    saved_tokens: int


def max_saved_tokens(inputs: StepInputs, block_size: int) -> int:
    """An upper bound of `Cascade.saved_tokens`, without a walk over the prefixes."""
    if inputs.shared is None:
        return 0
    begin, end, first, last, _ = inputs.shared.prefixes.T.astype(np.int64)
    return int(((end - begin - 1) * (last - first)).sum()) * block_size


def cascade_of(inputs: StepInputs, block_size: int) -> Cascade | None:
    """The prefixes of a step that save most; None: its sequences share no blocks."""
    shared = inputs.shared
    if shared is None or not len(shared.prefixes):
        return None
    tables = inputs.host_block_tables[shared.group]
    chosen = _chosen(shared.prefixes.tolist())
    own_blocks = np.zeros(len(inputs.host_seq_lens), dtype=np.int32)
    for begin, end, blocks in chosen:
        own_blocks[shared.order[begin:end]] = blocks
    starts, counts = inputs.host_query_start_loc, np.diff(inputs.host_query_start_loc)
    sequences = np.concatenate([shared.order[begin:end] for begin, end, _ in chosen])
    rows_of = counts[sequences]
    within = np.arange(rows_of.sum()) - np.repeat(rows_of.cumsum() - rows_of, rows_of)
    blocks_of = np.array([blocks for *_, blocks in chosen], dtype=np.int32)
    return Cascade(
        group=shared.group,
        rows=(np.repeat(starts[sequences], rows_of) + within).astype(np.int64),
        starts=cumulative(
            np.array([counts[shared.order[begin:end]].sum() for begin, end, _ in chosen])
        ),
        lengths=blocks_of * block_size,
        pages=PageTable(
            indptr=cumulative(blocks_of),
            indices=np.concatenate(
                [tables[shared.order[begin], :blocks] for begin, _, blocks in chosen]
            ),
            last_page_len=np.full(len(chosen), block_size, dtype=np.int32),
        ),
        own_blocks=own_blocks,
        saved_tokens=sum((end - begin - 1) * blocks for begin, end, blocks in chosen) * block_size,
    )


def _chosen(prefixes: list[list[int]]) -> list[tuple[int, int, int]]:
    """The prefixes of which no sequence has two: (begin, end, leading blocks) each.

    A prefix is worth the blocks from the start of its sequences, once for each sequence but one. It
    is chosen if no prefixes below it are worth more together.
    """
    worth_below, is_chosen = [0] * len(prefixes), [False] * len(prefixes)
    for at in range(len(prefixes) - 1, -1, -1):  # parents come first
        begin, end, _, last, parent = prefixes[at]
        own = (end - begin - 1) * last
        is_chosen[at] = own >= worth_below[at]
        if parent >= 0:
            worth_below[parent] += max(own, worth_below[at])
    is_covered = [False] * len(prefixes)
    chosen = []
    for at, (begin, end, _, last, parent) in enumerate(prefixes):
        is_below = parent >= 0 and is_covered[parent]
        is_covered[at] = is_below or is_chosen[at]
        if is_chosen[at] and not is_below:
            chosen.append((begin, end, last))
    chosen.sort(key=lambda prefix: (prefix[0] + 1 - prefix[1]) * prefix[2])  # most saved first
    return sorted(chosen[:MAX_PREFIXES])
