"""Matrices of the CPU's kernel set: their layout, and their products by the Rust kernels."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.cpu import CpuAttention, PackedWeight, QuantizedWeight
from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.models.decoder.checkpoint import Array
from pyengine.models.decoder.kernels import Product
from pyengine.models.decoder.rotary import Floats
from pyengine.models.decoder.spec import MLP, Activation, ClampedGate
from pyengine.models.decoder.weights import Weight

_erf = np.frompyfunc(math.erf, 1, 1)


@dataclass(slots=True)
class CpuProduct:
    """A matrix in the layout of the Rust kernel, and its bias."""

    threads: CpuAttention
    packed: PackedWeight | QuantizedWeight
    bias: Floats | None = None

    def multiply(self, rows: Floats) -> Floats:
        """See `Product.multiply`."""
        rows = np.ascontiguousarray(rows)
        out = np.empty((len(rows), self.packed.out_features), np.float32)
        self.packed.multiply(self.threads, rows, out, self.bias)
        return out

    def gather(self, ids: npt.NDArray[np.int64]) -> Floats:
        """See `Table.gather`."""
        out = np.empty((len(ids), self.packed.in_features), np.float32)
        self.packed.gather(np.ascontiguousarray(ids), out)
        return out


@dataclass(slots=True)
class CpuJoinedProduct:
    """Products whose outputs follow each other: of weights in several formats."""

    products: list[CpuProduct]

    def multiply(self, rows: Floats) -> Floats:
        """See `Product.multiply`."""
        return np.concatenate([product.multiply(rows) for product in self.products], axis=1)


@dataclass(slots=True)
class CpuGate:
    """The gate and the other half of an MLP's first matrix, in one pass of the kernel."""

    threads: CpuAttention
    gate: Any
    up: Any
    activation: str

    def multiply(self, rows: Floats) -> Floats:
        """See `Kernels.inner_product`."""
        rows = np.ascontiguousarray(rows)
        out = np.empty((len(rows), self.up.out_features), np.float32)
        self.up.multiply_gated(self.threads, rows, self.gate, out, self.activation)
        return out


@dataclass(slots=True)
class CpuInnerProduct:
    """The first matrix of an MLP, and its activation."""

    product: Product
    mlp: MLP

    def multiply(self, rows: Floats) -> Floats:
        """See `Kernels.inner_product`."""
        return _activated(self.product.multiply(rows), self.mlp)


@dataclass(slots=True)
class CpuExperts:
    """Both products of every expert."""

    products: list[tuple[Product, Product]]

    def multiply(self, rows: Floats, chosen: npt.NDArray[np.intp], factors: Floats) -> Floats:
        """See `ExpertProducts.multiply`."""
        out = np.zeros_like(rows)
        for expert in np.unique(chosen).tolist():
            tokens, places = np.nonzero(chosen == expert)
            inner, down = self.products[expert]
            result = down.multiply(inner.multiply(rows[tokens]))
            out[tokens] += result * factors[tokens, places, None]
        return out


def laid_out(weight: Weight, quantization: str) -> PackedWeight | QuantizedWeight:
    """A matrix for the Rust kernel: floats, or bytes in a format that it multiplies by."""
    if weight.packed_as is None:
        if quantization != "none":
            return _rounded(weight, quantization)
        return PackedWeight(read_floats(weight))
    try:
        packed: PackedWeight | QuantizedWeight = weight.laid_out()
        return packed
    except ValueError as error:  # a scale that is not finite
        raise ModelLoadError(
            f"the weights {weight.name} in {weight.parts[0].path} are damaged: {error}; get them "
            "again"
        ) from error


def _rounded(weight: Weight, quantization: str) -> QuantizedWeight:
    """A matrix of floats, rounded to "int4" or "int8"."""
    import torch

    from pyengine.models.integer_linear import GROUP, q8_0, quantise_groups

    if weight.shape[1] % GROUP:
        raise ConfigurationError(
            f"quantization={quantization!r} has groups of {GROUP} inputs, and {weight.name} has "
            f"{weight.shape[1]}: leave quantization out"
        )
    floats = torch.from_numpy(read_floats(weight))
    if quantization == "int8":
        return q8_0(floats)
    arrays: list[Any] = [each.numpy() for each in quantise_groups(floats)]
    return QuantizedWeight.from_groups(*arrays, group_size=GROUP)


def read_floats(weight: Weight) -> Floats:
    """The numbers of a weight in float32; one tensor of the file is read at a time."""
    found = np.empty(weight.shape, np.float32)
    for rows, numbers, kind in weight.pieces():
        found[rows] = as_floats(numbers, kind)
    with np.errstate(all="ignore"):
        is_finite = np.isfinite(found.sum()) or np.isfinite(found).all()
    if not is_finite:
        raise ModelLoadError(
            f"the weights {weight.name} in {weight.parts[0].path} hold NaN or infinity: the file "
            "is damaged, get it again"
        )
    return found


def as_floats(numbers: Array, kind: str) -> Array:
    """Numbers of a file in a float type of NumPy."""
    if kind != "BF16":
        return numbers
    return (numbers.astype(np.uint32) << 16).view(np.float32)


def _activated(rows: Floats, mlp: MLP) -> Floats:
    """`activation(gate) * up` of rows `[T, 2 size]`, or the activation of each number."""
    if isinstance(mlp.activation, ClampedGate):
        limit = np.float32(mlp.activation.limit)
        gate, up = (rows[:, : mlp.size], rows[:, mlp.size :])
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return gate * sigmoid(gate * np.float32(mlp.activation.alpha)) * (up + 1)
    activation = _ACTIVATIONS[mlp.activation]
    if not mlp.is_gated:
        return activation(rows)
    return activation(rows[:, : mlp.size]) * rows[:, mlp.size :]


def sigmoid(rows: Floats) -> Floats:
    """Without overflow."""
    found: Floats = np.float32(0.5) * (1 + np.tanh(rows * np.float32(0.5)))
    return found


def _gelu(rows: Floats) -> Floats:
    shares = _erf(rows * np.float32(0.5**0.5)).astype(np.float32)
    found: Floats = rows * np.float32(0.5) * (1 + shares)
    return found


def _gelu_tanh(rows: Floats) -> Floats:
    inner = np.float32(math.sqrt(2 / math.pi)) * (rows + np.float32(0.044715) * rows**3)
    found: Floats = np.float32(0.5) * rows * (1 + np.tanh(inner))
    return found


_ACTIVATIONS: dict[Activation, Callable[[Floats], Floats]] = {
    "silu": lambda rows: rows * sigmoid(rows),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda rows: np.maximum(rows, 0),
    "relu2": lambda rows: np.square(np.maximum(rows, 0)),
}
