"""Element types by name, and arrays of them in host memory.

NumPy has no bfloat16 and no 8-bit floats: arrays hold their bits in uint16 and uint8.
"""

from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

DType: TypeAlias = Literal["float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int8"]
"""Torch's name of an element type of weights, activations, or a KV cache."""

Rows: TypeAlias = npt.NDArray[Any]
"""An array of floats; uint16 stands for bfloat16."""

STORED: dict[DType, type[Any]] = {
    "float32": np.float32,
    "bfloat16": np.uint16,
    "float16": np.float16,
    "float64": np.float64,
    "float8_e4m3fn": np.uint8,
    "int8": np.int8,
}
"""The NumPy type of an array of each."""


def itemsize(dtype: DType) -> int:
    """Bytes of a number."""
    return np.dtype(STORED[dtype]).itemsize


def dtype_of(dtype: "DType | torch.dtype") -> DType:
    """The name of an element type of torch, or the name itself."""
    name = str(dtype).removeprefix("torch.")
    return next(known for known in STORED if known == name)


def torch_dtype(dtype: DType) -> "torch.dtype":
    """The element type of torch, which is imported."""
    import torch

    element_type: torch.dtype = getattr(torch, dtype)
    return element_type


def widened(rows: Rows) -> npt.NDArray[np.float32]:
    """The same numbers in float32; without a copy if they are."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.astype(np.float32, copy=False)


def rounded(floats: npt.NDArray[np.float32], kind: type[Any]) -> Rows:
    """float32 numbers in float32, or rounded to bfloat16: to the nearest, ties to even."""
    if kind is not np.uint16:
        return floats
    bits = np.ascontiguousarray(floats, np.float32).view(np.uint32)
    nearest = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    bfloat16: Rows = np.where(np.isnan(floats), (bits >> 16) | 0x40, nearest).astype(np.uint16)
    return bfloat16


def float8_numbers(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The numbers of 8-bit floats (e4m3fn: no infinity, NaN at 0x7f and 0xff), in float32."""
    numbers: npt.NDArray[np.float32] = _float8_table()[codes]
    return numbers


@cache
def _float8_table() -> npt.NDArray[np.float32]:
    codes = np.arange(256)
    exponent, digits = (codes >> 3) & 15, codes & 7
    numbers = np.where(exponent == 0, digits * 2.0**-9, (8 + digits) * 2.0 ** (exponent - 10))
    numbers[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes >= 128, -numbers, numbers).astype(np.float32)
