"""Sum and norm of rows as one Triton kernel: a program normalises one row."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class RowNorm(NamedTuple):
    """A norm over the last axis: `x / rms(x) * (offset + weight) + bias`.

    `eps` is added under the root. If it `is_centred`, the mean is subtracted first. `weight` and
    `bias` are contiguous.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    offset: float
    is_centred: bool


@triton.jit
def _kernel(  # noqa: PLR0913, PLR0917
    rows,
    change,
    weight,
    bias,
    total,
    out,
    row_strides,
    change_strides,
    scale,
    eps,
    heads: tl.constexpr,
    size: tl.constexpr,
    offset: tl.constexpr,
    is_centred: tl.constexpr,
    block: tl.constexpr,
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, block)
    mask = at < size
    target = (token * heads + head) * size + at
    source = rows + token * row_strides[0] + head * row_strides[1] + at * row_strides[2]
    row = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if change is not None:
        source = change + token * change_strides[0] + head * change_strides[1]
        added = tl.load(source + at * change_strides[2], mask=mask, other=0.0).to(tl.float32)
        rounded = (row + scale * added).to(total.dtype.element_ty)
        tl.store(total + target, rounded, mask=mask)
        row = rounded.to(tl.float32)
    if is_centred:
        row = tl.where(mask, row - tl.sum(row) / size, 0.0)
    row *= 1.0 / tl.sqrt(tl.sum(row * row) / size + eps)
    if weight is not None:
        row *= offset + tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        row += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + target, row.to(out.dtype.element_ty), mask=mask)


def add_norm(
    rows: torch.Tensor, change: torch.Tensor | None, scale: float, norm: RowNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows + scale * change`, and that normalised; both rounded once, and contiguous.

    Rows are `[T, size]` or `[T, heads, size]`, of any strides, with at most `LARGEST_ROW` elements.
    Without a change the first result is `rows` itself.
    """
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    total = rows if change is None else torch.empty_like(out)
    if not rows.numel():
        return total, out
    size = rows.shape[-1]
    heads = rows.shape[1] if rows.dim() == 3 else 1
    block = triton.next_power_of_2(size)
    _kernel[(len(rows), heads)](
        rows,
        change,
        norm.weight,
        norm.bias,
        None if change is None else total,
        out,
        _strides(rows),
        (0, 0, 0) if change is None else _strides(change),
        scale,
        norm.eps,
        heads=heads,
        size=size,
        offset=norm.offset,
        is_centred=norm.is_centred,
        block=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return total, out


def _strides(rows: torch.Tensor) -> tuple[int, ...]:
    """Those of `[T, heads, size]`."""
    strides = rows.stride()
    return strides if len(strides) == 3 else (strides[0], 0, strides[1])
