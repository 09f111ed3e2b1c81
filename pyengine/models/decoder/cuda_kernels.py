"""The kernel set of CUDA devices: torch, with fused kernels of ours (Triton).

Uncompiled, each operation of torch is a launch. So an addition and the norm after it are one kernel
of ours, and so is a gated activation. In a compiled graph both stay operations of torch, which the
compiler fuses with their neighbours; a kernel of ours would be opaque to it. Attention, with
rotation and KV write, and the products of experts are kernels of ours in both.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from pyengine import kernels
from pyengine.errors import ConfigurationError
from pyengine.models.decoder.cuda_states import CudaStates
from pyengine.models.decoder.float8 import (
    OLDEST,
    Float8Product,
    Float8SquareProduct,
    Float8Weight,
    float8_of_file,
    quantise_rows,
    torch_multiplies,
)
from pyengine.models.decoder.kernels import NormWeights, Product
from pyengine.models.decoder.spec import MLP, ClampedGate
from pyengine.models.decoder.stored_weight import Weight
from pyengine.models.decoder.torch_kernels import ExpertMatrices, TorchKernels


class CudaKernels(CudaStates, TorchKernels):
    """See `Kernels`. Without triton it is `TorchKernels`.

    Weights of checkpoints in 8-bit floats stay as they are where the GPU multiplies them. With
    `quantization` "fp8", floats are rounded to them, except those of the head and of routers.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Literal["none", "fp8"] = "none",
    ) -> None:
        super().__init__(device, dtype)
        self._has_kernels = kernels.has_kernels(device)
        self._has_float8 = self._has_kernels and _multiplies_float8(device)
        self._rounds = quantization == "fp8"
        self.rounded = 0
        """The matrices that were rounded."""

    def product(self, weight: Weight, bias: Weight | None) -> Product:
        """See `Kernels.product`."""
        matrix = self._float8(weight)
        if matrix is None:
            return super().product(weight, bias)
        kind = Float8Product if matrix.has_row_scales else Float8SquareProduct
        return kind(matrix, None if bias is None else self._read(bias))

    def matrices(self, weights: Sequence[Weight], bias: torch.Tensor | None) -> ExpertMatrices:
        """See `TorchKernels.matrices`."""
        first = self._float8(weights[0], is_grouped=True)
        if first is None:
            return super().matrices(weights, bias)
        count = len(weights)
        codes = first.codes.new_empty(count, *first.codes.shape)
        scales = first.scales.new_empty(count, *first.scales.shape)
        for index, weight in enumerate(weights):
            matrix = self._float8(weight, is_grouped=True)
            assert matrix is not None
            codes[index], scales[index] = matrix.codes, matrix.scales
        return ExpertMatrices(codes, bias, scales)

    def norm(self, rows: torch.Tensor, norm: NormWeights) -> torch.Tensor:
        """See `Kernels.norm`."""
        if not self._launches(norm):
            return super().norm(rows, norm)
        return _add_norm(rows, None, 1.0, norm)[1]

    def add_norm(
        self,
        stream: torch.Tensor,
        change: torch.Tensor | None,
        scale: float,
        norm: NormWeights | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernels.add_norm`."""
        if norm is None or not self._launches(norm):
            return super().add_norm(stream, change, scale, norm)
        return _add_norm(stream, change, scale, norm)

    def activated(self, rows: torch.Tensor, mlp: MLP) -> torch.Tensor:
        """See `TorchKernels.activated`."""
        if not mlp.is_gated or not self._launches():
            return super().activated(rows, mlp)
        from pyengine.kernels.gate import Gate, gated

        if isinstance(mlp.activation, ClampedGate):
            return gated(rows, Gate("clamped", mlp.activation.alpha, mlp.activation.limit))
        return gated(rows, Gate(mlp.activation))

    def _launches(self, norm: NormWeights | None = None) -> bool:
        """True if a Triton kernel computes the next operation."""
        if not self._has_kernels or torch.compiler.is_compiling():
            return False
        return norm is None or norm.size <= kernels.LARGEST_ROW

    def _float8(self, weight: Weight, *, is_grouped: bool = False) -> Float8Weight | None:
        """The matrix in 8-bit floats; None: it is multiplied in floats.

        If it `is_grouped`, it is that of an expert.
        """
        if not self._has_float8:
            return None
        fits = is_grouped or torch_multiplies(weight.shape)
        matrix = float8_of_file(weight, self.device)
        if matrix is not None:
            is_kept = fits or not matrix.has_row_scales
            self.keeps_formats |= is_kept
            return matrix if is_kept else None
        if self._rounds and fits and weight.packed_as is None:
            self.rounded += 1
            return Float8Weight(*quantise_rows(self._read(weight)))
        return None


def check_float8(device: torch.device) -> None:
    """Raise `ConfigurationError` for a device that does not multiply 8-bit floats."""
    if not _multiplies_float8(device):
        version = torch.cuda.get_device_capability(device)
        oldest, capability = (".".join(map(str, numbers)) for numbers in (OLDEST, version))
        raise ConfigurationError(
            f"quantization='fp8' needs a CUDA device of compute capability {oldest} or later, "
            f"{device} has {capability}: leave quantization out"
        )


def _multiplies_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= OLDEST


def _add_norm(
    rows: torch.Tensor, change: torch.Tensor | None, scale: float, norm: NormWeights
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.add_norm.add_norm` by a norm of the spec."""
    from pyengine.kernels.add_norm import RowNorm, add_norm

    spec = norm.norm
    own = RowNorm(norm.weight, norm.bias, spec.eps, spec.offset, spec.kind == "layer")
    return add_norm(rows, change, scale, own)
