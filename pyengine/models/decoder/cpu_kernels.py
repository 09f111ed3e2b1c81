"""The kernel set for CPUs: NumPy arrays, multiplied and attended by the Rust kernels.

Rows are float32, or bfloat16 as uint16. No tensor of torch passes through a layer, and importing
this module does not import torch. Operations of few families are NumPy, in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt

from pyengine.attention.backend import KernelOptions
from pyengine.cpu import CpuAttention, PackedWeight, add_norm, add_rows, map_rows, norm_rows
from pyengine.models.adapters import AdapterLimits
from pyengine.models.decoder.cpu_adapters import CpuAdapterTable
from pyengine.models.decoder.cpu_numbers import NUMPY, Dtype, as_floats, read
from pyengine.models.decoder.cpu_products import (
    CpuExactProduct,
    CpuExperts,
    CpuGate,
    CpuInnerProduct,
    CpuJoinedProduct,
    CpuProduct,
    KernelWeight,
    ReusedMemory,
    activated,
    laid_out,
)
from pyengine.models.decoder.cpu_states import CpuStates
from pyengine.models.decoder.float_products import (
    GATES,
    FloatTable,
    ProductName,
    float_product,
    onednn_gate,
)
from pyengine.models.decoder.kernels import (
    AttentionWeights,
    NormWeights,
    Product,
    Step,
    Table,
    TableUse,
)
from pyengine.models.decoder.product_choice import LayerShape, ProductChooser
from pyengine.models.decoder.rotary import Floats, angles, frequencies
from pyengine.models.decoder.spec import (
    MLP,
    Attention,
    LatentAttention,
    QueryGrowth,
    Rotary,
    Routing,
)
from pyengine.models.decoder.stored_weight import Weight
from pyengine.utils.dtypes import Rows, rounded, widened

if TYPE_CHECKING:
    from pyengine.attention.cpu import CpuMetadata


class CpuLayerAttention:
    """The attention of a layer, by the Rust kernel."""

    def __init__(
        self,
        kernels: "CpuKernels",
        spec: Attention | LatentAttention,
        weights: AttentionWeights,
    ) -> None:
        self._norm, self._spec, self._weights = kernels.norm, spec, weights
        self._threads = kernels.threads
        self._options = KernelOptions(spec.scaling, spec.window, spec.softcap, weights.sinks)
        self._numbers: tuple[Any, ...] = ()
        """The arguments of a rotation beside its angles, as `rotation_numbers`."""
        if spec.rotary is not None:
            norms = None
            if weights.head_norms is not None:
                query, key = weights.head_norms
                norms = (query.weight, key.weight, query.norm.eps, query.norm.offset)
            self._numbers = (spec.rotary.size, spec.rotary.order == "pairs", 1, norms)

    def attend(self, rows: tuple[Rows, Rows, Rows], step: Step) -> Rows:
        """See `AttentionKernel.attend`."""
        query, key, value = (_with_dense_heads(array) for array in rows)
        rotary, norms, rotation = self._spec.rotary, self._weights.head_norms, None
        if rotary is not None:
            rotation = (*step.angles[rotary], *self._numbers)
        elif norms is not None:
            query, key = self._norm(query, norms[0]), self._norm(key, norms[1])
        out = np.empty((*query.shape[:2], value.shape[2]), query.dtype)
        metadata = cast("CpuMetadata", step.metadata)
        arrays = query, key, value, out
        metadata.attend(self._weights.cache, arrays, self._options, rotation, self._threads)
        return out.reshape(len(out), -1)


def _by_rust() -> ProductChooser:
    return ProductChooser.fixed("pyengine", "a row has the same bits in every batch")


@dataclass(slots=True)
class CpuKernels(CpuStates):
    """See `Kernels`. The attention backend is "cpu".

    Rows are of `dtype`. With `quantization`, matrices of floats are rounded to 8 bits, or to 4:
    then embedding and head have 8, since their rounding shows in every log-probability, and routers
    stay floats.
    """

    keeps_formats: ClassVar[bool] = True
    """True if there are products of quantised weights; False: they are read as floats."""
    threads: CpuAttention
    quantization: Literal["none", "int4", "int8"] = "none"
    dtype: Dtype = "float32"
    products: ProductChooser = field(default_factory=_by_rust)
    """Chooses the product of each matrix of floats."""
    has_float_products: bool = False
    """True once a matrix of floats was laid out."""
    _frequencies: dict[Rotary, tuple[Floats, float]] = field(default_factory=dict)

    @property
    def has_torch_products(self) -> bool:
        """True if torch multiplies a matrix, so that bits depend on the number of threads."""
        return self.has_float_products and "torch" in self.products.in_use

    @property
    def torch_computes(self) -> bool:
        """True if torch may multiply between calls of our kernels."""
        return self.products.may_be_torch

    def product(self, weight: Weight, bias: Weight | None) -> Product:
        """See `Kernels.product`."""
        vector = None if bias is None else read(bias)
        if len({part.packed_as for part in weight.parts}) == 1:
            return self._product(weight, vector)
        biases: list[Floats | None] = [None] * len(weight.parts)
        if vector is not None:
            ends = np.cumsum([part.read_shape[0] for part in weight.parts])[:-1]
            biases = [np.ascontiguousarray(part) for part in np.split(vector, ends)]
        pairs = zip(weight.split(), biases, strict=True)
        return CpuJoinedProduct([self._product(part, own) for part, own in pairs])

    def _product(self, weight: Weight, bias: Floats | None) -> Product:
        """A product with a matrix in one format."""
        name, numbers = self._chosen(weight)
        if name != "pyengine":
            vector = None if bias is None else rounded(bias, NUMPY[self.dtype])
            product: Product = float_product(name, numbers, vector)
            return product
        packed = self._laid_out(weight, self.quantization, self.dtype)
        if bias is not None and isinstance(packed, PackedWeight):
            bias = rounded(bias, NUMPY[self.dtype])
        return CpuProduct(self.threads, packed, bias)

    def _may_choose(self, weight: Weight) -> bool:
        """True for a matrix of floats that the Rust kernel need not multiply."""
        is_float = weight.packed_as is None and self.quantization == "none"
        may_choose = is_float and self.products.only != "pyengine"
        self.has_float_products |= may_choose
        return may_choose

    def _chosen(self, weight: Weight, *, is_tied: bool = False) -> tuple[ProductName, Any]:
        """The product of a matrix; if that is not the Rust kernel's, also the numbers."""
        if not self._may_choose(weight):
            return "pyengine", None
        numbers = read(weight, self.dtype)
        shape = LayerShape(weight.shape[1], weight.shape[0], self.dtype, is_tied=is_tied)
        return self.products(shape, [numbers]), numbers

    def _chosen_gate(self, weight: Weight) -> tuple[ProductName, tuple[Any, Any]]:
        """The same of a gate and what it lets through."""
        if not self._may_choose(weight):
            return "pyengine", (None, None)
        gate, up = (read(weight.half(number), self.dtype) for number in (0, 1))
        shape = LayerShape(weight.shape[1], len(up), self.dtype, is_gated=True)
        return self.products(shape, [gate, up]), (gate, up)

    def _laid_out(
        self, weight: Weight, quantization: str, dtype: Dtype | None = None
    ) -> KernelWeight:
        self.has_float_products |= weight.packed_as is None and quantization == "none"
        return laid_out(weight, quantization, dtype or self.dtype, self.threads)

    def exact_product(self, weight: Weight, bias: Weight | None) -> Product:
        """See `Kernels.exact_product`."""
        vector = None if bias is None else read(bias)
        packed = self._laid_out(weight, "none", "float32")
        return CpuExactProduct(CpuProduct(self.threads, packed, vector))

    def inner_product(self, weight: Weight, bias: Weight | None, mlp: MLP) -> Product:
        """See `Kernels.inner_product`."""
        if mlp.is_gated and bias is None and isinstance(mlp.activation, str) and _halves(weight):
            name, (first, second) = self._chosen_gate(weight)
            if name == "torch" or (name != "pyengine" and mlp.activation not in GATES):
                gate_up = float_product(name, np.concatenate([first, second]))
                return CpuInnerProduct(self.threads, gate_up, mlp)
            if name != "pyengine":
                return onednn_gate(name, first, second, mlp.activation)
            halves = (weight.half(number) for number in (0, 1))
            gate, up = (self._laid_out(half, self.quantization) for half in halves)
            return CpuGate(self.threads, gate, up, mlp.activation)
        return CpuInnerProduct(self.threads, self.product(weight, bias), mlp)

    def activated(self, rows: Rows, mlp: MLP) -> Rows:
        """See `Kernels.activated`."""
        return activated(self.threads, rows, mlp)

    def adapter_table(
        self, ends: Sequence[int], inputs: int, limits: AdapterLimits
    ) -> CpuAdapterTable:
        """See `Kernels.adapter_table`."""
        return CpuAdapterTable(self.threads, ends, inputs, limits, dtype=self.dtype)

    def adapter_slots(self, slots: npt.NDArray[np.int32], _max_loras: int) -> Any:
        """See `Kernels.adapter_slots`. None if no token has an adapter."""
        return slots if (slots >= 0).any() else None

    def table(self, weight: Weight, use: TableUse = "both") -> Table:
        """See `Kernels.table`."""
        is_float = weight.packed_as is None
        if use == "lookup" and is_float:
            return FloatTable(read(weight, self.dtype))
        name, numbers = self._chosen(weight, is_tied=use == "both")
        if name != "pyengine":
            return FloatTable(numbers, float_product(name, numbers))
        eight = "none" if self.quantization == "none" else "int8"
        packed = self._laid_out(weight, eight)
        results = None if use == "lookup" else ReusedMemory()
        return CpuProduct(self.threads, packed, dtype=self.dtype, results=results)

    def differ(self, first: Weight, second: Weight) -> bool:
        """See `Kernels.differ`."""
        pairs = zip(first.pieces(), second.pieces(), strict=True)
        return not all(
            np.array_equal(as_floats(numbers, kind), as_floats(peer_numbers, peer_kind))
            for (_, numbers, kind), (_, peer_numbers, peer_kind) in pairs
        )

    def experts(
        self,
        gate_up: Sequence[Weight],
        down: Sequence[Weight],
        biases: tuple[Sequence[Weight], Sequence[Weight]] | None,
        mlp: MLP,
    ) -> CpuExperts:
        """See `Kernels.experts`."""
        no_biases: Sequence[Weight | None] = [None] * len(down)
        inner_biases, down_biases = biases or (no_biases, no_biases)
        inner = (
            self.inner_product(weight, bias, mlp)
            for weight, bias in zip(gate_up, inner_biases, strict=True)
        )
        outer = (self.product(weight, bias) for weight, bias in zip(down, down_biases, strict=True))
        return CpuExperts(list(zip(inner, outer, strict=True)))

    def vector(self, weight: Weight) -> Rows:
        """See `Kernels.vector`."""
        return read(weight, self.dtype)

    def exact_vector(self, weight: Weight) -> Floats:
        """See `Kernels.exact_vector`."""
        return read(weight)

    def angles(self, positions: npt.NDArray[Any], rotary: Rotary) -> tuple[Floats, Floats]:
        """See `Kernels.angles`."""
        if rotary not in self._frequencies:
            self._frequencies[rotary] = frequencies(rotary)
        return angles(positions, *self._frequencies[rotary])

    def norm(self, rows: Rows, norm: NormWeights) -> Rows:
        """See `Kernels.norm`."""
        flat = np.ascontiguousarray(rows).reshape(-1, norm.size)
        out = np.empty_like(flat)
        norm_rows(self.threads, flat, _numbers(norm), out)
        return out.reshape(rows.shape)

    def add_norm(
        self, stream: Rows, change: Rows | None, scale: float, norm: NormWeights | None
    ) -> tuple[Rows, Rows]:
        """See `Kernels.add_norm`."""
        if change is None:
            return stream, stream if norm is None else self.norm(stream, norm)
        if norm is None:
            add_rows(self.threads, stream, change, scale)
            return stream, stream
        out = np.empty_like(stream)
        add_norm(self.threads, stream, change, scale, _numbers(norm), out)
        return stream, out

    def added(self, first: Rows, second: Rows) -> Rows:
        """See `Kernels.added`."""
        sums, addends = (part.reshape(-1, part.shape[-1]) for part in (first, second))
        add_rows(self.threads, sums, addends, 1.0)
        return sums.reshape(first.shape)

    def multiplied(self, rows: Rows, factors: Rows | float) -> Rows:
        """See `Kernels.multiplied`."""
        if isinstance(factors, float | int):
            return self._mapped(rows, "scale", factors)
        return rounded(widened(rows) * widened(factors), rows.dtype.type)

    def scaled(self, rows: Rows, factor: float) -> Rows:
        """See `Kernels.scaled`."""
        number = rounded(np.array([factor], np.float32), rows.dtype.type)
        return self._mapped(rows, "scale", float(widened(number)[0]))

    def _mapped(self, rows: Rows, function: str, number: float = 1.0) -> Rows:
        """A function of each number, by the kernel."""
        flat = np.ascontiguousarray(rows).reshape(-1, rows.shape[-1])
        out = np.empty_like(flat)
        map_rows(self.threads, flat, out, function, number)
        return out.reshape(rows.shape)

    def attention(
        self, spec: Attention | LatentAttention, weights: AttentionWeights
    ) -> "CpuLayerAttention":
        """See `Kernels.attention`."""
        return CpuLayerAttention(self, spec, weights)

    def grown(self, query: Rows, positions: npt.NDArray[Any], growth: QueryGrowth) -> Rows:
        """See `Kernels.grown`."""
        factor = 1 + growth.beta * np.log(1 + positions // growth.original)
        grown = widened(query) * factor[:, None, None].astype(np.float32)
        return rounded(grown, query.dtype.type)

    def factors(self, numbers: Sequence[float], sizes: Sequence[int]) -> Rows:
        """See `Kernels.factors`."""
        values = np.repeat(np.array(numbers, np.float32), sizes)
        return rounded(values, NUMPY[self.dtype])

    def concatenated(self, first: Rows, second: Rows) -> Rows:
        """See `Kernels.concatenated`."""
        shape = len(first), max(first.shape[1], second.shape[1])
        parts = [np.broadcast_to(part, (*shape, part.shape[2])) for part in (first, second)]
        return np.concatenate(parts, axis=2)

    def sigmoid(self, rows: Rows) -> Rows:
        """See `Kernels.sigmoid`."""
        return self._mapped(rows, "sigmoid")

    def route(
        self, scores: Floats, routing: Routing, correction: Floats | None
    ) -> tuple[npt.NDArray[np.intp], Floats]:
        """See `Kernels.route`."""
        if routing.score == "chosen":
            chosen = _largest(scores, routing.chosen)
            return chosen, _softmax(_at(scores, chosen)) * np.float32(routing.scale)
        scores = _softmax(scores) if routing.score == "softmax" else self.sigmoid(scores)
        preferred = scores if correction is None else scores + correction
        if routing.groups > 1:
            grouped = preferred.reshape(len(scores), routing.groups, -1)
            best = np.sort(grouped, axis=-1)[..., -2:].sum(-1)
            is_open = np.zeros(best.shape, np.bool_)
            np.put_along_axis(is_open, _largest(best, routing.chosen_groups), True, -1)
            preferred = np.where(is_open[..., None], grouped, -np.inf).reshape(scores.shape)
        chosen = _largest(preferred, routing.chosen)
        factors = _at(scores, chosen)
        if routing.is_normalised:
            factors = factors / (factors.sum(-1, keepdims=True) + np.float32(routing.min_sum))
        return chosen, factors * np.float32(routing.scale)

    def capped(self, rows: Rows, cap: float) -> Rows:
        """See `Kernels.capped`."""
        return self._mapped(rows, "cap", cap)


def _halves(weight: Weight) -> bool:
    """True if both halves of a matrix are in its one format, as they are in the file."""
    formats = {part.packed_as for part in weight.parts}
    return len(formats) == 1 and weight.half(0).packed_as == weight.packed_as


def _numbers(norm: NormWeights) -> tuple[Rows | None, Rows | None, float, float, bool]:
    """A norm as the kernel takes it."""
    spec = norm.norm
    return norm.weight, norm.bias, spec.eps, spec.offset, spec.kind == "layer"


def _with_dense_heads(rows: Rows) -> Rows:
    """`[T, heads, size]` for the kernel, whose rows may be parts of longer ones."""
    size = rows.itemsize
    is_dense = rows.strides[1:] == (rows.shape[2] * size, size)
    return rows if is_dense else np.ascontiguousarray(rows)


def _softmax(scores: Floats) -> Floats:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    probabilities: Floats = powers / powers.sum(-1, keepdims=True)
    return probabilities


def _largest(scores: Floats, count: int) -> npt.NDArray[np.intp]:
    """The indices of the largest numbers of each row."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :count]


def _at(scores: Floats, indices: npt.NDArray[np.intp]) -> Floats:
    return np.take_along_axis(scores, indices, axis=-1)
