"""Products by weights in 8-bit floats (e4m3) on CUDA devices.

Each output of a weight has a scale. The rows become 8-bit floats too, each with its scale, and
torch multiplies both (`torch._scaled_mm`). Micikevicius et al. (2022), FP8 formats for deep
learning, arXiv:2209.05433.

Sums stay in the tensor cores (`use_fast_accum`), as in vLLM's kernels for Hopper and by default in
torchao's inference. Hopper keeps about 14 bits of such a sum; the other mode adds in float32 every
128 inputs, and is slower (pytorch#147971). Of 4,096 inputs, sums came out up to 2 % wrong
(DeepSeek-V3, arXiv:2412.19437, section 3.3.2); rounding a number to e4m3 is up to 6 % wrong.

Weights that have a scale for each square of 128 inputs and outputs, and experts, are multiplied by
the grouped product (`models/decoder/grouped.py`), which every such GPU has; torch's own product by
squares is for compute capability 9.0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pyengine.errors import ModelLoadError
from pyengine.models.decoder.checkpoint import Array, StoredTensor
from pyengine.models.decoder.grouped import grouped_linear
from pyengine.models.decoder.stored_weight import Weight
from pyengine.utils.host_copy import upload

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
OLDEST = (8, 9)
"""The compute capability from which on GPUs multiply 8-bit floats."""

_SQUARE = 128
"""Inputs and outputs of a weight with one scale."""
_MULTIPLE = 16
_TINY = 1e-12  # the minimum scale: rows of zeros stay zeros


def torch_multiplies(shape: Sequence[int]) -> bool:
    """True if torch multiplies by 8-bit floats of this shape, with a scale for each output."""
    return not any(size % _MULTIPLE for size in shape)


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[..., K]` in 8-bit floats, and their scales, float32 `[..., 1]`."""
    floats = rows.float()
    scales = floats.abs().amax(-1, keepdim=True).clamp_min(_TINY) / LARGEST
    return (floats / scales).to(DTYPE), scales


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """A matrix `[N, K]` in 8-bit floats, and its scales.

    Scales are float32 `[N, 1]`, `[N, K / 128]`, or, of squares, `[N / 128, K / 128]`, rounded up.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def has_row_scales(self) -> bool:
        """True if an output has a single scale."""
        return self.scales.shape == (len(self.codes), 1)


class Float8Product:
    """A matrix with a scale for each output, multiplied by torch: see `torch_multiplies`."""

    def __init__(self, weight: Float8Weight, bias: torch.Tensor | None) -> None:
        self.codes = weight.codes
        self.scales = weight.scales.reshape(1, -1).contiguous()
        # The only type of results that every supported torch has on every such GPU.
        self.bias = None if bias is None else bias.to(torch.bfloat16)

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Product.multiply`."""
        digits, units = quantise_rows(rows)
        result: torch.Tensor = torch._scaled_mm(
            digits,
            self.codes.t(),
            units,
            self.scales,
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return result.to(rows.dtype)


class Float8SquareProduct:
    """A matrix with scales of squares or of 128 inputs, multiplied as a separate group."""

    def __init__(self, weight: Float8Weight, bias: torch.Tensor | None) -> None:
        self.codes, self.scales = weight.codes[None], weight.scales[None]
        self.bias = None if bias is None else bias[None]

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Product.multiply`."""
        return grouped_linear(rows, self.codes, None, None, 1, self.bias, self.scales)


def float8_of_file(weight: Weight, device: torch.device) -> Float8Weight | None:
    """The codes and scales of a checkpoint; None: it has no 8-bit floats that kernels multiply by.

    Those of whole outputs are, and those of squares of 128. Raises `ModelLoadError` for codes or
    scales that are not finite numbers.
    """
    from pyengine.models.decoder.packed import PackedStored

    parts = [part for part in weight.parts if isinstance(part, PackedStored)]
    if weight.packed_as is None or len(parts) != len(weight.parts):
        return None
    blocks = {part.float8_block for part in parts}
    if len(blocks) != 1 or not blocks <= {(1, None), (_SQUARE, _SQUARE)}:
        return None
    codes, scales = zip(*(part.codes_and_scales() for part in parts), strict=True)
    whole, units = torch.from_numpy(np.concatenate(codes)), np.concatenate(scales)
    _check_finite(whole, units, weight.parts)
    if blocks == {(_SQUARE, _SQUARE)}:
        # Parts follow each other in squares unless one ends within a square.
        is_even = not any(part.shape[0] % _SQUARE for part in parts[:-1])
        units = units[::_SQUARE] if is_even else units
    else:
        units = units[:, :1]
    on_device = torch.empty_like(whole, device=device).copy_(whole)
    return Float8Weight(on_device.view(DTYPE), upload(units, device))


def _check_finite(codes: torch.Tensor, scales: Array, parts: Sequence[StoredTensor]) -> None:
    """Raise for codes that are NaN, which is 127 beside the sign, and for such scales."""
    if (codes & 127 == 127).any() or not np.isfinite(scales).all():
        names = ", ".join(part.name for part in parts)
        raise ModelLoadError(
            f"the weights {names} in {parts[0].path} hold NaN or infinity: the file is damaged, "
            "get it again"
        )
