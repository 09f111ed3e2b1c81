"""Norm, rotary embedding and KV write as one Triton kernel.

A program turns one head of a token: a query, or a key, whose value it writes, too.
"""

import torch
import triton
import triton.language as tl

from pyengine.kernels.kv_write import Pair, is_finite, store_limited
from pyengine.kernels.rope import Rotation

_WARPS = 1
"""Of a program: a head has some hundred numbers at most."""


@triton.jit
def _turn(  # noqa: PLR0913, PLR0917
    source,
    step,
    weight,
    angles,
    target,
    eps,
    inverse_scale,
    is_whole,
    dim: tl.constexpr,
    half: tl.constexpr,
    stride: tl.constexpr,
    gap: tl.constexpr,
    offset: tl.constexpr,
    block_half: tl.constexpr,
    block_rest: tl.constexpr,
    largest: tl.constexpr,
) -> None:
    """A head at `source`, whose numbers lie `step` apart, to `target`, where they lie in a row.

    All of them become NaN unless `is_whole`.
    """
    pair = tl.arange(0, block_half)
    turns = pair < half
    first_at, second_at = pair * stride, pair * stride + gap
    first = tl.load(source + first_at * step, mask=turns, other=0.0).to(tl.float32)
    second = tl.load(source + second_at * step, mask=turns, other=0.0).to(tl.float32)
    rest_at = 2 * half + tl.arange(0, block_rest)
    stays = rest_at < dim
    rest = tl.load(source + rest_at * step, mask=stays, other=0.0).to(tl.float32)
    if weight is not None:
        total = tl.sum(first * first) + tl.sum(second * second) + tl.sum(rest * rest)
        factor = 1.0 / tl.sqrt(total / dim + eps)
        first_weight = tl.load(weight + first_at, mask=turns, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + second_at, mask=turns, other=0.0).to(tl.float32)
        rest_weight = tl.load(weight + rest_at, mask=stays, other=0.0).to(tl.float32)
        first = first * factor * (offset + first_weight)
        second = second * factor * (offset + second_weight)
        rest = rest * factor * (offset + rest_weight)
    cos = tl.load(angles[0] + pair * angles[2], mask=turns, other=0.0).to(tl.float32)
    sin = tl.load(angles[1] + pair * angles[3], mask=turns, other=0.0).to(tl.float32)
    turned = tl.where(is_whole, first * cos - second * sin, float("nan"))
    store_limited(target + first_at, turned, turns, inverse_scale, largest)
    turned = tl.where(is_whole, second * cos + first * sin, float("nan"))
    store_limited(target + second_at, turned, turns, inverse_scale, largest)
    rest = tl.where(is_whole, rest, float("nan"))
    store_limited(target + rest_at, rest, stays, inverse_scale, largest)


@triton.jit
def _kernel(  # noqa: PLR0913, PLR0917
    query,
    key,
    value,
    out,
    key_cache,
    value_cache,
    slots,
    cos,
    sin,
    query_weight,
    key_weight,
    query_strides,
    key_strides,
    value_strides,
    cos_strides,
    sin_strides,
    inverse_scales,
    eps,
    query_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim_k: tl.constexpr,
    dim_v: tl.constexpr,
    half: tl.constexpr,
    stride: tl.constexpr,
    gap: tl.constexpr,
    angle_step: tl.constexpr,
    offset: tl.constexpr,
    block_half: tl.constexpr,
    block_rest: tl.constexpr,
    block_v: tl.constexpr,
    largest: tl.constexpr,
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles = (
        cos + token * cos_strides[0],
        sin + token * sin_strides[0],
        cos_strides[1] * angle_step,
        sin_strides[1] * angle_step,
    )
    if head < query_heads:
        source = query + token * query_strides[0] + head * query_strides[1]
        target = out + (token * query_heads + head) * dim_k
        _turn(
            source, query_strides[2], query_weight, angles, target, eps, 1.0, True,
            dim_k, half, stride, gap, offset, block_half, block_rest, 0.0,
        )  # fmt: skip
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            kv_head = head - query_heads
            at = tl.arange(0, block_v)
            source = value + token * value_strides[0] + kv_head * value_strides[1]
            row = tl.load(source + at * value_strides[2], mask=at < dim_v, other=0.0)
            row = row.to(tl.float32)
            finite = is_finite(row)
            target = value_cache + (slot * kv_heads + kv_head) * dim_v
            row = tl.where(finite, row, 0.0)
            store_limited(target + at, row, at < dim_v, inverse_scales[1], largest)
            source = key + token * key_strides[0] + kv_head * key_strides[1]
            target = key_cache + (slot * kv_heads + kv_head) * dim_k
            is_whole = tl.min(finite.to(tl.int32)) > 0
            _turn(
                source, key_strides[2], key_weight, angles, target, eps, inverse_scales[0],
                is_whole, dim_k, half, stride, gap, offset, block_half, block_rest, largest,
            )  # fmt: skip


def write_rotated(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    caches: Pair,
    slots: torch.Tensor,
    rotation: Rotation,
    scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """Turn `rows`, write keys and values to their slots, return the queries.

    `rows` are a query `[T, query_heads, d]`, a key `[T, kv_heads, d]` and a value
    `[T, kv_heads, head_dim_v]` of any strides; what is returned is contiguous. Caches, slots and
    scales are as in `kv_write_kernel.write_rows`; a row whose slot is -1 has a query alone.
    """
    (query, key, value), (key_cache, value_cache) = rows, caches
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not len(slots):
        return out
    num_tokens, query_heads, dim = query.shape
    kv_heads, layout, norm = key.shape[1], rotation.layout, rotation.norm
    half, in_halves = layout.size // 2, layout.order == "halves"
    dtype = key_cache.dtype
    _kernel[(num_tokens, query_heads + kv_heads)](
        query,
        key,
        value,
        out,
        key_cache,
        value_cache,
        slots,
        rotation.cos,
        rotation.sin,
        None if norm is None else norm.query_weight,
        None if norm is None else norm.key_weight,
        *(tuple(row.stride()) for row in (*rows, rotation.cos, rotation.sin)),
        tuple(1.0 / scale for scale in scales),
        0.0 if norm is None else norm.eps,
        query_heads=query_heads,
        kv_heads=kv_heads,
        dim_k=dim,
        dim_v=value.shape[2],
        half=half,
        stride=1 if in_halves else 2,
        gap=half if in_halves else 1,
        angle_step=layout.step,
        offset=0.0 if norm is None else norm.offset,
        block_half=triton.next_power_of_2(half),
        block_rest=triton.next_power_of_2(max(1, dim - layout.size)),
        block_v=triton.next_power_of_2(value.shape[2]),
        largest=torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0,
        num_warps=_WARPS,
    )
    return out
