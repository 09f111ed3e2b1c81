"""State spaces, Mamba (arXiv:2312.00752) and Mamba-2 (arXiv:2405.21060), as Triton kernels.

A program has some columns of a head's state in registers. It takes the tokens of a sequence one
after the other, or those of a longer one of Mamba-2, in 16-bit rows, a chunk after the other
(section 6 of the paper). Chunks begin at a sequence's first token in the step: how a prompt is
divided into steps changes results by rounding.

Sizes of tiles are estimates: they have not been measured on a GPU.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pyengine.kernels.sequences import (
    FEW_TOKENS,
    PRODUCT,
    STATE_ELEMENTS,
    Sequences,
    silu,
    softplus,
)

_CHUNK = 32
"""Tokens. With more, or with products in float32, a program needs more registers than there are."""


class SpaceWeights(NamedTuple):
    """Rates, biases of time steps and factors of inputs that skip the state; float32, contiguous.

    `[heads]` each; of Mamba `[state_size, channels]`, `[channels]` and `[channels]`.
    """

    rate: torch.Tensor
    bias: torch.Tensor
    skip: torch.Tensor


@triton.jit(do_not_specialize=["longest"])
def _recurrent_kernel(  # noqa: PLR0913, PLR0917
    x,
    time,
    b,
    c,
    gate,
    rate,
    bias,
    skip,
    state,
    out,
    starts,
    sources,
    slots,
    strides,
    longest,
    heads: tl.constexpr,
    groups: tl.constexpr,
    state_size: tl.constexpr,
    head_dim: tl.constexpr,
    by_channel: tl.constexpr,
    block_n: tl.constexpr,
    block_p: tl.constexpr,
) -> None:
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    if end - begin <= longest:
        source, slot = tl.load(sources + sequence), tl.load(slots + sequence)
        n = tl.arange(0, block_n)
        p = tl.program_id(2) * block_p + tl.arange(0, block_p)
        is_n, is_p = n < state_size, p < head_dim
        mask = is_n[:, None] & is_p[None, :]
        place = (head * state_size + n[:, None]) * head_dim + p[None, :]
        size: tl.constexpr = heads * state_size * head_dim
        space = tl.zeros((block_n, block_p), dtype=tl.float32)
        if source >= 0:
            space = tl.load(state + source * size + place, mask=mask, other=0.0).to(tl.float32)
        inner = (head // (heads // groups)) * state_size + n
        if by_channel:
            rates = tl.load(rate + place, mask=mask, other=0.0)
            biases = tl.load(bias + p, mask=is_p, other=0.0)
            skips = tl.load(skip + p, mask=is_p, other=0.0)
        else:
            rates, biases, skips = tl.load(rate + head), tl.load(bias + head), tl.load(skip + head)
        for token in range(begin, end):
            row = tl.cast(token, tl.int64)
            own = head * head_dim + p
            value = tl.load(x + row * strides[0] + own, mask=is_p, other=0.0).to(tl.float32)
            if by_channel:
                step = tl.load(time + row * strides[1] + p, mask=is_p, other=0.0).to(tl.float32)
                step = softplus(step + biases)
                decay = tl.exp(step[None, :] * rates)
            else:
                step = softplus(tl.load(time + row * strides[1] + head).to(tl.float32) + biases)
                decay = tl.exp(step * rates)
            writes = tl.load(b + row * strides[2] + inner, mask=is_n, other=0.0).to(tl.float32)
            reads = tl.load(c + row * strides[3] + inner, mask=is_n, other=0.0).to(tl.float32)
            space = decay * space + writes[:, None] * (step * value)[None, :]
            result = tl.sum(space * reads[:, None], 0) + skips * value
            if gate is not None:
                opened = tl.load(gate + row * strides[4] + own, mask=is_p, other=0.0)
                result *= silu(opened.to(tl.float32))
            target = out + row * (heads * head_dim) + own
            tl.store(target, result.to(out.dtype.element_ty), mask=is_p)
        if slot >= 0:
            tl.debug_barrier()  # the slot may be the source, which other threads read
            tl.store(state + slot * size + place, space.to(state.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["longest"])
def _chunked_kernel(  # noqa: PLR0913, PLR0917
    x,
    time,
    b,
    c,
    gate,
    rate,
    bias,
    skip,
    state,
    out,
    starts,
    sources,
    slots,
    strides,
    longest,
    heads: tl.constexpr,
    groups: tl.constexpr,
    state_size: tl.constexpr,
    head_dim: tl.constexpr,
    block_n: tl.constexpr,
    block_p: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    if end - begin > longest:
        source, slot = tl.load(sources + sequence), tl.load(slots + sequence)
        n = tl.arange(0, block_n)
        p = tl.program_id(2) * block_p + tl.arange(0, block_p)
        is_n, is_p = n < state_size, p < head_dim
        mask = is_n[:, None] & is_p[None, :]
        place = (head * state_size + n[:, None]) * head_dim + p[None, :]
        size: tl.constexpr = heads * state_size * head_dim
        space = tl.zeros((block_n, block_p), dtype=tl.float32)
        if source >= 0:
            space = tl.load(state + source * size + place, mask=mask, other=0.0).to(tl.float32)
        inner = (head // (heads // groups)) * state_size + n[None, :]
        rates, biases, skips = tl.load(rate + head), tl.load(bias + head), tl.load(skip + head)
        i = tl.arange(0, chunk)
        for first in range(begin, end, chunk):
            token = tl.cast(first, tl.int64) + i
            is_own = token < end
            is_value = is_own[:, None] & is_p[None, :]
            is_inner = is_own[:, None] & is_n[None, :]
            own = head * head_dim + p[None, :]
            value = tl.load(x + token[:, None] * strides[0] + own, mask=is_value, other=0.0)
            value = value.to(tl.float32)
            step = tl.load(time + token * strides[1] + head, mask=is_own, other=0.0)
            step = tl.where(is_own, softplus(step.to(tl.float32) + biases), 0.0)
            writes = tl.load(b + token[:, None] * strides[2] + inner, mask=is_inner, other=0.0)
            reads = tl.load(c + token[:, None] * strides[3] + inner, mask=is_inner, other=0.0)
            writes, reads = writes.to(tl.float32), reads.to(tl.float32)
            total, last = tl.cumsum(step * rates, 0), tl.sum(step * rates, 0)
            ratio = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
            pairs = tl.dot(reads, tl.trans(writes), input_precision=PRODUCT) * ratio
            pairs = tl.where(i[:, None] >= i[None, :], pairs, 0.0)
            change = step[:, None] * value
            result = tl.dot(reads * tl.exp(total)[:, None], space, input_precision=PRODUCT)
            result = tl.dot(pairs, change, result, input_precision=PRODUCT) + skips * value
            writes *= tl.exp(last - total)[:, None]
            space = tl.dot(tl.trans(writes), change, tl.exp(last) * space, input_precision=PRODUCT)
            if gate is not None:
                opened = tl.load(gate + token[:, None] * strides[4] + own, mask=is_value, other=0.0)
                result *= silu(opened.to(tl.float32))
            target = out + token[:, None] * (heads * head_dim) + own
            tl.store(target, result.to(out.dtype.element_ty), mask=is_value)
        if slot >= 0:
            tl.debug_barrier()  # the slot may be the source, which other threads read
            tl.store(state + slot * size + place, space.to(state.dtype.element_ty), mask=mask)


def state_space(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    weights: SpaceWeights,
    state: torch.Tensor,
    sequences: Sequences,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """The results `[T, heads, head_dim]`, rounded once; it changes `state`.

    `rows` are x `[T, heads, head_dim]`, time steps `[T, heads]`, and B and C
    `[T, groups, state_size]`; `gate` is like x, and its SiLU multiplies results. `state` is
    `[slots, heads, state_size, head_dim]`. Mamba has x and time steps `[T, channels]`, B and C
    `[T, state_size]`, state `[slots, state_size, channels]`. The elements of a token lie next to
    each other. For a token, with `d = softplus(time step + bias)`:
    `S = exp(d rate) S + d x B`; the result is `S C + skip x`.
    """
    x, _, b, _ = rows
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    by_channel = weights.rate.dim() == 2
    if by_channel:  # a head whose columns differ
        heads, groups, (state_size, head_dim) = 1, 1, state.shape[1:]
    else:
        (heads, state_size, head_dim), groups = state.shape[1:], b.shape[1]
    count = len(sequences.slots)
    if not count:
        return out
    num_tokens, block_n = len(x), triton.next_power_of_2(state_size)
    block_p = min(triton.next_power_of_2(head_dim), max(1, STATE_ELEMENTS // block_n), 64)
    arguments = (
        *rows,
        gate,
        *weights,
        state,
        out,
        *sequences,
        (*(part.stride(0) for part in rows), 0 if gate is None else gate.stride(0)),
    )
    sizes = {"heads": heads, "groups": groups, "state_size": state_size, "head_dim": head_dim}
    has_chunks = not by_channel and x.itemsize == 2 and num_tokens > max(count, FEW_TOKENS)
    _recurrent_kernel[(count, heads, triton.cdiv(head_dim, block_p))](
        *arguments,
        FEW_TOKENS if has_chunks else num_tokens,
        **sizes,
        by_channel=by_channel,
        block_n=block_n,
        block_p=block_p,
        num_warps=min(4, max(1, block_n * block_p // 1024)),
    )
    if has_chunks:
        block_n, block_p = max(16, block_n), max(16, block_p)
        _chunked_kernel[(count, heads, triton.cdiv(head_dim, block_p))](
            *arguments,
            FEW_TOKENS,
            **sizes,
            block_n=block_n,
            block_p=block_p,
            chunk=_CHUNK,
            num_warps=4,
        )
    return out
