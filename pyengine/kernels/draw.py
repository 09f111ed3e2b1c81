"""Draws of tokens as Triton kernels: sums of weights per part of a row, filters, the choice.

The weight of a logit is `exp((logit - largest) / temperature)`. The first kernel reads the logits
once. It leaves the largest logit and the sum of weights of each part. With filters,
:mod:`.floors` finds the lowest logit that may be drawn, and the sums of the parts that reach it are
taken again. The last kernel finds the part in which the cumulated weight passes the target, and
reads that part again. Weights are float64.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

PART = 256
"""Logits of a part: 512 bytes of bfloat16, few enough that most parts have no likely token."""
_PARTS = 16
"""Parts of a program."""
_WARPS = 8


@triton.jit
def _load(  # noqa: PLR0913, PLR0917
    logits, at, is_read, floor, peak, min_p, temperature
):
    """Logits as float64, and which of them have a weight: NaN is one of them."""
    values = tl.load(logits + at, mask=is_read, other=-float("inf")).to(tl.float32)
    kept = is_read & (values != -float("inf")) & ((values >= floor) | (values != values))
    values = values.to(tl.float64)
    if min_p > 0:
        share = tl.exp((values - peak) / temperature)
        kept = kept & ((share >= min_p) | (share != share))
    return values, kept


@triton.jit
def _sums_kernel(  # noqa: PLR0913, PLR0917
    logits,
    rows,
    settings,
    tokens,
    peaks,
    sums,
    ahead,
    stride,
    vocab_size,
    num_parts,
    has_tokens: tl.constexpr,
    part: tl.constexpr,
    parts: tl.constexpr,
) -> None:
    """The largest logit and sum of weights of each part, and the tokens ahead of a given one."""
    row, block = tl.program_id(0), tl.program_id(1)
    logits += tl.load(rows + row) * stride
    ids = block * parts + tl.arange(0, parts)
    at = ids[:, None] * part + tl.arange(0, part)[None, :]
    is_read = at < vocab_size
    raw = tl.load(logits + at, mask=is_read, other=-float("inf")).to(tl.float32)
    values = raw.to(tl.float64)
    peak = tl.max(raw, 1)
    shares = tl.exp((values - peak.to(tl.float64)[:, None]) / tl.load(settings + row))
    weights = tl.where(raw != -float("inf"), shares, 0.0)
    tl.store(peaks + row * num_parts + ids, peak, mask=ids < num_parts)
    tl.store(sums + row * num_parts + ids, tl.sum(weights, 1), mask=ids < num_parts)
    if has_tokens:
        token = tl.load(tokens + row)
        chosen = tl.load(logits + token).to(tl.float32)
        is_ahead = is_read & ((raw > chosen) | ((raw == chosen) & (at < token)))
        count = tl.sum(tl.sum(is_ahead.to(tl.int32), 1), 0)
        tl.store(ahead + row * tl.num_programs(1) + block, count)


@triton.jit
def _kept_sums_kernel(  # noqa: PLR0913, PLR0917
    logits,
    rows,
    settings,
    floors,
    row_peaks,
    peaks,
    sums,
    kept_sums,
    stride,
    pitch,
    vocab_size,
    num_parts,
    part: tl.constexpr,
    parts: tl.constexpr,
) -> None:
    """The sums of the weights that filters leave. Only parts that have one are read."""
    row, block = tl.program_id(0), tl.program_id(1)
    logits += tl.load(rows + row) * stride
    temperature, min_p = tl.load(settings + row), tl.load(settings + pitch + row)
    floor, row_peak = tl.load(floors + row), tl.load(row_peaks + row).to(tl.float64)
    ids = block * parts + tl.arange(0, parts)
    there = ids < num_parts
    peak = tl.load(peaks + row * num_parts + ids, mask=there, other=-float("inf"))
    left = tl.load(sums + row * num_parts + ids, mask=there, other=0.0)
    if (floor > -float("inf")) | (min_p > 0):
        is_live = peak >= floor
        own_peak = peak.to(tl.float64)
        if min_p > 0:
            share = tl.exp((own_peak - row_peak) / temperature)
            is_live = is_live & ((share >= min_p) | (share != share))
        is_live = there & (is_live | (left != left))
        if tl.max(is_live.to(tl.int32), 0) > 0:
            at = ids[:, None] * part + tl.arange(0, part)[None, :]
            is_read = is_live[:, None] & (at < vocab_size)
            values, kept = _load(logits, at, is_read, floor, row_peak, min_p, temperature)
            shares = tl.exp((values - own_peak[:, None]) / temperature)
            left = tl.sum(tl.where(kept, shares, 0.0), 1)
        else:
            left = tl.zeros_like(left)
    tl.store(kept_sums + row * num_parts + ids, left, mask=there)


@triton.jit
def _choice_kernel(  # noqa: PLR0913, PLR0917
    logits,
    rows,
    settings,
    floors,
    peaks,
    sums,
    numbers,
    tokens,
    stride,
    pitch,
    vocab_size,
    num_parts,
    is_filtered: tl.constexpr,
    part: tl.constexpr,
    max_parts: tl.constexpr,
) -> None:
    """The first token at which the cumulated weight passes the target."""
    row = tl.program_id(0)
    logits += tl.load(rows + row) * stride
    temperature = tl.load(settings + row)
    parts = tl.arange(0, max_parts)
    there = parts < num_parts
    part_peaks = tl.load(peaks + row * num_parts + parts, mask=there, other=-float("inf"))
    part_peaks = part_peaks.to(tl.float64)
    peak = tl.max(part_peaks, 0)
    left = tl.load(sums + row * num_parts + parts, mask=there, other=0.0)
    is_broken = left != left  # by NaN or infinity
    left = tl.where(left > 0, left * tl.exp((part_peaks - peak) / temperature), 0.0)
    cumulated = tl.cumsum(left, 0)
    total = tl.sum(tl.where(parts == max_parts - 1, cumulated, 0.0), 0)
    target = tl.load(numbers + row) * total
    has_passed = (cumulated > target) & (left > 0)
    chosen = tl.min(tl.where(has_passed, parts, max_parts), 0)
    last = tl.max(tl.where(left > 0, parts, 0), 0)  # where rounding passes the end
    chosen = tl.minimum(chosen, last)
    first_broken = tl.min(tl.where(is_broken, parts, max_parts), 0)
    chosen = tl.where(first_broken < max_parts, first_broken, chosen)
    before = tl.sum(tl.where(parts == chosen - 1, cumulated, 0.0), 0)
    at = chosen * part + tl.arange(0, part)
    if is_filtered:
        floor, min_p = tl.load(floors + row), tl.load(settings + pitch + row)
    else:
        floor, min_p = -float("inf"), 0.0
    values, kept = _load(logits, at, at < vocab_size, floor, peak, min_p, temperature)
    weights = tl.where(kept, tl.exp((values - peak) / temperature), 0.0)
    passed = before + tl.cumsum(weights, 0) > target
    ends = kept & (weights > 0)
    token = tl.min(tl.where(passed & ends, at, vocab_size), 0)
    largest = tl.max(tl.where(ends, at, 0), 0)  # the last one with a weight
    token = tl.where(token < vocab_size, token, largest)
    broken = tl.min(tl.where((values != values) | (values == float("inf")), at, vocab_size), 0)
    token = tl.where(broken < vocab_size, broken, token)
    tl.store(tokens + row, token.to(tl.int64))


TEMPERATURE, MIN_P, TOP_K, TOP_P = range(4)
"""The rows of `Draws.settings`."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows of logits to draw from, and their settings, all on one device.

    - `logits`: `[B, V]` of any floating type, rows of consecutive numbers. `rows`: int64 `[R]`, the
      rows to draw from.
    - `settings`: float64 `[4, R or more]`: temperature, min-p, top-k, top-p. 0, or 1 for top-p, is
      no limit. Its columns are a multiple of `ALIGNED`.
    """

    logits: torch.Tensor
    rows: torch.Tensor
    settings: torch.Tensor

    @property
    def num_parts(self) -> int:
        """The number of parts of a row."""
        return int(triton.cdiv(self.logits.shape[1], PART))


@dataclass(frozen=True, slots=True)
class Sums:
    """The results of the first kernel for each part of a row.

    `peaks`: float32 `[R, parts]`, the largest logit of each part. `sums`: float64 `[R, parts]`,
    the weights of each part relative to its largest.
    """

    peaks: torch.Tensor
    sums: torch.Tensor


@dataclass(frozen=True, slots=True)
class Floors:
    """The limits of rows.

    `floors` and `peaks`: float32 `[R]`, the lowest logit inside top-k and top-p, -inf for no limit,
    and the largest logit. `above`: int32 `[R]`, the number of tokens above the floor of top-k.
    """

    floors: torch.Tensor
    peaks: torch.Tensor
    above: torch.Tensor


def weight_sums(
    draws: Draws, tokens: torch.Tensor | None = None
) -> tuple[Sums, torch.Tensor | None]:
    """Sum the weights of each part, and count the tokens ahead of `tokens`, int64 `[R]`.

    A token is ahead if its logit is larger, or equal and its id lower. Their number is the sum of
    the second result, int32 `[R, programs]`; None without tokens.
    """
    count, num_parts, device = len(draws.rows), draws.num_parts, draws.logits.device
    num_programs = triton.cdiv(num_parts, _PARTS)
    peaks = torch.empty(count, num_parts, dtype=torch.float32, device=device)
    sums = torch.empty(count, num_parts, dtype=torch.float64, device=device)
    ahead = None
    if tokens is not None:
        ahead = torch.empty(count, num_programs, dtype=torch.int32, device=device)
    _sums_kernel[(count, num_programs)](
        draws.logits,
        draws.rows,
        draws.settings,
        draws.rows if tokens is None else tokens,
        peaks,
        sums,
        peaks if ahead is None else ahead,
        draws.logits.stride(0),
        draws.logits.shape[1],
        num_parts,
        has_tokens=tokens is not None,
        part=PART,
        parts=_PARTS,
        num_warps=_WARPS,
    )
    return Sums(peaks, sums), ahead


def kept_sums(draws: Draws, sums: Sums, floors: Floors) -> Sums:
    """Sum the weights that min-p and `floors` leave in each part."""
    left = torch.empty_like(sums.sums)
    _kept_sums_kernel[(len(draws.rows), triton.cdiv(draws.num_parts, _PARTS))](
        draws.logits,
        draws.rows,
        draws.settings,
        floors.floors,
        floors.peaks,
        sums.peaks,
        sums.sums,
        left,
        draws.logits.stride(0),
        draws.settings.stride(0),
        draws.logits.shape[1],
        draws.num_parts,
        part=PART,
        parts=_PARTS,
        num_warps=_WARPS,
    )
    return Sums(sums.peaks, left)


def choose(draws: Draws, sums: Sums, floors: Floors | None, numbers: torch.Tensor) -> torch.Tensor:
    """The token of each row at which the cumulated weight passes `numbers` times the row's.

    `numbers` are float64 `[R]` in [0, 1). With `floors`, filters apply, and `sums` are what they
    leave. Returns int64 `[R]`. A row without any weight gives a token that has none.
    """
    tokens = torch.empty(len(draws.rows), dtype=torch.int64, device=draws.logits.device)
    _choice_kernel[(len(draws.rows),)](
        draws.logits,
        draws.rows,
        draws.settings,
        sums.peaks if floors is None else floors.floors,
        sums.peaks,
        sums.sums,
        numbers,
        tokens,
        draws.logits.stride(0),
        draws.settings.stride(0),
        draws.logits.shape[1],
        draws.num_parts,
        is_filtered=floors is not None,
        part=PART,
        max_parts=triton.next_power_of_2(draws.num_parts),
        num_warps=_WARPS,
    )
    return tokens
