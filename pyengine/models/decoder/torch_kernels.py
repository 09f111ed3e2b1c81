"""The kernel set of plain torch operations: the oracle of the others, on any device."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from pyengine.attention.backend import AttentionOptions
from pyengine.errors import ModelLoadError
from pyengine.kernels.operators import kept
from pyengine.kernels.rope import HeadNorm, RotaryLayout, Rotation
from pyengine.models.adapters import AdapterLimits
from pyengine.models.decoder.checkpoint import StoredTensor
from pyengine.models.decoder.dummy_numbers import DummyStored, numbers
from pyengine.models.decoder.grouped import group_pairs, grouped_linear
from pyengine.models.decoder.kernels import (
    AttentionWeights,
    ConvWeights,
    NormWeights,
    Product,
    Step,
    Table,
    TableUse,
)
from pyengine.models.decoder.product_choice import ProductChooser
from pyengine.models.decoder.recurrent import Convolution
from pyengine.models.decoder.rotary import frequencies
from pyengine.models.decoder.spec import (
    MLP,
    Activation,
    Attention,
    ClampedGate,
    LatentAttention,
    QueryGrowth,
    Rotary,
    Routing,
)
from pyengine.models.decoder.stored_weight import Weight
from pyengine.models.decoder.torch_adapters import TorchAdapterTable, adapter_slots
from pyengine.models.decoder.torch_states import TorchStates

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda rows: F.gelu(rows, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda rows: F.relu(rows).square(),
}
_FORMATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class TorchProduct:
    """A matrix `[outputs, inputs]` and a bias, multiplied by torch."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Product.multiply`."""
        return F.linear(rows.to(self.weight.dtype), self.weight, self.bias)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Table.gather`."""
        return F.embedding(ids, self.weight)


@dataclass(frozen=True, slots=True)
class TorchInnerProduct:
    """The first matrix of an MLP, and its activation."""

    kernels: "TorchKernels"
    product: Product
    mlp: MLP

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Kernels.inner_product`."""
        return self.kernels.activated(self.product.multiply(rows), self.mlp)


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """A matrix of every expert, `[experts, N, K]`; biases are `[experts, N]`.

    `scales` are those of 8-bit floats, as `grouped_linear` takes them.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class TorchExperts:
    """The matrices of all experts, multiplied as two grouped products."""

    kernels: "TorchKernels"
    gate_up: ExpertMatrices
    down: ExpertMatrices
    mlp: MLP

    def multiply(
        self, rows: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor
    ) -> torch.Tensor:
        """See `ExpertProducts.multiply`."""
        first, second = self.gate_up, self.down
        order, ends = group_pairs(chosen, len(first.weight))
        inner = grouped_linear(
            rows, first.weight, order, ends, chosen.shape[1], first.bias, first.scales
        )
        inner = self.kernels.activated(inner, self.mlp)
        weights = factors.reshape(-1)
        pairs = grouped_linear(
            inner, second.weight, order, ends, 1, second.bias, second.scales, weights
        )
        return pairs.view(*chosen.shape, -1).sum(1)


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """The attention of a layer."""

    kernels: "TorchKernels"
    spec: Attention | LatentAttention
    weights: AttentionWeights

    def attend(
        self, rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor], step: Step
    ) -> torch.Tensor:
        """See `AttentionKernel.attend`."""
        query, key, value = rows
        rotary, norms, rotation = self.spec.rotary, self.weights.head_norms, None
        if rotary is not None:
            layout = RotaryLayout(rotary.size, rotary.order, 1)
            rotation = Rotation(*step.angles[rotary], layout, _head_norm(norms))
        elif norms is not None:
            query, key = self.kernels.norm(query, norms[0]), self.kernels.norm(key, norms[1])
        options = AttentionOptions(
            scaling=self.spec.scaling,
            sliding_window=self.spec.window,
            softcap=self.spec.softcap,
            sinks=self.weights.sinks,
            rotation=rotation,
        )
        return step.metadata.forward(self.weights.cache, (query, key, value), options).flatten(1)


