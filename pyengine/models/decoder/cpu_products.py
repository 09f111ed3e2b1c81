"""Matrices of the CPU's kernel set: their layout, and their products by the Rust kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import ref

import numpy as np
import numpy.typing as npt

from pyengine.cpu import CpuAttention, PackedWeight, QuantizedWeight, gate_rows, map_rows
from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.models.decoder.cpu_numbers import NUMPY, Dtype, read
from pyengine.models.decoder.kernels import Product
from pyengine.models.decoder.rotary import Floats
from pyengine.models.decoder.spec import MLP, ClampedGate
from pyengine.models.decoder.stored_weight import Weight
from pyengine.models.integer_linear import GROUP, int4, q8_0
from pyengine.utils.dtypes import Rows, rounded, widened

_REUSED = 64 << 20  # bytes of results that are kept: 64 rows of 262,144 logits in float32


@dataclass(frozen=True, slots=True)
class OrderedWeight:
    """A quantised weight whose inputs are in another order: `order` are their numbers."""

    packed: QuantizedWeight
    order: npt.NDArray[np.int64]

    @property
    def out_features(self) -> int:
        """Length of a row of the output."""
        return self.packed.out_features

    @property
    def in_features(self) -> int:
        """Length of a row of the input."""
        return self.packed.in_features

    def multiply(
        self, threads: CpuAttention, rows: Rows, out: Rows, bias: Floats | None = None
    ) -> None:
        """See `QuantizedWeight.multiply`."""
        self.packed.multiply(threads, rows.take(self.order, axis=1), out, bias)

    def gather(self, outputs: npt.NDArray[np.int64], out: Rows) -> None:
        """See `QuantizedWeight.gather`."""
        ordered = np.empty_like(out)
        self.packed.gather(outputs, ordered)
        out[:, self.order] = ordered


KernelWeight: TypeAlias = PackedWeight | QuantizedWeight | OrderedWeight


class ReusedMemory:
    """Memory of large results, used again once no array holds the last one.

    The system takes large arrays back when they are freed, and clears their pages for the next one.
    Pages are allocated when they are first written: this holds the memory of the largest batch.
    """

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.uint8] | None = None
        self._last: Callable[[], object] = lambda: None

    def empty(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> Rows:
        """An uninitialised array."""
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        if num_bytes > _REUSED:
            return np.empty(shape, dtype)
        if self._memory is None or self._last() is not None:
            self._memory = np.empty(_REUSED, np.uint8)
        used = np.frombuffer(self._memory.data[:num_bytes], dtype)
        self._last = ref(used)  # views hold it, since its own base is no array
        return used.reshape(shape)


@dataclass(slots=True)
class CpuProduct:
    """A matrix in the layout of the Rust kernel, and its bias.

    Look-ups give numbers of `dtype`. `results` is the memory of products; None: new memory.
    """

    threads: CpuAttention
    packed: KernelWeight
    bias: Rows | None = None
    dtype: Dtype = "float32"
    results: ReusedMemory | None = None

    def multiply(self, rows: Rows) -> Rows:
        """See `Product.multiply`."""
        rows = np.ascontiguousarray(rows)
        shape = len(rows), self.packed.out_features
        if self.results is None:
            out = np.empty(shape, rows.dtype)
        else:
            out = self.results.empty(shape, rows.dtype)
        self.packed.multiply(self.threads, rows, out, self.bias)
        return out

    def gather(self, ids: npt.NDArray[np.int64]) -> Rows:
        """See `Table.gather`."""
        out = np.empty((len(ids), self.packed.in_features), NUMPY[self.dtype])
        self.packed.gather(np.ascontiguousarray(ids), out)
        return out


@dataclass(slots=True)
class CpuExactProduct:
    """A product with results in float32, whatever the rows are."""

    product: CpuProduct

    def multiply(self, rows: Rows) -> Floats:
        """See `Kernels.exact_product`."""
        return self.product.multiply(widened(rows))


@dataclass(slots=True)
class CpuJoinedProduct:
    """Products whose outputs follow each other: of weights in several formats."""

    products: list[Product]

    def multiply(self, rows: Rows) -> Rows:
        """See `Product.multiply`."""
        return np.concatenate([product.multiply(rows) for product in self.products], axis=1)


@dataclass(slots=True)
class CpuGate:
    """The gate and the other half of an MLP's first matrix, in one pass of the kernel."""

    threads: CpuAttention
    gate: Any
    up: Any
    activation: str

    def multiply(self, rows: Rows) -> Rows:
        """See `Kernels.inner_product`."""
        rows = np.ascontiguousarray(rows)
        out = np.empty((len(rows), self.up.out_features), rows.dtype)
        self.up.multiply_gated(self.threads, rows, self.gate, out, self.activation)
        return out


