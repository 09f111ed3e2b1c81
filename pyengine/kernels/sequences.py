"""The sequences of a step, for kernels of recurrent layers, and functions that these share."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

FEW_TOKENS = 8
"""Tokens of a sequence up to which they are taken one after the other, and beyond which in chunks.

So a token has the same bits beside other sequences' decodes and prefills.
"""

PRODUCT = tl.constexpr("tf32")
"""The type of products in chunks: more bits than 16-bit rows have. Sums are float32."""
STATE_ELEMENTS = 4096
"""Of a program's part of a state."""


class Sequences(NamedTuple):
    """B sequences, whose tokens follow each other; tensors on the device of the kernels.

    - `starts`: int32 `[B + 1]`, where each sequence's tokens begin; the last is their number.
    - `sources`: int64 `[B]`, the slot of the state before a sequence's first token; -1: zeros.
    - `slots`: int64 `[B]`, the slot for the state after its last token; -1: it is not kept.

    A slot is written by one sequence at most, and what one sequence writes no other one reads.
    """

    starts: torch.Tensor
    sources: torch.Tensor
    slots: torch.Tensor


@triton.jit
def softplus(x):
    """`log(1 + exp(x))` of float32, accurate where the exponential is small."""
    small = tl.exp(-tl.abs(x))
    whole = 1.0 + small
    # log(1 + e) is e where 1 + e is 1; elsewhere the rounding of 1 + e is divided out.
    rest = tl.where(whole == 1.0, 1.0, whole - 1.0)
    return tl.maximum(x, 0.0) + tl.where(whole == 1.0, small, tl.log(whole) * small / rest)


@triton.jit
def silu(x):
    """`x * sigmoid(x)`."""
    return x * tl.sigmoid(x)
