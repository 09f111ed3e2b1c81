"""Blocks that sequences of a step share, as levels whose blocks a kernel reads once each.

Rows attend to the prefixes of each level, then to the rest of their own sequence, and the results
are merged by their logarithms of sums.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pyengine.attention.backend import Int32Array, StepInputs
from pyengine.attention.paged import PageTable, cumulative

_LEVELS = 2
"""The most levels; each takes some launches in every layer."""


@dataclass(frozen=True, slots=True)
class Level:
    """Prefixes that do not overlap, one after the other.

    `rows` are the tokens of the step that attend to them, int64 `[R]`, those of prefix `p` at
    `starts[p] : starts[p + 1]`. `lengths` are the tokens of each prefix, in whole `pages`.
    """

    rows: npt.NDArray[np.int64]
    starts: Int32Array
    lengths: Int32Array
    pages: PageTable


@dataclass(frozen=True, slots=True)
class Cascade:
    """The shared blocks of a step in one layer group.

    `own_blocks` `[B]` is the number of leading blocks of each sequence that are in a level. The KV
    of `saved_tokens` is read less often, by any kernel that reads levels once.
    """

    group: int
    levels: list[Level]
    own_blocks: Int32Array
    saved_tokens: int


def most_saved_tokens(inputs: StepInputs, block_size: int) -> int:
    """An upper bound of `Cascade.saved_tokens`, without a walk over the prefixes."""
    if inputs.shared is None:
        return 0
    begin, end, first, last, _ = inputs.shared.prefixes.T.astype(np.int64)
    return int(((end - begin - 1) * (last - first)).sum()) * block_size


def cascade_of(inputs: StepInputs, block_size: int) -> Cascade | None:
    """The levels of a step; None: its sequences share no blocks."""
    shared = inputs.shared
    if shared is None or not len(shared.prefixes):
        return None
    tables = inputs.host_block_tables[shared.group]
    spans: list[list[tuple[Int32Array, Int32Array]]] = [[] for _ in range(_LEVELS)]
    depths: list[int] = []
    own_blocks = np.zeros(len(inputs.host_seq_lens), dtype=np.int32)
    saved = 0
    for begin, end, first, last, parent in shared.prefixes.tolist():
        depth = depths[parent] + 1 if parent >= 0 else 0
        depths.append(depth)
        if depth >= _LEVELS:
            continue
        sequences = shared.order[begin:end]
        spans[depth].append((sequences, tables[sequences[0], first:last]))
        own_blocks[sequences] = last
        saved += (end - begin - 1) * (last - first) * block_size
    levels = [_level(inputs, prefixes, block_size) for prefixes in spans if prefixes]
    return Cascade(shared.group, levels, own_blocks, saved)


def _level(
    inputs: StepInputs, prefixes: list[tuple[Int32Array, Int32Array]], block_size: int
) -> Level:
    starts, counts = inputs.host_query_start_loc, np.diff(inputs.host_query_start_loc)
    sequences = np.concatenate([own for own, _ in prefixes])
    rows_of = counts[sequences]
    within = np.arange(rows_of.sum()) - np.repeat(rows_of.cumsum() - rows_of, rows_of)
    rows = np.repeat(starts[sequences], rows_of) + within
    blocks = np.array([len(pages) for _, pages in prefixes], dtype=np.int32)
    return Level(
        rows=rows.astype(np.int64),
        starts=cumulative(np.array([counts[own].sum() for own, _ in prefixes])),
        lengths=blocks * block_size,
        pages=PageTable(
            indptr=cumulative(blocks),
            indices=np.concatenate([pages for _, pages in prefixes]),
            last_page_len=np.full(len(prefixes), block_size, dtype=np.int32),
        ),
    )


def merged(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys, from attention over each.

    `out` and `other` are `[R, heads, d]`, the logarithms of sums float32 `[R, heads]` in base 2.
    """
    share = torch.sigmoid((other_lse - lse) * math.log(2))[..., None]
    both = torch.lerp(out.float(), other.float(), share)
    return both.to(out.dtype), torch.logaddexp2(lse, other_lse)