@dataclass(slots=True)
class CpuInnerProduct:
    """The first matrix of an MLP, and its activation."""

    threads: CpuAttention
    product: Product
    mlp: MLP

    def multiply(self, rows: Rows) -> Rows:
        """See `Kernels.inner_product`."""
        return activated(self.threads, self.product.multiply(rows), self.mlp)


def activated(threads: CpuAttention, inner: Rows, mlp: MLP) -> Rows:
    """See `Kernels.activated`."""
    out, activation = np.empty((len(inner), mlp.size), inner.dtype), mlp.activation
    if isinstance(activation, ClampedGate):
        gate_rows(threads, inner, out, clamped=(activation.alpha, activation.limit))
    elif mlp.is_gated:
        gate_rows(threads, inner, out, activation)
    else:
        map_rows(threads, inner, out, activation)
    return out


@dataclass(slots=True)
class CpuExperts:
    """Both products of every expert.

    A row has the same bits in every batch: its experts are added in float32, by number.
    """

    products: list[tuple[Product, Product]]

    def multiply(self, rows: Rows, chosen: npt.NDArray[np.intp], factors: Floats) -> Rows:
        """See `ExpertProducts.multiply`."""
        sums = np.zeros(rows.shape, np.float32)
        experts = chosen.reshape(-1)
        order = np.argsort(experts, kind="stable")
        sorted_experts = experts[order]
        tokens, weights = order // chosen.shape[1], factors.reshape(-1, 1)[order]
        ends = np.flatnonzero(sorted_experts[1:] != sorted_experts[:-1]) + 1
        start = 0
        for end in (*ends.tolist(), len(order)):
            inner, down = self.products[sorted_experts[start]]
            own = tokens[start:end]
            result = widened(down.multiply(inner.multiply(rows[own])))
            sums[own] += result * weights[start:end]  # a token has an expert once
            start = end
        return rounded(sums, rows.dtype.type)


def laid_out(
    weight: Weight, quantization: str, dtype: Dtype, threads: CpuAttention
) -> KernelWeight:
    """A matrix for the Rust kernel: floats, or bytes in a format that it multiplies by.

    `threads` round floats to integers.
    """
    if weight.packed_as is None:
        if quantization != "none":
            return _rounded(weight, quantization, threads)
        return PackedWeight(read(weight, _kept_as(weight, dtype)))
    try:
        packed: KernelWeight = weight.laid_out()
        return packed
    except ValueError as error:  # a scale that is not finite
        raise ModelLoadError(
            f"the weights {weight.name} in {weight.parts[0].path} are damaged: {error}; get them "
            "again"
        ) from error


def _kept_as(weight: Weight, dtype: Dtype) -> Dtype:
    """The dtype in which a matrix is laid out: bfloat16 has all digits of a file in bfloat16."""
    return "bfloat16" if all(part.dtype == "BF16" for part in weight.parts) else dtype


def _rounded(weight: Weight, quantization: str, threads: CpuAttention) -> QuantizedWeight:
    """A matrix of floats, rounded to "int4" or "int8"."""
    if weight.shape[1] % GROUP:
        raise ConfigurationError(
            f"quantization={quantization!r} has groups of {GROUP} inputs, and {weight.name} has "
            f"{weight.shape[1]}: leave quantization out"
        )
    quantise = q8_0 if quantization == "int8" else int4
    return quantise(read(weight, _kept_as(weight, "float32")), threads)
