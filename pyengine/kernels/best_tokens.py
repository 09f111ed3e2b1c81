"""Log-probabilities and the most probable tokens of rows, as Triton kernels.

The logits are read once, by the first kernel of the draw: sums of weights, and the number of tokens
ahead of the chosen one. Then :mod:`.floors` finds the logit of the last wanted token, and the parts
that reach it are read again.
"""

import torch
import triton
import triton.language as tl

from pyengine.kernels import ALIGNED
from pyengine.kernels.draw import PART, TOP_K, Draws, weight_sums
from pyengine.kernels.floors import find_live, rank_floors

_WIDTH = 512
"""Logits that a program reads at once."""
_WARPS = 8


@triton.jit(do_not_specialize=["num_logprobs"])
def _best_kernel(  # noqa: PLR0913, PLR0917
    logits,
    rows,
    tokens,
    peaks,
    sums,
    ahead,
    floors,
    numbers_above,
    live,
    normalisers,
    logprobs,
    ranks,
    best_ids,
    best_logits,
    stride,
    vocab_size,
    num_parts,
    num_programs,
    num_logprobs,
    has_best: tl.constexpr,
    part: tl.constexpr,
    max_parts: tl.constexpr,
    max_programs: tl.constexpr,
    width: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += tl.load(rows + row) * stride
    parts, programs = tl.arange(0, max_parts), tl.arange(0, max_programs)
    there = parts < num_parts
    part_peaks = tl.load(peaks + row * num_parts + parts, mask=there, other=-float("inf"))
    part_sums = tl.load(sums + row * num_parts + parts, mask=there, other=0.0)
    peak = tl.max(part_peaks, 0).to(tl.float64)
    total = tl.sum(part_sums * tl.exp(part_peaks.to(tl.float64) - peak), 0)
    normaliser = (peak + tl.log(total)).to(tl.float32)
    counts = tl.load(
        ahead + row * num_programs + programs, mask=programs < num_programs, other=0
    )  # fmt: skip
    chosen = tl.load(logits + tl.load(tokens + row)).to(tl.float32)
    tl.store(normalisers + row, normaliser)
    tl.store(logprobs + row, chosen - normaliser)
    tl.store(ranks + row, tl.sum(counts, 0).to(tl.int64) + 1)
    if has_best:
        floor = tl.load(floors + row)
        equals = num_logprobs - tl.load(numbers_above + row)  # tokens at the floor to keep
        num_live = find_live(live + row * num_parts, there & (part_peaks >= floor), parts)
        best_ids += row * num_logprobs
        best_logits += row * num_logprobs
        lanes = tl.arange(0, width)
        num_best, num_equal = 0, 0
        start = 0
        while start < num_live * part:
            index = start + lanes
            is_read = index < num_live * part
            at = tl.load(live + row * num_parts + index // part, mask=is_read, other=0)
            at = at * part + index % part
            is_read = is_read & (at < vocab_size)
            values = tl.load(logits + at, mask=is_read, other=-float("inf")).to(tl.float32)
            is_equal = is_read & (values == floor)
            equal = num_equal + tl.cumsum(is_equal.to(tl.int32), 0)
            kept = (is_read & (values > floor)) | (is_equal & (equal <= equals))
            targets = num_best + tl.cumsum(kept.to(tl.int32), 0) - 1
            kept = kept & (targets < num_logprobs)
            tl.store(best_ids + targets, at.to(tl.int64), mask=kept)
            tl.store(best_logits + targets, values, mask=kept)
            num_equal += tl.sum(is_equal.to(tl.int32), 0)
            num_best += tl.sum(kept.to(tl.int32), 0)
            start += width


def best_tokens(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, num_logprobs: int
) -> tuple[torch.Tensor, ...]:
    """Log-probabilities of `rows` of `logits`, `[B, V]` of any floating type, all on one device.

    `rows` and `tokens` are int64 `[T]`. Returns the tokens' log-probabilities, float32 `[T]`, and
    ranks, int64 `[T]`; the ids of the `num_logprobs` largest logits, int64 `[T, num_logprobs]`, and
    their log-probabilities, float32. Equal logits rank by id, lowest first.
    """
    count, vocab_size, device = len(rows), logits.shape[1], logits.device
    # Weights at temperature 1, without min-p, which is not read at top-p 1.
    settings = torch.ones(
        4, triton.cdiv(count, ALIGNED) * ALIGNED, dtype=torch.float64, device=device
    )
    settings[TOP_K].fill_(num_logprobs)
    draws = Draws(logits, rows, settings)
    sums, ahead = weight_sums(draws, tokens)
    assert ahead is not None
    limits = rank_floors(draws, sums) if num_logprobs else None
    normalisers, logprobs = torch.empty(2, count, dtype=torch.float32, device=device)
    ranks = torch.empty(count, dtype=torch.int64, device=device)
    ids = torch.zeros(count, num_logprobs, dtype=torch.int64, device=device)
    values = torch.full((count, num_logprobs), -torch.inf, device=device)
    _best_kernel[(count,)](
        logits,
        rows,
        tokens,
        sums.peaks,
        sums.sums,
        ahead,
        sums.peaks if limits is None else limits.floors,
        ahead if limits is None else limits.above,
        torch.empty(count, draws.num_parts, dtype=torch.int32, device=device),
        normalisers,
        logprobs,
        ranks,
        ids,
        values,
        logits.stride(0),
        vocab_size,
        draws.num_parts,
        ahead.shape[1],
        num_logprobs,
        has_best=num_logprobs > 0,
        part=PART,
        max_parts=triton.next_power_of_2(draws.num_parts),
        max_programs=triton.next_power_of_2(ahead.shape[1]),
        width=_WIDTH,
        num_warps=_WARPS,
    )
    ranked = values.sort(dim=1, descending=True, stable=True)  # they are in order of id
    return logprobs, ranks, ids.gather(1, ranked.indices), ranked.values - normalisers[:, None]
