"""Norms with a gate as one Triton kernel: a program normalises one group of a row."""

import torch
import triton
import triton.language as tl

from pyengine.kernels.sequences import silu


@triton.jit
def _kernel(  # noqa: PLR0913, PLR0917
    rows,
    gate,
    weight,
    out,
    row_stride,
    gate_stride,
    eps,
    groups: tl.constexpr,
    size: tl.constexpr,
    has_silu: tl.constexpr,
    gates_first: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = group * size + tl.arange(0, block)
    mask = tl.arange(0, block) < size
    value = tl.load(rows + row * row_stride + at, mask=mask, other=0.0).to(tl.float32)
    opened = tl.load(gate + row * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    opened = silu(opened) if has_silu else tl.sigmoid(opened)
    if gates_first:
        value *= opened
    value *= 1.0 / tl.sqrt(tl.sum(value * value) / size + eps)
    value *= tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    if not gates_first:
        value *= opened
    tl.store(out + (row * groups * size) + at, value.to(out.dtype.element_ty), mask=mask)


def gated_norm(  # noqa: PLR0913
    rows: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    size: int,
    eps: float,
    *,
    has_silu: bool = True,
    gates_first: bool = False,
) -> torch.Tensor:
    """`x / rms(x) * weight * activation(gate)` of rows `[N, width]`, rounded once.

    The norm is over groups of `size` elements, at most `LARGEST_ROW`. If it `gates_first`, rows are
    gated before it. `weight` is `[width]`; the elements of a row lie next to each other.
    """
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    if not rows.numel():
        return out
    block, groups = triton.next_power_of_2(size), rows.shape[1] // size
    _kernel[(len(rows), groups)](
        rows,
        gate,
        weight,
        out,
        rows.stride(0),
        gate.stride(0),
        eps,
        groups=groups,
        size=size,
        has_silu=has_silu,
        gates_first=gates_first,
        block=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out
