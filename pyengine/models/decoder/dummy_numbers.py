"""Dummy weights: the same numbers in every process and on every device."""

import zlib
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np

from pyengine.models.decoder.checkpoint import Array, StoredTensor
from pyengine.utils.dtypes import rounded

_DIFFERENT = (1 << 20) - 3
"""Numbers after which they repeat: drawing more of them takes longer than a load.

A prime, so that no two rows of a matrix are the same.
"""


@cache
def numbers() -> Array:
    """Normally distributed numbers in float32, which all dummy tensors repeat."""
    return np.random.default_rng(0).standard_normal(_DIFFERENT, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class DummyStored(StoredTensor):
    """A tensor of dummy numbers: `numbers`, from `first` on, times `scale` plus `shift`.

    Those of a matrix are small enough that hidden states stay finite, those of a vector near 1.
    They are rounded to `dtype`: F32, BF16 or F16.
    """

    @property
    def first(self) -> int:
        """The index of its first number in `numbers`."""
        return zlib.crc32(f"{self.name} {self.start}".encode()) % _DIFFERENT

    @property
    def scale(self) -> float:
        """A factor on the numbers, in float32."""
        return float(np.float32(max(self.shape[-1], 1) ** -0.5))

    @property
    def shift(self) -> float:
        """Added to the numbers."""
        return 1.0 if len(self.shape) == 1 else 0.0

    def read(self) -> Array:
        """The tensor, BF16 as its bits."""
        count, floats = prod(self.shape), numbers()[self.first :]
        if count > len(floats):
            floats = np.concatenate((floats, numbers()[: self.first]))
        floats = floats[:count] * np.float32(self.scale) + np.float32(self.shift)
        array = np.resize(_in_format(floats, self.dtype), self.shape)
        return self.cut(array.T if self.is_transposed else array)


def _in_format(floats: Array, number_format: str) -> Array:
    if number_format == "BF16":
        return rounded(floats, np.uint16)
    return floats.astype(np.float16) if number_format == "F16" else floats
