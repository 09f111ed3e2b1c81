"""Products of rows with one of several weights each, as one Triton kernel: mixtures of experts.

Pairs of a token and one of its experts are grouped by expert. A program multiplies some pairs of an
expert by some of its outputs: it reads the rows from where the tokens have them, and writes each
result to the place of its pair, so rows are never permuted in memory (as in MegaBlocks, Gale et
al., 2023, arXiv:2211.15841, without padding). The host knows no sizes of groups.

Weights in 8-bit floats have a scale for a rectangle of weights. The rows are quantised as they are
read, 128 inputs with one scale, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3.2).

Sizes of tiles are estimates: they have not been measured on a GPU.
"""

import torch
import triton
import triton.language as tl

SCALED_INPUTS = 128
"""The inputs of a row that share a scale, if the weight is in 8-bit floats."""
_FEW = 32
"""Rows of a group, on average, up to which tiles have the fewest rows."""
_OUTPUTS = 128
"""Of a tile."""


@triton.jit(do_not_specialize=["num_pairs"])
def _kernel(  # noqa: PLR0913, PLR0917
    rows,
    weight,
    out,
    order,
    ends,
    bias,
    scales,
    factors,
    num_pairs,
    row_stride,
    weight_strides,
    scale_strides,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    choices: tl.constexpr,
    num_groups: tl.constexpr,
    lanes: tl.constexpr,
    scaled_outputs: tl.constexpr,
    scaled_inputs: tl.constexpr,
    largest: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    group = 0
    start = block * block_m
    stop = num_pairs
    if order is not None:
        lane = tl.arange(0, lanes)
        stops = tl.load(ends + lane, mask=lane < num_groups, other=0).to(tl.int32)
        starts = tl.load(ends + lane - 1, mask=(lane > 0) & (lane < num_groups), other=0)
        starts = starts.to(tl.int32)
        blocks = (tl.maximum(stops - starts, 0) + block_m - 1) // block_m
        last = tl.cumsum(blocks, 0)
        group = tl.sum((last <= block).to(tl.int32), 0)
        is_own = lane == group
        start = tl.sum(tl.where(is_own, starts + (block - last + blocks) * block_m, 0), 0)
        stop = tl.sum(tl.where(is_own, stops, 0), 0)
    if start < stop:
        at = start + tl.arange(0, block_m)
        is_pair = at < stop
        pair = at
        if order is not None:
            pair = tl.load(order + at, mask=is_pair, other=0)
        pair = pair.to(tl.int64)
        n = tl.program_id(1) * block_n + tl.arange(0, block_n)
        is_output = n < outputs
        first = tl.arange(0, block_k)
        row = rows + (pair // choices)[:, None] * row_stride + first[None, :]
        own = tl.cast(group, tl.int64)
        column = weight + own * weight_strides[0] + n[None, :] * weight_strides[1]
        column += first[:, None] * weight_strides[2]
        total = tl.zeros((block_m, block_n), dtype=tl.float32)
        for k in range(0, inputs, block_k):
            is_input = first < inputs - k
            x = tl.load(row, mask=is_pair[:, None] & is_input[None, :], other=0.0)
            w = tl.load(column, mask=is_input[:, None] & is_output[None, :], other=0.0)
            if scales is None:
                total = tl.dot(x, w, total, input_precision="ieee")
            else:
                x = x.to(tl.float32)
                unit = tl.maximum(tl.max(tl.abs(x), 1), 1e-12) / largest
                digits = (x / unit[:, None]).to(w.dtype)
                scale = scales + own * scale_strides[0] + n // scaled_outputs * scale_strides[1]
                scale += k // scaled_inputs * scale_strides[2]
                units = tl.load(scale, mask=is_output, other=0.0)
                total += tl.dot(digits, w) * unit[:, None] * units[None, :]
            row += block_k
            column += block_k * weight_strides[2]
        if bias is not None:
            added = tl.load(bias + own * outputs + n, mask=is_output, other=0.0)
            total += added.to(tl.float32)[None, :]
        if factors is not None:
            factor = tl.load(factors + pair, mask=is_pair, other=0.0)
            total *= factor.to(tl.float32)[:, None]
        target = out + pair[:, None] * outputs + n[None, :]
        mask = is_pair[:, None] & is_output[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=mask)


def grouped_linear(  # noqa: PLR0913, PLR0917
    rows: torch.Tensor,
    weight: torch.Tensor,
    order: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    choices: int = 1,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result of every pair, `[pairs, N]`, of the type of `rows`; sums are in float32.

    `rows` are `[R, K]`, `weight` `[groups, N, K]` of any strides. Pair `p` is of row
    `p // choices`; `order` has the numbers of the pairs by group, and `ends` the end of each group
    in it. Without them there is one group, of all pairs. `bias` is `[groups, N]`, `factors`
    `[pairs]` multiply the results. `scales` of a weight in 8-bit floats are float32
    `[groups, N / n, K / k]`, rounded up, for rectangles of `n` outputs and `k` inputs: `n` is 1 or
    128, `k` is 128 or all.
    """
    num_groups, outputs, inputs = weight.shape
    num_pairs = len(rows) * choices if order is None else len(order)
    out = rows.new_empty(num_pairs, outputs)
    if not num_pairs:
        return out
    block_m = 16 if num_pairs <= _FEW * num_groups else 64
    num_blocks = -(-num_pairs // block_m)
    if order is not None:
        num_blocks = num_pairs // block_m + min(num_groups, num_pairs)  # an upper bound
    scaled_outputs = scaled_inputs = 1
    if scales is not None:
        scaled_outputs = 1 if scales.shape[1] == outputs else SCALED_INPUTS
        scaled_inputs = SCALED_INPUTS if scales.shape[2] > 1 else inputs
    _kernel[(num_blocks, -(-outputs // _OUTPUTS))](
        rows,
        weight,
        out,
        order,
        ends,
        bias,
        scales,
        factors,
        num_pairs,
        rows.stride(0),
        tuple(weight.stride()),
        (0, 0, 0) if scales is None else tuple(scales.stride()),
        inputs=inputs,
        outputs=outputs,
        choices=choices,
        num_groups=num_groups,
        lanes=triton.next_power_of_2(num_groups),
        scaled_outputs=scaled_outputs,
        scaled_inputs=scaled_inputs,
        largest=0.0 if scales is None else torch.finfo(weight.dtype).max,
        block_m=block_m,
        block_n=_OUTPUTS,
        block_k=128 // rows.itemsize if scales is None else SCALED_INPUTS,
        num_warps=4 if block_m == 16 else 8,
        num_stages=3 if scales is None else 2,
    )
    return out
