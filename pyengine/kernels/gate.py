"""Gated activations as one Triton kernel."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_BLOCK = 1024


class Gate(NamedTuple):
    """`activation(gate) * up`.

    Activations are "silu", "gelu", "gelu_tanh", "relu", "relu2"; or "clamped", GPT-OSS's
    `gate * sigmoid(alpha * gate) * (up + 1)`, with both clamped to `limit` first.
    """

    activation: str
    alpha: float = 0.0
    limit: float = 0.0


@triton.jit
def _kernel(  # noqa: PLR0913, PLR0917
    rows,
    out,
    row_stride,
    size: tl.constexpr,
    activation: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    block: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    mask = at < size
    source = rows + token * row_stride + at
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=mask, other=0.0).to(tl.float32)
    if activation == "clamped":
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
        gate *= tl.sigmoid(alpha * gate)
    elif activation == "silu":
        gate *= tl.sigmoid(gate)
    elif activation == "gelu":
        gate *= 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif activation == "gelu_tanh":  # (1 + tanh(x)) / 2 is sigmoid(2 x)
        gate *= tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if activation == "relu2":
            gate *= gate
    result = gate * up
    tl.store(out + token * size + at, result.to(out.dtype.element_ty), mask=mask)


def gated(rows: torch.Tensor, gate: Gate) -> torch.Tensor:
    """The products `[T, size]` of rows `[T, 2 size]`, gates first; rounded once.

    The elements of a row lie next to each other.
    """
    size = rows.shape[1] // 2
    out = rows.new_empty(len(rows), size)
    if not out.numel():
        return out
    _kernel[(len(rows), -(-size // _BLOCK))](
        rows,
        out,
        rows.stride(0),
        size=size,
        activation=gate.activation,
        alpha=gate.alpha,
        limit=gate.limit,
        block=min(_BLOCK, triton.next_power_of_2(size)),
        num_warps=4,
    )
    return out