class TorchKernels(TorchStates):
    """See `Kernels`. Weights and rows are of `dtype`, on `device`."""

    keeps_formats: bool = False
    """True once a quantised weight was laid out as it is; False: all of them are floats."""
    has_float_products = True
    products = ProductChooser.fixed("torch", "the only one here")

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._frequencies: dict[Rotary, tuple[torch.Tensor, float]] = {}
        self._dummy: torch.Tensor | None = None

    torch_computes = True
    """See `CpuKernels.torch_computes`."""

    @property
    def has_torch_products(self) -> bool:
        """See `CpuKernels.has_torch_products`."""
        return True

    def product(self, weight: Weight, bias: Weight | None) -> Product:
        """See `Kernels.product`."""
        return TorchProduct(self._read(weight), None if bias is None else self._read(bias))

    def exact_product(self, weight: Weight, bias: Weight | None) -> TorchProduct:
        """See `Kernels.exact_product`."""
        exact = torch.float32
        return TorchProduct(
            self._read(weight, exact), None if bias is None else self._read(bias, exact)
        )

    def inner_product(self, weight: Weight, bias: Weight | None, mlp: MLP) -> Product:
        """See `Kernels.inner_product`."""
        return TorchInnerProduct(self, self.product(weight, bias), mlp)

    def activated(self, rows: torch.Tensor, mlp: MLP) -> torch.Tensor:
        """`activation(gate) * up` of rows `[T, 2 size]`, or the activation of each number."""
        if isinstance(mlp.activation, ClampedGate):
            alpha, limit = mlp.activation.alpha, mlp.activation.limit
            gate, up = rows.chunk(2, -1)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return gate * torch.sigmoid(alpha * gate) * (up + 1)
        activation = _ACTIVATIONS[mlp.activation]
        if not mlp.is_gated:
            return activation(rows)
        gate, up = rows.chunk(2, -1)
        return activation(gate) * up

    def adapter_table(
        self, ends: Sequence[int], inputs: int, limits: AdapterLimits
    ) -> TorchAdapterTable:
        """See `Kernels.adapter_table`."""
        return TorchAdapterTable((self.device, self.dtype), ends, inputs, limits)

    def adapter_slots(
        self, slots: torch.Tensor, max_loras: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernels.adapter_slots`."""
        return adapter_slots(slots, max_loras)

    def table(self, weight: Weight, _use: TableUse = "both") -> Table:
        """See `Kernels.table`."""
        return TorchProduct(self._read(weight))

    def differ(self, first: Weight, second: Weight) -> bool:
        """See `Kernels.differ`."""
        pairs = zip(first.pieces(self._part), second.pieces(self._part), strict=True)
        return not all(torch.equal(numbers, peer) for (_, numbers, _), (_, peer, _) in pairs)

    def experts(
        self,
        gate_up: Sequence[Weight],
        down: Sequence[Weight],
        biases: tuple[Sequence[Weight], Sequence[Weight]] | None,
        mlp: MLP,
    ) -> TorchExperts:
        """See `Kernels.experts`."""
        first, second = (None, None) if biases is None else map(self._stacked, biases)
        return TorchExperts(self, self.matrices(gate_up, first), self.matrices(down, second), mlp)

    def matrices(self, weights: Sequence[Weight], bias: torch.Tensor | None) -> ExpertMatrices:
        """Lay out a matrix of every expert."""
        return ExpertMatrices(self._stacked(weights), bias)

    def vector(self, weight: Weight) -> torch.Tensor:
        """See `Kernels.vector`."""
        return self._read(weight)

    def exact_vector(self, weight: Weight) -> torch.Tensor:
        """See `Kernels.exact_vector`."""
        return self._read(weight, torch.float32)

    def angles(self, positions: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernels.angles`."""
        frequencies, factor = self._frequencies[rotary]
        turned = positions[:, None].float() * frequencies
        cos, sin = ((values * factor).to(self.dtype) for values in (turned.cos(), turned.sin()))
        return kept(cos), kept(sin)

    def norm(self, rows: torch.Tensor, norm: NormWeights) -> torch.Tensor:
        """See `Kernels.norm`."""
        spec, values = norm.norm, rows.float()
        if spec.kind == "layer":
            values = values - values.mean(-1, keepdim=True)
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + spec.eps)
        if norm.weight is not None:
            values = values * (spec.offset + norm.weight.float())
        if norm.bias is not None:
            values = values + norm.bias.float()
        return values.to(rows.dtype)

    def add_norm(
        self,
        stream: torch.Tensor,
        change: torch.Tensor | None,
        scale: float,
        norm: NormWeights | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernels.add_norm`."""
        if change is not None:
            stream = torch.add(stream, change, alpha=scale)
        return stream, stream if norm is None else self.norm(stream, norm)

    def added(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """See `Kernels.added`."""
        return first + second

    def multiplied(self, rows: torch.Tensor, factors: torch.Tensor | float) -> torch.Tensor:
        """See `Kernels.multiplied`."""
        return rows * factors

    def scaled(self, rows: torch.Tensor, factor: float) -> torch.Tensor:
        """See `Kernels.scaled`."""
        return rows * _rounded(factor, rows.dtype)

    def attention(
        self, spec: Attention | LatentAttention, weights: AttentionWeights
    ) -> "TorchAttention":
        """See `Kernels.attention`."""
        rotary = spec.rotary
        if rotary is not None and rotary not in self._frequencies:
            inverse, factor = frequencies(rotary)
            on_device = torch.empty(inverse.shape, device=self.device)
            self._frequencies[rotary] = on_device.copy_(torch.from_numpy(inverse)), factor
        return TorchAttention(self, spec, weights)

    def grown(
        self, query: torch.Tensor, positions: torch.Tensor, growth: QueryGrowth
    ) -> torch.Tensor:
        """See `Kernels.grown`."""
        factor = 1 + growth.beta * torch.log(1 + torch.floor(positions / growth.original))
        return query * factor[:, None, None].to(query.dtype)

    def concatenated(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """See `Kernels.concatenated`."""
        heads = max(first.shape[1], second.shape[1])
        return torch.cat([part.expand(-1, heads, -1) for part in (first, second)], -1)

    def sigmoid(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Kernels.sigmoid`."""
        return torch.sigmoid(rows)

    def route(
        self, scores: torch.Tensor, routing: Routing, correction: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernels.route`."""
        if routing.score == "chosen":
            best, chosen = scores.topk(routing.chosen)
            return chosen, best.softmax(-1) * routing.scale
        scores = scores.softmax(-1) if routing.score == "softmax" else scores.sigmoid()
        preferred = scores if correction is None else scores + correction
        if routing.groups > 1:
            grouped = preferred.view(len(preferred), routing.groups, -1)
            best_groups = grouped.topk(2).values.sum(-1).topk(routing.chosen_groups).indices
            is_open = torch.zeros_like(grouped[..., 0], dtype=torch.bool)
            is_open.scatter_(-1, best_groups, True)
            preferred = grouped.masked_fill(~is_open[..., None], -torch.inf).flatten(-2)
        chosen = preferred.topk(routing.chosen).indices
        factors = scores.gather(-1, chosen)
        if routing.is_normalised:
            factors = factors / (factors.sum(-1, keepdim=True) + routing.min_sum)
        return chosen, factors * routing.scale

    def capped(self, rows: torch.Tensor, cap: float) -> torch.Tensor:
        """See `Kernels.capped`."""
        return cap * torch.tanh(rows / cap)

    def exact_array(self, weight: Weight, *, is_log: bool = False) -> torch.Tensor:
        """See `Kernels.exact_array`."""
        array = self._read(weight, torch.float32)
        return -array.exp() if is_log else array

    def conv_weights(self, conv: Convolution, weight: Weight, bias: Weight | None) -> ConvWeights:
        """See `Kernels.conv_weights`; the weight is `[channels, size]`."""
        vector = None if bias is None else self.exact_vector(bias)
        return ConvWeights(conv, self.exact_array(weight), vector)

    def factors(self, numbers: Sequence[float], sizes: Sequence[int]) -> torch.Tensor:
        """See `Kernels.factors`."""
        values = torch.from_numpy(np.repeat(np.array(numbers, np.float32), sizes))
        return torch.empty(values.shape, dtype=self.dtype, device=self.device).copy_(values)

    def _read(self, weight: Weight, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy of a weight's numbers."""
        target = torch.empty(weight.shape, dtype=dtype or self.dtype, device=self.device)
        self._fill(target, weight)
        return target

    def _stacked(self, weights: Sequence[Weight]) -> torch.Tensor:
        """The numbers of weights of one shape, `[weights, ...]`."""
        shape = (len(weights), *weights[0].shape)
        stack = torch.empty(shape, dtype=self.dtype, device=self.device)
        for index, weight in enumerate(weights):
            self._fill(stack[index], weight)
        return stack

    def _part(self, part: StoredTensor) -> torch.Tensor:
        """A tensor of a file, over its mapped memory; a dummy one is computed on the device."""
        if not isinstance(part, DummyStored):
            tensor = torch.from_numpy(np.asarray(part.read()))
            return tensor.view(torch.bfloat16) if part.dtype == "BF16" else tensor
        if self._dummy is None:
            memory = torch.empty(numbers().shape, device=self.device)
            self._dummy = memory.copy_(torch.from_numpy(numbers()))
        drawn = (self._dummy * part.scale + part.shift).to(_FORMATS[part.dtype]).to(self.dtype)
        result = _repeated(drawn, part.first, math.prod(part.shape)).view(part.shape)
        return part.cut(result.T if part.is_transposed else result)

    def _fill(self, target: torch.Tensor, weight: Weight) -> None:
        """Read one tensor of the file after the other."""
        for rows, part, _ in weight.pieces(self._part):
            target[rows] = part
        if not target.sum(dtype=torch.float32).isfinite() and not target.isfinite().all():
            raise ModelLoadError(
                f"the weights {weight.name} in {weight.parts[0].path} hold NaN or infinity, in "
                f"{target.dtype}: the file is damaged, or dtype='bfloat16' or 'float32' is what "
                "the model needs"
            )


def _repeated(numbers: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """The first `count` of the numbers from `first` on, over and over."""
    repeated = numbers.new_empty(count)
    start = min(count, len(numbers) - first)
    repeated[:start] = numbers[first : first + start]
    whole, rest = divmod(count - start, len(numbers))
    end = count - rest
    repeated[start:end].view(whole, len(numbers))[:] = numbers
    repeated[end:] = numbers[:rest]
    return repeated


def _rounded(factor: float, dtype: torch.dtype) -> float:
    """A factor as `dtype` has it; computed without a tensor, as a constant of compiled graphs."""
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    mantissa, exponent = math.frexp(factor)
    return math.ldexp(round(mantissa * 2**bits), exponent - bits)


def _head_norm(norms: tuple[NormWeights, NormWeights] | None) -> HeadNorm | None:
    """The norm of heads that attention applies before it rotates."""
    if norms is None:
        return None
    query, key = norms
    return HeadNorm(query.weight, key.weight, query.norm.eps, query.norm.offset)
