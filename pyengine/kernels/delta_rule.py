"""The gated delta rule (arXiv:2412.06464, and by channel arXiv:2510.26692) as Triton kernels.

A program has some columns of a head's state in registers. Short sequences, decodes, and rows in
float32 are taken a token after the other; longer sequences a chunk after the other, by the WY
representation of Yang et al. Chunks begin at a sequence's first token in the step: how a prompt is
divided into steps changes results by rounding.

Sizes of tiles are estimates: they have not been measured on a GPU.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pyengine.kernels.sequences import FEW_TOKENS, PRODUCT, STATE_ELEMENTS, Sequences, softplus

_CHUNK = 16
"""Tokens. With more, or with products in float32, a program needs more registers than there are."""


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


@triton.jit(do_not_specialize=["longest"])
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
    longest,
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
    if end - begin <= longest:
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
            beta = beta_scale * tl.sigmoid(
                tl.load(rate_gate + row * strides[4] + head).to(tl.float32)
            )
            change = beta * (wanted - tl.sum(matrix * read[:, None], 0))
            matrix += read[:, None] * change[None, :]
            result = tl.sum(matrix * q[:, None], 0)
            target = out + row * (value_heads * value_dim) + own
            tl.store(target, result.to(out.dtype.element_ty), mask=is_v)
        if slot >= 0:
            tl.debug_barrier()  # the slot may be the source, which other threads read
            tl.store(state + slot * size + place, matrix.to(state.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["longest"])
def _chunked_kernel(  # noqa: PLR0913, PLR0915, PLR0917
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
    longest,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    tiled_heads: tl.constexpr,
    by_channel: tl.constexpr,
    block_k: tl.constexpr,
    block_v: tl.constexpr,
    chunk: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    if end - begin > longest:
        source, slot = tl.load(sources + sequence), tl.load(slots + sequence)
        key_head = head % key_heads if tiled_heads else head // (value_heads // key_heads)
        k = tl.arange(0, block_k)
        v = tl.program_id(2) * block_v + tl.arange(0, block_v)
        is_k, is_v = k < key_dim, v < value_dim
        # The state is transposed here: its part is the large operand of products.
        mask = is_v[:, None] & is_k[None, :]
        place = (head * key_dim + k[None, :]) * value_dim + v[:, None]
        size: tl.constexpr = value_heads * key_dim * value_dim
        matrix = tl.zeros((block_v, block_k), dtype=tl.float32)
        if source >= 0:
            matrix = tl.load(state + source * size + place, mask=mask, other=0.0).to(tl.float32)
        rates = tl.load(rate + head)
        i = tl.arange(0, chunk)
        for first in range(begin, end, chunk):
            token = tl.cast(first, tl.int64) + i
            is_own = token < end
            pairs = tl.zeros((chunk, chunk), dtype=tl.float32)
            reads = tl.zeros((chunk, chunk), dtype=tl.float32)
            key_norm = tl.zeros((chunk,), dtype=tl.float32)
            query_norm = tl.zeros((chunk,), dtype=tl.float32)
            for d in range(0, key_dim, block_d):
                channel = d + tl.arange(0, block_d)
                at = key_head * key_dim + channel[None, :]
                is_d = is_own[:, None] & (channel < key_dim)[None, :]
                own = tl.load(key + token[:, None] * strides[1] + at, mask=is_d, other=0.0)
                q = tl.load(query + token[:, None] * strides[0] + at, mask=is_d, other=0.0)
                own, q = own.to(tl.float32), q.to(tl.float32)
                key_norm += tl.sum(own * own, 1)
                query_norm += tl.sum(q * q, 1)
                if by_channel:
                    at = head * key_dim + channel
                    total = tl.cumsum(_logs(gate, bias, rates, token, strides[3], at, is_d), 0)
                    ratio = tl.exp(tl.minimum(total[:, None, :] - total[None, :, :], 0.0))
                    ratio *= own[None, :, :]
                    pairs += tl.sum(own[:, None, :] * ratio, 2)
                    reads += tl.sum(q[:, None, :] * ratio, 2)
                else:
                    pairs = tl.dot(own, tl.trans(own), pairs, input_precision=PRODUCT)
                    reads = tl.dot(q, tl.trans(own), reads, input_precision=PRODUCT)
            key_norm = 1.0 / tl.sqrt(key_norm + eps)
            query_norm = scale / tl.sqrt(query_norm + eps)
            beta = tl.load(rate_gate + token * strides[4] + head, mask=is_own, other=0.0)
            beta = tl.where(is_own, beta_scale * tl.sigmoid(beta.to(tl.float32)), 0.0)
            if by_channel:
                at, is_key = head * key_dim + k, is_own[:, None] & is_k[None, :]
                logs = _logs(gate, bias, rates, token, strides[3], at, is_key)
                total, last = tl.cumsum(logs, 0), tl.sum(logs, 0)[None, :]
            else:
                opened = tl.load(gate + token * strides[3] + head, mask=is_own, other=0.0)
                logs = rates * softplus(opened.to(tl.float32) + tl.load(bias + head))
                logs = tl.where(is_own, logs, 0.0)
                total, last = tl.cumsum(logs, 0)[:, None], tl.sum(logs, 0)
                ratio = tl.exp(tl.minimum(total - tl.trans(total), 0.0))
                pairs *= ratio
                reads *= ratio
            pairs *= key_norm[:, None] * key_norm[None, :]
            reads *= query_norm[:, None] * key_norm[None, :]
            # The changes U of the state solve (1 + A) U = beta (V - K S), where S has decayed, and
            # A, below its diagonal, are the products of keys with a learning rate and a decay.
            lower = tl.where(i[:, None] > i[None, :], -beta[:, None] * pairs, 0.0)
            inverse = lower
            for row in range(1, chunk):
                above = tl.sum(tl.where(i[:, None] == row, lower, 0.0), 0)
                above += tl.sum(above[:, None] * inverse, 0)
                inverse = tl.where(i[:, None] == row, above[None, :], inverse)
            inverse += tl.where(i[:, None] == i[None, :], 1.0, 0.0)
            reads = tl.where(i[:, None] >= i[None, :], reads, 0.0)
            is_key = is_own[:, None] & is_k[None, :]
            at = key_head * key_dim + k[None, :]
            own = tl.load(key + token[:, None] * strides[1] + at, mask=is_key, other=0.0)
            own = own.to(tl.float32) * key_norm[:, None]
            until = tl.trans(own * tl.exp(total))
            is_value = is_v[:, None] & is_own[None, :]
            at = head * value_dim + v[:, None]
            wanted = tl.load(value + token[None, :] * strides[2] + at, mask=is_value, other=0.0)
            known = tl.dot(matrix, until, input_precision=PRODUCT)
            change = beta[None, :] * (wanted.to(tl.float32) - known)
            change = tl.dot(change, tl.trans(inverse), input_precision=PRODUCT)
            at = key_head * key_dim + k[None, :]
            q = tl.load(query + token[:, None] * strides[0] + at, mask=is_key, other=0.0)
            q = q.to(tl.float32) * query_norm[:, None] * tl.exp(total)
            result = tl.dot(matrix, tl.trans(q), input_precision=PRODUCT)
            result = tl.dot(change, tl.trans(reads), result, input_precision=PRODUCT)
            at = head * value_dim + v[:, None]
            target = out + token[None, :] * (value_heads * value_dim) + at
            tl.store(target, result.to(out.dtype.element_ty), mask=is_value)
            after = own * tl.exp(last - total)
            matrix = tl.dot(change, after, tl.exp(last) * matrix, input_precision=PRODUCT)
        if slot >= 0:
            tl.debug_barrier()  # the slot may be the source, which other threads read
            tl.store(state + slot * size + place, matrix.to(state.dtype.element_ty), mask=mask)


@triton.jit
def _logs(gate, bias, rate, token, stride, at, mask):  # noqa: PLR0913, PLR0917
    """The logarithms of decays of tokens at some channels; zeros outside of the mask."""
    opened = tl.load(gate + token[:, None] * stride + at[None, :], mask=mask, other=0.0)
    biases = tl.load(bias + at[None, :], mask=mask, other=0.0)
    return tl.where(mask, rate * softplus(opened.to(tl.float32) + biases), 0.0)


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
    num_tokens, block_k = len(value), triton.next_power_of_2(key_dim)
    block_v = min(triton.next_power_of_2(value_dim), max(1, STATE_ELEMENTS // block_k))
    arguments = (
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
    )
    sizes = {
        "key_heads": key.shape[1],
        "value_heads": value_heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "tiled_heads": rule.tiled_heads,
        "by_channel": len(rule.bias) != value_heads,
    }
    has_chunks = value.itemsize == 2 and num_tokens > max(count, FEW_TOKENS)
    _recurrent_kernel[(count, value_heads, triton.cdiv(value_dim, block_v))](
        *arguments,
        FEW_TOKENS if has_chunks else num_tokens,
        **sizes,
        block_k=block_k,
        block_v=block_v,
        num_warps=min(4, max(1, block_k * block_v // 1024)),
    )
    if has_chunks:
        block_k, block_v = max(16, block_k), max(16, block_v)
        _chunked_kernel[(count, value_heads, triton.cdiv(value_dim, block_v))](
            *arguments,
            FEW_TOKENS,
            **sizes,
            block_k=block_k,
            block_v=block_v,
            chunk=_CHUNK,
            block_d=16,
            num_warps=4,
        )
    return out
