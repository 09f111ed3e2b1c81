"""Weights of floats that are rounded to integers of 4 or 8 bits.

4 bits have a scale and a zero point for 32 inputs, 8 bits a scale (ggml's Q8_0). With 4 bits, the
head, and an embedding that is tied to it, have 8: its rounding shows in every log-probability.
"""

import numpy as np
import numpy.typing as npt

from pyengine.cpu import CpuAttention, QuantizedWeight, quantise_groups, quantise_q8_0
from pyengine.utils.dtypes import Rows

GROUP = 32
_BYTES = 2 + GROUP
"""Bytes of a group in Q8_0: a float16 scale, and the integers."""


def int4(weight: Rows, threads: CpuAttention) -> QuantizedWeight:
    """A weight in 4 bits: `(code - zero) * scale` in groups of 32 inputs.

    `weight` is float32, or bfloat16 as its bits, `[outputs, inputs]`; `threads` round it.
    """
    outputs, inputs = weight.shape
    codes = np.empty((outputs, inputs // 2), np.uint8)
    scales = np.empty((outputs, inputs // GROUP), np.float32)
    zeros = np.empty((outputs, inputs // GROUP), np.uint8)
    quantise_groups(threads, weight, codes, scales, zeros)
    return QuantizedWeight.from_groups(codes, scales, zeros, group_size=GROUP)


def q8_0(weight: Rows, threads: CpuAttention) -> QuantizedWeight:
    """A weight in ggml's Q8_0: 8 bits, and a float16 scale for 32 inputs. Otherwise as `int4`."""
    outputs, inputs = weight.shape
    blocks = _blocks(outputs, inputs)
    quantise_q8_0(threads, weight, blocks)
    return QuantizedWeight("Q8_0", blocks.reshape(-1).data, outputs, inputs)


def q8_0_of_rows(numbers: npt.NDArray[np.int8], scales: npt.NDArray[np.float32]) -> QuantizedWeight:
    """The same from int8 `[N, K]` and a scale for each output, `[N, 1]`, rounded to float16."""
    outputs, inputs = numbers.shape
    blocks = _blocks(outputs, inputs)
    with np.errstate(over="ignore", under="ignore"):  # infinite scales are refused below
        halves = np.ascontiguousarray(scales.astype(np.float16))
    blocks[..., :2] = halves.view(np.uint8)[:, None]
    blocks[..., 2:] = numbers.view(np.uint8).reshape(outputs, -1, GROUP)
    return QuantizedWeight("Q8_0", blocks.reshape(-1).data, outputs, inputs)


def _blocks(outputs: int, inputs: int) -> npt.NDArray[np.uint8]:
    """Memory for the blocks of Q8_0."""
    return np.empty((outputs, inputs // GROUP, _BYTES), np.uint8)
