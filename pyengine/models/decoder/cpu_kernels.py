"""The kernel set for CPUs: NumPy arrays in float32, multiplied and attended by the Rust kernels.

No tensor of torch passes through a layer, and importing this module does not import torch.
Products, root-mean-square norms, rotation and attention are in Rust; the rest is NumPy. bfloat16
needs sums and activations in Rust first: NumPy has no such numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt

from pyengine.cpu import CpuAttention, PackedWeight, QuantizedWeight
from pyengine.models.decoder.cpu_products import (
    CpuExperts,
    CpuGate,
    CpuInnerProduct,
    CpuJoinedProduct,
    CpuProduct,
    as_floats,
    laid_out,
    read_floats,
    sigmoid,
)
from pyengine.models.decoder.kernels import AttentionWeights, NormWeights, Product, Step
from pyengine.models.decoder.rotary import Floats, angles, frequencies
from pyengine.models.decoder.spec import (
    MLP,
    Attention,
    LatentAttention,
    Norm,
    QueryGrowth,
    Rotary,
    Routing,
)
from pyengine.models.decoder.weights import Weight

if TYPE_CHECKING:
    from pyengine.attention.backend import AttentionOptions
    from pyengine.attention.cpu import CpuPlan

_GATES = ("silu", "gelu_tanh")
"""Activations that the kernel applies to a gate itself."""
_LEAST_SUM = np.float32(1e-20)


class CpuLayerAttention:
    """The attention of a layer, by the Rust kernel."""

    def __init__(
        self,
        kernels: "CpuKernels",
        spec: Attention | LatentAttention,
        weights: AttentionWeights,
    ) -> None:
        self._norm, self._spec, self._weights = kernels.norm, spec, weights
        self._options = _options(spec, weights)
        self._numbers: tuple[Any, ...] = ()
        """What the kernel takes of a rotation beside angles, as `rotation_numbers`."""
        if spec.rotary is not None:
            norms = None
            if weights.head_norms is not None:
                query, key = weights.head_norms
                norms = (query.weight, key.weight, query.norm.eps, query.norm.offset)
            self._numbers = (spec.rotary.size, spec.rotary.order == "pairs", 1, norms)

    def attend(self, rows: tuple[Floats, Floats, Floats], step: Step) -> Floats:
        """See `AttentionKernel.attend`."""
        query, key, value = (_with_dense_heads(each) for each in rows)
        rotary, norms, rotation = self._spec.rotary, self._weights.head_norms, None
        if rotary is not None:
            rotation = (*step.angles[rotary], *self._numbers)
        elif norms is not None:
            query, key = self._norm(query, norms[0]), self._norm(key, norms[1])
        out = np.empty((*query.shape[:2], value.shape[2]), np.float32)
        plan = cast("CpuPlan", step.plan)
        plan.attend(self._weights.cache, (query, key, value, out), self._options, rotation)
        return out.reshape(len(out), -1)


@dataclass(slots=True)
class CpuKernels:
    """See `Kernels`. Steps are planned by the backend of attention named "cpu".

    With `quantization`, matrices of floats are rounded to 8 bits, or to 4: then embedding and head
    have 8, since their rounding shows in every log-probability, and routers stay floats.
    """

    keeps_formats: ClassVar[bool] = True
    """True if there are products of quantised weights; False: they are read as floats."""
    threads: CpuAttention
    quantization: Literal["none", "int4", "int8"] = "none"
    has_float_products: bool = False
    """True once a matrix of floats was laid out."""
    _frequencies: dict[Rotary, tuple[Floats, float]] = field(default_factory=dict)

    def product(self, weight: Weight, bias: Weight | None) -> Product:
        """See `Kernels.product`."""
        vector = None if bias is None else read_floats(bias)
        formats = {part.packed_as for part in weight.parts}
        if len(formats) == 1:
            return CpuProduct(self.threads, self._laid_out(weight, self.quantization), vector)
        biases: list[Floats | None] = [None] * len(weight.parts)
        if vector is not None:
            ends = np.cumsum([part.read_shape[0] for part in weight.parts])[:-1]
            biases = [np.ascontiguousarray(part) for part in np.split(vector, ends)]
        pairs = zip(weight.split(), biases, strict=True)
        return CpuJoinedProduct(
            [
                CpuProduct(self.threads, self._laid_out(part, self.quantization), b)
                for part, b in pairs
            ]
        )

    def _laid_out(self, weight: Weight, quantization: str) -> PackedWeight | QuantizedWeight:
        self.has_float_products |= weight.packed_as is None and quantization == "none"
        return laid_out(weight, quantization)

    def exact_product(self, weight: Weight, bias: Weight | None) -> Product:
        """See `Kernels.exact_product`."""
        vector = None if bias is None else read_floats(bias)
        return CpuProduct(self.threads, self._laid_out(weight, "none"), vector)

    def inner_product(self, weight: Weight, bias: Weight | None, mlp: MLP) -> Product:
        """See `Kernels.inner_product`."""
        is_plain = len({part.packed_as for part in weight.parts}) == 1
        if mlp.is_gated and bias is None and mlp.activation in _GATES and is_plain:
            gate, up = (self._laid_out(weight.half(number), self.quantization) for number in (0, 1))
            return CpuGate(self.threads, gate, up, cast(str, mlp.activation))
        return CpuInnerProduct(self.product(weight, bias), mlp)

    def table(self, weight: Weight) -> CpuProduct:
        """See `Kernels.table`."""
        eight = "none" if self.quantization == "none" else "int8"
        return CpuProduct(self.threads, self._laid_out(weight, eight))

    def differ(self, first: Weight, second: Weight) -> bool:
        """See `Kernels.differ`."""
        pairs = zip(first.pieces(), second.pieces(), strict=True)
        return not all(
            np.array_equal(as_floats(numbers, kind), as_floats(others, other))
            for (_, numbers, kind), (_, others, other) in pairs
        )

    def experts(
        self,
        gate_up: Sequence[Weight],
        down: Sequence[Weight],
        biases: tuple[Sequence[Weight], Sequence[Weight]] | None,
        mlp: MLP,
    ) -> CpuExperts:
        """See `Kernels.experts`."""
        nothing: Sequence[Weight | None] = [None] * len(down)
        inner_biases, down_biases = biases or (nothing, nothing)
        inner = (
            self.inner_product(weight, bias, mlp)
            for weight, bias in zip(gate_up, inner_biases, strict=True)
        )
        outer = (self.product(weight, bias) for weight, bias in zip(down, down_biases, strict=True))
        return CpuExperts(list(zip(inner, outer, strict=True)))

    def vector(self, weight: Weight) -> Floats:
        """See `Kernels.vector`."""
        return read_floats(weight)

    def exact_vector(self, weight: Weight) -> Floats:
        """See `Kernels.exact_vector`."""
        return read_floats(weight)

    def angles(self, positions: npt.NDArray[Any], rotary: Rotary) -> tuple[Floats, Floats]:
        """See `Kernels.angles`."""
        if rotary not in self._frequencies:
            self._frequencies[rotary] = frequencies(rotary)
        return angles(positions, *self._frequencies[rotary])

    def norm(self, rows: Floats, norm: NormWeights) -> Floats:
        """See `Kernels.norm`."""
        spec: Norm = norm.norm
        if spec.kind == "rms" and norm.weight is not None and norm.bias is None:
            flat = np.ascontiguousarray(rows).reshape(-1, norm.size)
            out = np.empty_like(flat)
            weight = norm.weight + np.float32(spec.offset) if spec.offset else norm.weight
            self.threads.rms_norm(flat, weight, out, spec.eps)
            return out.reshape(rows.shape)
        found = rows - rows.mean(-1, keepdims=True) if spec.kind == "layer" else rows
        mean = np.square(found).mean(-1, keepdims=True)
        normed: Floats = found / np.sqrt(mean + np.float32(spec.eps))
        if norm.weight is not None:
            normed *= norm.weight + np.float32(spec.offset)
        if norm.bias is not None:
            normed += norm.bias
        return normed

    def add_norm(
        self, stream: Floats, change: Floats | None, scale: float, norm: NormWeights | None
    ) -> tuple[Floats, Floats]:
        """See `Kernels.add_norm`."""
        if change is not None:
            stream = stream + (change if scale == 1.0 else change * np.float32(scale))
        return stream, stream if norm is None else self.norm(stream, norm)

    def scaled(self, rows: Floats, factor: float) -> Floats:
        """See `Kernels.scaled`."""
        return rows * np.float32(factor)

    def attention(
        self, spec: Attention | LatentAttention, weights: AttentionWeights
    ) -> "CpuLayerAttention":
        """See `Kernels.attention`."""
        return CpuLayerAttention(self, spec, weights)

    def grown(self, query: Floats, positions: npt.NDArray[Any], growth: QueryGrowth) -> Floats:
        """See `Kernels.grown`."""
        factor = 1 + growth.beta * np.log(1 + positions // growth.original)
        grown: Floats = query * factor[:, None, None].astype(np.float32)
        return grown

    def concatenated(self, first: Floats, second: Floats) -> Floats:
        """See `Kernels.concatenated`."""
        shape = len(first), max(first.shape[1], second.shape[1])
        parts = [np.broadcast_to(each, (*shape, each.shape[2])) for each in (first, second)]
        return np.concatenate(parts, axis=2)

    def sigmoid(self, rows: Floats) -> Floats:
        """See `Kernels.sigmoid`."""
        return sigmoid(rows)

    def route(
        self, scores: Floats, routing: Routing, correction: Floats | None
    ) -> tuple[npt.NDArray[np.intp], Floats]:
        """See `Kernels.route`."""
        if routing.score == "chosen":
            chosen = _largest(scores, routing.chosen)
            return chosen, _softmax(_at(scores, chosen)) * np.float32(routing.scale)
        scores = _softmax(scores) if routing.score == "softmax" else sigmoid(scores)
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
            factors = factors / (factors.sum(-1, keepdims=True) + _LEAST_SUM)
        return chosen, factors * np.float32(routing.scale)

    def capped(self, rows: Floats, cap: float) -> Floats:
        """See `Kernels.capped`."""
        capped: Floats = np.tanh(rows / np.float32(cap)) * np.float32(cap)
        return capped


def _options(spec: Attention | LatentAttention, weights: AttentionWeights) -> "AttentionOptions":
    from pyengine.attention.backend import AttentionOptions  # imports torch

    sinks = weights.sinks
    if sinks is not None:
        import torch

        sinks = torch.from_numpy(sinks)  # as options have them
    return AttentionOptions(
        scaling=spec.scaling, sliding_window=spec.window, softcap=spec.softcap, sinks=sinks
    )


def _with_dense_heads(rows: Floats) -> Floats:
    """`[T, heads, size]` for the kernel, whose rows may be parts of longer ones."""
    size = rows.itemsize
    is_dense = rows.strides[1:] == (rows.shape[2] * size, size)
    return rows if is_dense else np.ascontiguousarray(rows)


def _softmax(scores: Floats) -> Floats:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    found: Floats = powers / powers.sum(-1, keepdims=True)
    return found


def _largest(scores: Floats, count: int) -> npt.NDArray[np.intp]:
    """The places of the largest numbers of each row."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :count]


def _at(scores: Floats, places: npt.NDArray[np.intp]) -> Floats:
    return np.take_along_axis(scores, places, axis=-1)
