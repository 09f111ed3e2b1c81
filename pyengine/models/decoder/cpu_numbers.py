"""Numbers of the CPU's kernel set: float32, and bfloat16, which NumPy lacks, as its bits."""

from typing import Any, Literal

import numpy as np

from pyengine.errors import ModelLoadError
from pyengine.models.decoder.checkpoint import Array
from pyengine.models.decoder.stored_weight import Weight
from pyengine.utils.dtypes import Rows, rounded, widened

Dtype = Literal["float32", "bfloat16"]
NUMPY: dict[Dtype, type[Any]] = {"float32": np.float32, "bfloat16": np.uint16}
_AT_ONCE = 1 << 20
"""Numbers that are converted at once."""
_INFINITY = 0x7F80
"""Bits of bfloat16 that are all set in numbers that are not finite."""


def as_floats(numbers: Array, kind: str) -> Array:
    """Numbers of a file in a float type of NumPy."""
    return widened(numbers) if kind == "BF16" else numbers


def read(weight: Weight, dtype: Dtype = "float32") -> Rows:
    """The numbers of a weight; one tensor of the file is read at a time.

    Raises `ModelLoadError` for numbers that are not finite.
    """
    array = np.empty(weight.shape, NUMPY[dtype])
    for rows, numbers, kind in weight.pieces():
        target = array[rows]
        if dtype == "float32" or kind == "BF16":
            target[...] = as_floats(numbers, kind) if dtype == "float32" else numbers
            continue
        step = max(1, _AT_ONCE * len(target) // max(1, target.size))
        for start in range(0, len(target), step):
            floats = numbers[start : start + step].astype(np.float32)
            target[start : start + step] = rounded(floats, np.uint16)
    if not _is_finite(array):
        raise ModelLoadError(
            f"the weights {weight.name} in {weight.parts[0].path} hold NaN or infinity, in "
            f"{dtype}: the file is damaged, get it again, or take another dtype"
        )
    return array


def _is_finite(numbers: Rows) -> bool:
    if numbers.dtype == np.uint16:
        flat = numbers.reshape(-1)
        starts = range(0, flat.size, _AT_ONCE)
        parts = (flat[start : start + _AT_ONCE] & 0x7FFF for start in starts)
        return all(int(part.max()) < _INFINITY for part in parts)
    with np.errstate(all="ignore"):
        return bool(np.isfinite(numbers.sum()) or np.isfinite(numbers).all())
