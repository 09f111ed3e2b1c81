"""Top-k and top-p as a Triton kernel: the lowest logit of each row that stays, without a sort.

One program works on a row. Of the parts of the row it knows the largest logits and the sums of
weights, from the pass before. They give a lower bound of the floor, and only parts that reach it
are read: the logits from the bound on are the candidates. Then the bits of the floor are narrowed
down: each round sums the weights above 8 marks, and leaves the candidates between two marks.

Weights and sums are float64, added in an order that depends on the row alone.
"""

import torch
import triton
import triton.language as tl

from pyengine.kernels.draw import (
    MIN_P,
    PART,
    TOP_K,
    TOP_P,
    Draws,
    Floors,
    Sums,
    choose,
    kept_sums,
    weight_sums,
)

_WIDTH = 512
"""Candidates that a program reads at once."""
_MARKS = 8
"""Marks of a round."""
_WARPS = 8
_ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""Bits that are 0 in each logit of a type, as float32."""


@triton.jit
def _keys(values, shift: tl.constexpr):
    """Integers in the order of float32 values; 0 and -0 are equal."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> shift


@triton.jit
def _value(key, shift: tl.constexpr):
    """The float32 value of a key."""
    low: tl.constexpr = (1 << shift) - 1
    bits = key.to(tl.int32) << shift
    return tl.where(bits < 0, (bits | low) ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _bound(  # noqa: PLR0913, PLR0917
    keys,
    shares,
    weights,
    sizes,
    peak,
    temperature,
    target,
    is_weighted: tl.constexpr,
    shift: tl.constexpr,
):
    """A key from which on candidates reach `target`, by what is known of the parts.

    A part whose largest logit reaches a mark has at least that token above it, and at least its
    whole weight less that of as many tokens as it has at the mark.
    """
    high = tl.max(keys, 0).to(tl.int64) + 1
    low = tl.min(_keys(tl.full(keys.shape, -float("inf"), tl.float32), shift), 0).to(tl.int64)
    while high - low > 1:
        mark = low + ((high - low) >> 1)
        if is_weighted:
            share = tl.exp((_value(mark, shift).to(tl.float64) - peak) / temperature)
            lower_bounds = tl.maximum(shares, weights - sizes * share) * (1 - 1e-9)  # rounding
        else:
            lower_bounds = shares
        is_reached = tl.sum(tl.where(keys >= mark, lower_bounds, 0.0), 0) >= target
        low = tl.where(is_reached, mark, low)
        high = tl.where(is_reached, high, mark)
    return low


@triton.jit
def find_live(live, is_live, parts):
    """Write the numbers of the parts that are live, in order; returns how many."""
    tl.debug_barrier()  # earlier ones were read
    index = tl.cumsum(is_live.to(tl.int32), 0) - 1
    tl.store(live + index, parts, mask=is_live)
    tl.debug_barrier()
    return tl.sum(is_live.to(tl.int32), 0)


@triton.jit
def _collect(  # noqa: PLR0913, PLR0917
    logits,
    live,
    num_live,
    vocab_size,
    candidates,
    low,
    peak,
    min_p,
    temperature,
    shift: tl.constexpr,
    part: tl.constexpr,
    width: tl.constexpr,
):
    """Write the logits of live parts whose keys reach `low`, in order of id; returns how many."""
    lanes = tl.arange(0, width)
    count = 0
    start = 0
    while start < num_live * part:
        index = start + lanes
        is_read = index < num_live * part
        at = tl.load(live + index // part, mask=is_read, other=0) * part + index % part
        is_read = is_read & (at < vocab_size)
        values = tl.load(logits + at, mask=is_read, other=-float("inf")).to(tl.float32)
        kept = is_read & (_keys(values, shift) >= low)
        if min_p > 0:
            kept = kept & (tl.exp((values.to(tl.float64) - peak) / temperature) >= min_p)
        tl.store(candidates + count + tl.cumsum(kept.to(tl.int32), 0) - 1, values, mask=kept)
        count += tl.sum(kept.to(tl.int32), 0)
        start += width
    tl.debug_barrier()
    return count


@triton.jit
def _candidates(candidates, index, count, peak, temperature, is_weighted: tl.constexpr):
    """Candidates and their weights, or 1 each."""
    is_read = index < count
    values = tl.load(candidates + index, mask=is_read, other=-float("inf"))
    if is_weighted:
        weights = tl.exp((values.to(tl.float64) - peak) / temperature)
    else:
        weights = tl.full(values.shape, 1.0, tl.float64)
    return values, tl.where(is_read, weights, 0.0)


@triton.jit
def _sum(candidates, count, peak, temperature, width: tl.constexpr):
    """The weight of all candidates."""
    lanes = tl.arange(0, width)
    sums = tl.zeros((width,), tl.float64)
    start = 0
    while start < count:
        _, weights = _candidates(candidates, start + lanes, count, peak, temperature, True)
        sums += weights
        start += width
    return tl.sum(sums, 0)


@triton.jit
def _narrow(  # noqa: PLR0913, PLR0917
    candidates,
    count,
    low,
    peak,
    temperature,
    target,
    is_weighted: tl.constexpr,
    shift: tl.constexpr,
    width: tl.constexpr,
    marks: tl.constexpr,
):
    """The largest key from which on candidates reach `target`, and the weight above it.

    `candidates` are those from `low` on, which reach it.
    """
    lanes, numbers = tl.arange(0, width), tl.arange(0, marks)
    high = _keys(peak.to(tl.float32), shift).to(tl.int64) + 1
    above = tl.zeros((), tl.float64)  # the weight from `high` on
    while high - low > 1:
        step = (high - low + marks) // (marks + 1)
        keys = low + step * (numbers + 1)
        limits = tl.minimum(keys, high).to(tl.int32)
        sums = tl.zeros((marks, width), tl.float64)
        start = 0
        while start < count:
            values, weights = _candidates(
                candidates, start + lanes, count, peak, temperature, is_weighted
            )  # fmt: skip
            own = _keys(values, shift)
            weights = tl.where(own < high, weights, 0.0)
            sums += tl.where(own[None, :] >= limits[:, None], weights[None, :], 0.0)
            start += width
        reached = above + tl.sum(sums, 1)
        passed = tl.sum(((reached >= target) & (keys < high)).to(tl.int32), 0)
        end = low + step * (passed + 1)
        beyond = tl.sum(tl.where(numbers == passed, reached, 0.0), 0)
        above = tl.where(end < high, beyond, above)
        high = tl.minimum(high, end)
        low = low + step * passed
        if count > width:  # leave the candidates between the marks
            left = 0
            start = 0
            while start < count:
                index = start + lanes
                values = tl.load(candidates + index, mask=index < count, other=-float("inf"))
                own = _keys(values, shift)
                kept = (index < count) & (own >= low) & (own < high)
                targets = left + tl.cumsum(kept.to(tl.int32), 0) - 1
                tl.debug_barrier()  # all were read
                tl.store(candidates + targets, values, mask=kept)
                left += tl.sum(kept.to(tl.int32), 0)
                start += width
            count = left
            tl.debug_barrier()
    return low, above


@triton.jit
def _floors_kernel(  # noqa: PLR0913, PLR0917
    logits,
    rows,
    settings,
    peaks,
    sums,
    live,
    candidates,
    floors,
    row_peaks,
    numbers_above,
    stride,
    pitch,
    vocab_size,
    num_parts,
    min_p_at: tl.constexpr,
    top_k_at: tl.constexpr,
    top_p_at: tl.constexpr,
    shift: tl.constexpr,
    part: tl.constexpr,
    max_parts: tl.constexpr,
    width: tl.constexpr,
    marks: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += tl.load(rows + row) * stride
    live += row * num_parts
    candidates += row * vocab_size
    settings += row
    temperature, min_p = tl.load(settings), tl.load(settings + min_p_at * pitch)
    top_k, top_p = tl.load(settings + top_k_at * pitch), tl.load(settings + top_p_at * pitch)
    parts = tl.arange(0, max_parts)
    there = parts < num_parts
    part_peaks = tl.load(peaks + row * num_parts + parts, mask=there, other=-float("inf"))
    part_sums = tl.load(sums + row * num_parts + parts, mask=there, other=0.0)
    row_peak = tl.max(part_peaks, 0)
    peak = row_peak.to(tl.float64)
    keys = _keys(part_peaks, shift)
    is_broken = tl.max((part_sums != part_sums).to(tl.int32), 0) > 0
    is_broken = is_broken | (peak == -float("inf"))
    low = tl.min(_keys(tl.full(parts.shape, -float("inf"), tl.float32), shift), 0).to(tl.int64)
    floor, above = low, tl.zeros((), tl.float64)
    if (top_k > 0) & (top_k < vocab_size) & (is_broken == 0):
        ones = there.to(tl.float64)
        bound = _bound(keys, ones, ones, ones, peak, temperature, top_k, False, shift)
        num_live = find_live(live, there & (keys >= bound), parts)
        count = _collect(
            logits, live, num_live, vocab_size, candidates, bound, peak, 0.0, temperature,
            shift, part, width,
        )  # fmt: skip
        floor, above = _narrow(
            candidates, count, bound, peak, temperature, top_k, False, shift, width, marks
        )  # fmt: skip
    if (top_p < 1) & (is_broken == 0):
        shares = tl.exp((part_peaks.to(tl.float64) - peak) / temperature)
        weights = tl.where(part_sums > 0, part_sums * shares, 0.0)
        total = tl.sum(weights, 0)
        is_filtered = (floor > low) | (min_p > 0)
        bound = floor
        if is_filtered == 0:
            sizes = tl.minimum(vocab_size - parts * part, part).to(tl.float64)
            bound = _bound(
                keys, shares, weights, sizes, peak, temperature, top_p * total, True, shift
            )  # fmt: skip
        num_live = find_live(live, there & (keys >= bound) & (shares >= min_p), parts)
        count = _collect(
            logits, live, num_live, vocab_size, candidates, bound, peak, min_p, temperature,
            shift, part, width,
        )  # fmt: skip
        if is_filtered:
            total = _sum(candidates, count, peak, temperature, width)
        floor, _ = _narrow(
            candidates, count, bound, peak, temperature, top_p * total, True, shift, width, marks
        )  # fmt: skip
    tl.store(floors + row, _value(floor, shift))
    tl.store(row_peaks + row, row_peak)
    tl.store(numbers_above + row, above.to(tl.int32))


def rank_floors(draws: Draws, sums: Sums) -> Floors:
    """Find the lowest logit of each row inside top-k, then top-p.

    -inf for rows without a limit, and for rows without a distribution. Tokens with that logit are
    all inside. The nucleus of top-p are the fewest most probable tokens, of those inside top-k and
    min-p, whose weights add up to `top_p` of theirs. It ends elsewhere than the CPU's only if a
    cumulated weight agrees with the limit to 12 digits, as sums have another order.
    """
    count, vocab_size, num_parts = len(draws.rows), draws.logits.shape[1], draws.num_parts
    device = draws.logits.device
    floors, row_peaks = torch.empty(2, count, dtype=torch.float32, device=device)
    above = torch.empty(count, dtype=torch.int32, device=device)
    _floors_kernel[(count,)](
        draws.logits,
        draws.rows,
        draws.settings,
        sums.peaks,
        sums.sums,
        torch.empty(count, num_parts, dtype=torch.int32, device=device),
        torch.empty(count, vocab_size, dtype=torch.float32, device=device),
        floors,
        row_peaks,
        above,
        draws.logits.stride(0),
        draws.settings.stride(0),
        vocab_size,
        num_parts,
        min_p_at=MIN_P,
        top_k_at=TOP_K,
        top_p_at=TOP_P,
        shift=_ZERO_BITS.get(draws.logits.dtype, 0),
        part=PART,
        max_parts=triton.next_power_of_2(num_parts),
        width=_WIDTH,
        marks=_MARKS,
        num_warps=_WARPS,
    )
    return Floors(floors, row_peaks, above)


def draw_tokens(draws: Draws, numbers: torch.Tensor, *, is_filtered: bool) -> torch.Tensor:
    """Draw the token of each row: int64 `[R]`. `numbers` are float64 `[R]` in [0, 1).

    Without `is_filtered`, no row has min-p, top-k or top-p.
    """
    sums, _ = weight_sums(draws)
    if not is_filtered:
        return choose(draws, sums, None, numbers)
    floors = rank_floors(draws, sums)
    return choose(draws, kept_sums(draws, sums, floors), floors, numbers)
