"""Draws of tokens as two Triton kernels: sums of weights per block of a row, then the choice.

The weight of a logit is `exp((logit - largest) / temperature)`. The first kernel reads the logits
once. It leaves the largest logit and the sum of weights of each block, in float64. The second finds
the block in which the cumulated weight passes the target, and reads that block again.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

# Annotations of arguments are strings: the compiler looks up names, and knows none but constants.

_BLOCK = 4096
"""Logits of a block."""
_WARPS = 8


def _weights(  # noqa: PLR0913, PLR0917
    logits: "Any",
    source: "Any",
    at: "Any",
    row: "Any",
    settings: "Any",
    vocab_size: "Any",
    has_floor: tl.constexpr,
    has_min_p: tl.constexpr,
) -> "Any":
    """Logits of a block as float64, and which of them have a weight: NaN is one of them."""
    floors, peaks, min_p, temperature = settings
    values = tl.load(logits + source + at, mask=at < vocab_size, other=-float("inf"))
    values = values.to(tl.float32)
    kept = (at < vocab_size) & (values != -float("inf"))
    if has_floor:
        kept = kept & ((values >= tl.load(floors + row)) | (values != values))
    values = values.to(tl.float64)
    if has_min_p:
        share = tl.exp((values - tl.load(peaks + row).to(tl.float64)) / temperature)
        kept = kept & ((share >= tl.load(min_p + row)) | (share != share))
    return values, kept


_load: Any = triton.jit(_weights)


def _sums(  # noqa: PLR0913, PLR0917
    logits: "Any",
    rows: "Any",
    temperatures: "Any",
    floors: "Any",
    peaks: "Any",
    min_p: "Any",
    block_peaks: "Any",
    block_sums: "Any",
    stride: "Any",
    vocab_size: "Any",
    num_blocks: "Any",
    has_floor: tl.constexpr,
    has_min_p: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row, part = tl.program_id(0), tl.program_id(1)
    source = tl.load(rows + row) * stride
    at = part * block + tl.arange(0, block)
    temperature = tl.load(temperatures + row)
    settings = (floors, peaks, min_p, temperature)
    values, kept = _load(
        logits, source, at, row, settings, vocab_size, has_floor, has_min_p
    )  # fmt: skip
    peak = tl.max(tl.where(at < vocab_size, values, -float("inf")), 0)
    weights = tl.where(kept, tl.exp((values - peak) / temperature), 0.0)
    tl.store(block_peaks + row * num_blocks + part, peak)
    tl.store(block_sums + row * num_blocks + part, tl.sum(weights, 0))


_compiled_sums: Any = triton.jit(_sums)


def _choice(  # noqa: PLR0913, PLR0917
    logits: "Any",
    rows: "Any",
    temperatures: "Any",
    floors: "Any",
    peaks: "Any",
    min_p: "Any",
    block_peaks: "Any",
    block_sums: "Any",
    numbers: "Any",
    tokens: "Any",
    stride: "Any",
    vocab_size: "Any",
    num_blocks: "Any",
    has_floor: tl.constexpr,
    has_min_p: tl.constexpr,
    block: tl.constexpr,
    most_blocks: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    source = tl.load(rows + row) * stride
    temperature = tl.load(temperatures + row)
    parts = tl.arange(0, most_blocks)
    there = parts < num_blocks
    part_peaks = tl.load(block_peaks + row * num_blocks + parts, mask=there, other=-float("inf"))
    peak = tl.max(part_peaks, 0)
    sums = tl.load(block_sums + row * num_blocks + parts, mask=there, other=0.0)
    is_broken = sums != sums  # by NaN or infinity
    sums = tl.where(sums > 0, sums * tl.exp((part_peaks - peak) / temperature), 0.0)
    cumulated = tl.cumsum(sums, 0)
    total = tl.sum(tl.where(parts == most_blocks - 1, cumulated, 0.0), 0)
    target = tl.load(numbers + row) * total
    chosen = tl.sum((there & (cumulated <= target)).to(tl.int32), 0)
    last = tl.max(tl.where(sums > 0, parts, 0), 0)  # where rounding passes the end
    chosen = tl.minimum(chosen, last)
    first_broken = tl.min(tl.where(is_broken, parts, most_blocks), 0)
    chosen = tl.where(first_broken < most_blocks, first_broken, chosen)
    before = tl.sum(tl.where(parts == chosen - 1, cumulated, 0.0), 0)
    at = chosen * block + tl.arange(0, block)
    settings = (floors, peaks, min_p, temperature)
    values, kept = _load(
        logits, source, at, row, settings, vocab_size, has_floor, has_min_p
    )  # fmt: skip
    weights = tl.where(kept, tl.exp((values - peak) / temperature), 0.0)
    passed = before + tl.cumsum(weights, 0) > target
    ends = kept & (weights > 0)
    token = tl.min(tl.where(passed & ends, at, vocab_size), 0)
    largest = tl.max(tl.where(ends, at, 0), 0)  # the last one with a weight
    token = tl.where(token < vocab_size, token, largest)
    broken = tl.min(tl.where((values != values) | (values == float("inf")), at, vocab_size), 0)
    token = tl.where(broken < vocab_size, broken, token)
    tl.store(tokens + row, token.to(tl.int64))


_compiled_choice: Any = triton.jit(_choice)


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows of logits to draw from, and their settings, all on one device.

    - `logits`: `[B, V]` of any floating type; `rows`: int64 `[R]`, the rows to draw from.
    - `temperature`: float64 `[R]`. `min_p`: float64 `[R]`, None: no row has one.
    """

    logits: torch.Tensor
    rows: torch.Tensor
    temperature: torch.Tensor
    min_p: torch.Tensor | None

    @property
    def peaks(self) -> torch.Tensor:
        """The largest logit of each row, for `min_p`."""
        return self.logits.amax(1).index_select(0, self.rows).float()


