"""The KV write as one Triton kernel: a program per token, keys and values."""

import torch
import triton
import triton.language as tl


@triton.jit
def is_finite(row):
    """True for each number in float32 that is neither NaN nor infinite."""
    return tl.abs(row) < float("inf")


@triton.jit
def store_limited(target, row, mask, inverse_scale, largest: tl.constexpr) -> None:
    """Store float32 numbers; in 8-bit floats divided by their scale and limited to `largest`."""
    if largest > 0:
        row = tl.where(is_finite(row), row, float("nan")) * inverse_scale
        row = tl.clamp(row, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
    tl.store(target, row.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _kernel(  # noqa: PLR0913, PLR0917
    key,
    value,
    key_cache,
    value_cache,
    slots,
    key_strides,
    value_strides,
    inverse_scales,
    heads: tl.constexpr,
    dim_k: tl.constexpr,
    dim_v: tl.constexpr,
    block_heads: tl.constexpr,
    block_k: tl.constexpr,
    block_v: tl.constexpr,
    largest: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        head = tl.arange(0, block_heads)[:, None]
        at = tl.arange(0, block_v)[None, :]
        source = token * value_strides[0] + head * value_strides[1] + at * value_strides[2]
        mask = (head < heads) & (at < dim_v)
        row = tl.load(value + source, mask=mask, other=0.0).to(tl.float32)
        finite = is_finite(row)
        target = value_cache + (slot * heads + head) * dim_v + at
        store_limited(target, tl.where(finite, row, 0.0), mask, inverse_scales[1], largest)
        is_whole = tl.min(finite.to(tl.int32), 1)[:, None] > 0
        at = tl.arange(0, block_k)[None, :]
        source = token * key_strides[0] + head * key_strides[1] + at * key_strides[2]
        mask = (head < heads) & (at < dim_k)
        row = tl.load(key + source, mask=mask, other=0.0).to(tl.float32)
        target = key_cache + (slot * heads + head) * dim_k + at
        store_limited(
            target, tl.where(is_whole, row, float("nan")), mask, inverse_scales[0], largest
        )


Pair = tuple[torch.Tensor, torch.Tensor]


def write_rows(
    rows: Pair, caches: Pair, slots: torch.Tensor, scales: tuple[float, float] = (1.0, 1.0)
) -> None:
    """Write keys and values to their slots; a row whose slot is -1 is left out.

    `rows` are `[T, kv_heads, head_dim]` of any strides, `caches` the contiguous tensors of a
    `KVPool`, `[blocks, block_size, kv_heads, head_dim]`, `slots` int64 `[T]`. A cache of 8-bit
    floats takes rows divided by their scale, limited to what the type holds. Values are finite in
    the cache, and a key is NaN whose value was not (`KVPool.write`).
    """
    (key, value), (key_cache, value_cache) = rows, caches
    if not len(slots):
        return
    (heads, dim_k), dim_v = key.shape[1:], value.shape[2]
    dtype = key_cache.dtype
    _kernel[(len(slots),)](
        key,
        value,
        key_cache,
        value_cache,
        slots,
        tuple(key.stride()),
        tuple(value.stride()),
        tuple(1.0 / scale for scale in scales),
        heads=heads,
        dim_k=dim_k,
        dim_v=dim_v,
        block_heads=triton.next_power_of_2(heads),
        block_k=triton.next_power_of_2(dim_k),
        block_v=triton.next_power_of_2(dim_v),
        largest=torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0,
    )
