"""Causal convolutions over a few positions as one Triton kernel.

A program computes some channels of a sequence, a block of tokens after the other. It reads the
state before it writes it, and no other program sees these channels of a slot.
"""

import torch
import triton
import triton.language as tl

from pyengine.kernels.sequences import Sequences, silu

_TOKENS = 64
"""Of a block, in steps with prefills."""
_CHANNELS = {1: 256, _TOKENS: 64}
"""Of a program, by the tokens of a block. They have not been measured on a GPU."""


@triton.jit
def _input(rows, gate, token, row_stride, gate_stride, at, mask):  # noqa: PLR0913, PLR0917
    """The inputs of tokens at channels `at`, gated, in float32."""
    value = tl.load(rows + token * row_stride + at, mask=mask, other=0.0).to(tl.float32)
    if gate is not None:
        value *= tl.load(gate + token * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _kernel(  # noqa: PLR0913, PLR0917
    rows,
    weight,
    bias,
    input_gate,
    output_gate,
    state,
    out,
    starts,
    sources,
    slots,
    row_stride,
    input_stride,
    output_stride,
    channels: tl.constexpr,
    size: tl.constexpr,
    has_silu: tl.constexpr,
    block_taps: tl.constexpr,
    block_t: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    begin = tl.load(starts + sequence).to(tl.int64)
    length = tl.load(starts + sequence + 1) - begin
    source, slot = tl.load(sources + sequence), tl.load(slots + sequence)
    at = tl.program_id(1) * block_c + tl.arange(0, block_c)
    is_channel = at < channels
    kept: tl.constexpr = size - 1
    before = state + source * kept * channels
    oldest = tl.where(source >= 0, -kept, 0)  # zeros precede it
    for first in range(0, length, block_t):
        token = first + tl.arange(0, block_t)[:, None]
        is_own = (token < length) & is_channel[None, :]
        total = tl.zeros((block_t, block_c), dtype=tl.float32)
        for tap in tl.static_range(size):
            position = token - kept + tap
            value = _input(
                rows, input_gate, begin + position, row_stride, input_stride, at[None, :],
                is_own & (position >= 0),
            )  # fmt: skip
            earlier = tl.load(
                before + (position + kept) * channels + at[None, :],
                mask=is_own & (position < 0) & (position >= oldest),
                other=0.0,
            ).to(tl.float32)
            factor = tl.load(weight + at * size + tap, mask=is_channel, other=0.0)
            value = tl.where(position >= 0, value, earlier)
            total = tl.fma(value, tl.broadcast_to(factor[None, :], value.shape), total)
        if bias is not None:
            total += tl.load(bias + at, mask=is_channel, other=0.0)[None, :]
        if has_silu:
            total = silu(total)
        if output_gate is not None:
            gate = output_gate + (begin + token) * output_stride + at[None, :]
            total *= tl.load(gate, mask=is_own, other=0.0).to(tl.float32)
        target = out + (begin + token) * channels + at[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=is_own)
    if slot >= 0:
        tap = tl.arange(0, block_taps)[:, None]
        position = length - kept + tap
        is_own = (tap < kept) & is_channel[None, :]
        value = _input(
            rows, input_gate, begin + position, row_stride, input_stride, at[None, :],
            is_own & (position >= 0),
        )  # fmt: skip
        earlier = tl.load(
            before + (position + kept) * channels + at[None, :],
            mask=is_own & (position < 0) & (position >= oldest),
            other=0.0,
        ).to(tl.float32)
        value = tl.where(position >= 0, value, earlier).to(state.dtype.element_ty)
        tl.debug_barrier()  # the slot may be the source, which other threads read
        tl.store(state + (slot * kept + tap) * channels + at[None, :], value, mask=is_own)


def short_conv(  # noqa: PLR0913
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    sequences: Sequences,
    *,
    has_silu: bool,
    gates: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The convolution of rows `[T, channels]`, rounded once; it changes `state`.

    `weight` is `[channels, size]`, `bias` `[channels]`, both in float32 and contiguous; `state`
    `[slots, size - 1, channels]` has gated inputs. `gates` `[T, channels]` multiply inputs and
    results. The elements of a row lie next to each other.
    """
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    count, (channels, size) = len(sequences.slots), weight.shape
    if not count:
        return out
    input_gate, output_gate = gates or (None, None)
    block_t = 1 if len(rows) <= count else _TOKENS
    block_c = min(_CHANNELS[block_t], triton.next_power_of_2(channels))
    _kernel[(count, triton.cdiv(channels, block_c))](
        rows,
        weight,
        bias,
        input_gate,
        output_gate,
        state,
        out,
        *sequences,
        rows.stride(0),
        0 if input_gate is None else input_gate.stride(0),
        0 if output_gate is None else output_gate.stride(0),
        channels=channels,
        size=size,
        has_silu=has_silu,
        block_taps=triton.next_power_of_2(size - 1),
        block_t=block_t,
        block_c=block_c,
        num_warps=1 if block_t == 1 else 4,
    )
    return out
