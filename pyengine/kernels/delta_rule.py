"""The gated delta rule (arXiv:2412.06464, and by channel arXiv:2510.26692) as Triton kernels.

A program has some columns of a head's state in registers, and takes the tokens of a sequence one
after the other.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pyengine.kernels.sequences import Sequences, softplus

_ELEMENTS = 4096
"""Of a program's part of the state."""


class DeltaRule(NamedTuple):
    """The numbers of a delta rule: rates `[heads]`, and biases of the gate of decay.

    Both are float32 and contiguous. Biases are `[heads]`, or `[heads * key_dim]` for a decay by
    channel. Value head h reads key head `h // (value_heads / key_heads)`, or with `tiled_heads`
    `h % key_heads`. `eps` is added to the square of a query's or a key's norm.
    """

    rate: torch.Tensor
    bias: torch.Tensor
    beta_scale: float
    tiled_heads: bool
    eps: float


@triton.jit
def _recurrent_kernel(  # noqa: PLR0913, PLR0917
    query,
    key,
    value,
    gate,
    rate_gate,
    rate,
    bias,
    state,
    out,
    starts,
    sources,
    slots,
    strides,
    scale,
    eps,
    beta_scale,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    tiled_heads: tl.constexpr,
    by_channel: tl.constexpr,
    block_k: tl.constexpr,
    block_v: tl.constexpr,
) -> None:
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    source, slot = tl.load(sources + sequence), tl.load(slots + sequence)
    key_head = head % key_heads if tiled_heads else head // (value_heads // key_heads)
    k = tl.arange(0, block_k)
    v = tl.program_id(2) * block_v + tl.arange(0, block_v)
    is_k, is_v = k < key_dim, v < value_dim
    mask = is_k[:, None] & is_v[None, :]
    place = (head * key_dim + k[:, None]) * value_dim + v[None, :]
    size: tl.constexpr = value_heads * key_dim * value_dim
    matrix = tl.zeros((block_k, block_v), dtype=tl.float32)
    if source >= 0:
        matrix = tl.load(state + source * size + place, mask=mask, other=0.0).to(tl.float32)
    rates = tl.load(rate + head)
    if by_channel:
        biases = tl.load(bias + head * key_dim + k, mask=is_k, other=0.0)
    else:
        biases = tl.load(bias + head)
    for token in range(begin, end):
        row = tl.cast(token, tl.int64)
        at = key_head * key_dim + k
        q = tl.load(query + row * strides[0] + at, mask=is_k, other=0.0).to(tl.float32)
        read = tl.load(key + row * strides[1] + at, mask=is_k, other=0.0).to(tl.float32)
        q *= scale / tl.sqrt(tl.sum(q * q) + eps)
        read *= 1.0 / tl.sqrt(tl.sum(read * read) + eps)
        own = head * value_dim + v
        wanted = tl.load(value + row * strides[2] + own, mask=is_v, other=0.0).to(tl.float32)
        if by_channel:
            channel = gate + row * strides[3] + head * key_dim + k
            opened = tl.load(channel, mask=is_k, other=0.0).to(tl.float32)
            matrix *= tl.exp(rates * softplus(opened + biases))[:, None]
        else:
            opened = tl.load(gate + row * strides[3] + head).to(tl.float32)
            matrix *= tl.exp(rates * softplus(opened + biases))
        beta = beta_scale * tl.sigmoid(tl.load(rate_gate + row * strides[4] + head).to(tl.float32))
        change = beta * (wanted - tl.sum(matrix * read[:, None], 0))
        matrix += read[:, None] * change[None, :]
        result = tl.sum(matrix * q[:, None], 0)
        target = out + row * (value_heads * value_dim) + own
        tl.store(target, result.to(out.dtype.element_ty), mask=is_v)
    if slot >= 0:
        tl.debug_barrier()  # the slot may be the source, which other threads read
        tl.store(state + slot * size + place, matrix.to(state.dtype.element_ty), mask=mask)


def gated_delta(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    rule: DeltaRule,
    state: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """The results `[T, value_heads, value_dim]`, rounded once; it changes `state`.

    `rows` are queries and keys `[T, key_heads, key_dim]`, values `[T, value_heads, value_dim]`, the
    gate of decay `[T, value_heads]`, or `[T, value_heads * key_dim]` by channel, and that of the
    learning rate `[T, value_heads]`; the elements of a token lie next to each other. `state` is
    `[slots, value_heads, key_dim, value_dim]`.

    For a token, with `g = exp(rate * softplus(gate + bias))`, `b = beta_scale * sigmoid(...)`, and
    q and k divided by their norms: `S = g S`; `S = S + k (b (v - k S))`; the result is
    `q S / sqrt(key_dim)`.
    """
    _, key, value, _, _ = rows
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    count, (value_heads, key_dim, value_dim) = len(sequences.slots), state.shape[1:]
    if not count:
        return out
    block_k = triton.next_power_of_2(key_dim)
    block_v = min(triton.next_power_of_2(value_dim), max(1, _ELEMENTS // block_k))
    _recurrent_kernel[(count, value_heads, triton.cdiv(value_dim, block_v))](
        *rows,
        rule.rate,
        rule.bias,
        state,
        out,
        *sequences,
        tuple(part.stride(0) for part in rows),
        key_dim**-0.5,
        rule.eps,
        rule.beta_scale,
        key_heads=key.shape[1],
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        tiled_heads=rule.tiled_heads,
        by_channel=len(rule.bias) != value_heads,
        block_k=block_k,
        block_v=block_v,
        num_warps=min(4, max(1, block_k * block_v // 1024)),
    )
    return out