@dataclass(frozen=True, slots=True)
class Sums:
    """What the first kernel leaves: float64 `[R, blocks]` each.

    `sums` are relative to the largest logit of the block, in `peaks`. `floors` float32 `[R]`:
    smaller logits have no weight; None: all have. `row_peaks` are those of `min_p`.
    """

    peaks: torch.Tensor
    sums: torch.Tensor
    floors: torch.Tensor | None
    row_peaks: torch.Tensor | None

    def totals(self, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit and the sum of weights of each row: float64 `[R, 1]`."""
        peak = self.peaks.amax(1, keepdim=True)
        shares = torch.exp((self.peaks - peak) / temperature[:, None])
        weights = torch.where(self.sums > 0, self.sums * shares, 0.0)
        return peak, weights.sum(1, keepdim=True)


def weight_sums(
    draws: Draws, floors: torch.Tensor | None = None, row_peaks: torch.Tensor | None = None
) -> Sums:
    """Sum the weights of the logits that may be drawn, block by block."""
    count, vocab_size = len(draws.rows), draws.logits.shape[1]
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    if draws.min_p is not None and row_peaks is None:
        row_peaks = draws.peaks
    device = draws.logits.device
    peaks, sums = torch.empty(2, count, num_blocks, dtype=torch.float64, device=device)
    _compiled_sums[(count, num_blocks)](
        *_arguments(draws, floors, row_peaks),
        peaks,
        sums,
        draws.logits.stride(0),
        vocab_size,
        num_blocks,
        has_floor=floors is not None,
        has_min_p=draws.min_p is not None,
        block=_BLOCK,
        num_warps=_WARPS,
    )
    return Sums(peaks, sums, floors, row_peaks)


def choose(draws: Draws, sums: Sums, numbers: torch.Tensor) -> torch.Tensor:
    """The token of each row at which the cumulated weight passes `numbers` times the row's.

    `numbers` are float64 `[R]` in [0, 1). Returns int64 `[R]`. A row without any weight gives a
    token that has none.
    """
    vocab_size, num_blocks = draws.logits.shape[1], sums.sums.shape[1]
    tokens = torch.empty(len(draws.rows), dtype=torch.int64, device=draws.logits.device)
    _compiled_choice[(len(draws.rows),)](
        *_arguments(draws, sums.floors, sums.row_peaks),
        sums.peaks,
        sums.sums,
        numbers,
        tokens,
        draws.logits.stride(0),
        vocab_size,
        num_blocks,
        has_floor=sums.floors is not None,
        has_min_p=draws.min_p is not None,
        block=_BLOCK,
        most_blocks=triton.next_power_of_2(num_blocks),
        num_warps=_WARPS,
    )
    return tokens


def _arguments(
    draws: Draws, floors: torch.Tensor | None, row_peaks: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """The first arguments of both kernels; one that is not read is any tensor."""
    unread = draws.temperature
    return (
        draws.logits,
        draws.rows,
        draws.temperature,
        unread if floors is None else floors,
        unread if row_peaks is None else row_peaks,
        unread if draws.min_p is None else draws.min_p,
    )
