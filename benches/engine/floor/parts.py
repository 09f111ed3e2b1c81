"""The parts of a step: the bytes that each must move, and its operations.

Both are counted from the headers of the model's files: a decoder is built over kernels that read no
weight. Bytes are weights, keys and values of earlier tokens, new keys and values, rows of the
embedding, and logits, each once. Rows between parts stay in caches, and are not counted.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

from pyengine.models.decoder.checkpoint import StoredTensor
from pyengine.models.decoder.cpu_kernels import CpuKernels
from pyengine.models.decoder.decoder import Decoder
from pyengine.models.decoder.gguf import open_gguf
from pyengine.models.decoder.kernels import AttentionWeights, NormWeights
from pyengine.models.decoder.layers import Experts
from pyengine.models.decoder.loading import OpenedModel, fallback_reason, open_model
from pyengine.models.decoder.spec import Attention, LatentAttention
from pyengine.models.decoder.stored_weight import Weight
from pyengine.models.decoder.weights import Linear
from pyengine.models.gguf_file import GGUFFile

Arithmetic = Literal["float32", "bfloat16", "int8"]

EMBEDDING, NORMS, QKV = "embedding", "norms", "query, key, value"
ROTATION, ATTENTION, OUT = "rotation, KV write", "attention", "output product"
GATE, DOWN, HEAD = "gate, up", "down", "head"
SAMPLING, SCHEDULING, INPUTS = "sampling", "scheduling, block manager", "inputs and plan"
OTHER, PYTHON, BETWEEN = "other operations", "Python between parts", "between steps"
MODEL_PARTS = (EMBEDDING, NORMS, QKV, ROTATION, ATTENTION, OUT, GATE, DOWN, HEAD, OTHER)
PARTS = (*MODEL_PARTS, SAMPLING, SCHEDULING, INPUTS, PYTHON, BETWEEN)

PRODUCTS = {
    **dict.fromkeys(("_qkv", "_query", "_query_down", "_query_up", "_kv_down", "_kv_up"), QKV),
    "_out": OUT,
    "_inner": GATE,
    "_down": DOWN,
}
"""The part of a layer's product, by the attribute that holds it; others are `OTHER`."""

_NORM_OPERATIONS = 5  # of a number: residual, square, sum, and two factors
_ROTATION_OPERATIONS = 3  # of a number: two products and a sum


class FloorError(Exception):
    """The parts of this engine cannot be counted or timed."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step: `rows` sequences with `new` tokens each after `context` earlier ones."""

    rows: int
    context: int
    new: int = 1

    @property
    def tokens(self) -> int:
        """Tokens that it computes."""
        return self.rows * self.new

    def seen(self, window: int | None) -> tuple[int, int]:
        """Pairs of a query and a key, and earlier positions to read, with a `window` or without."""
        ends = range(self.context + 1, self.context + self.new + 1)
        if window is None:
            return self.rows * sum(ends), self.rows * self.context
        pairs = sum(min(end, window) for end in ends)
        return self.rows * pairs, self.rows * min(self.context, window - 1)


@dataclass(slots=True)
class Cost:
    """Bytes to move and operations by kind of arithmetic."""

    num_bytes: float = 0
    operations: dict[Arithmetic, float] = field(default_factory=dict)

    def add(self, num_bytes: float, operations: float = 0, kind: Arithmetic = "float32") -> None:
        """Count more."""
        self.num_bytes += num_bytes
        if operations:
            self.operations[kind] = self.operations.get(kind, 0) + operations

    def seconds(self, bandwidth: float, peaks: dict[Arithmetic, float]) -> float:
        """The least time: that of the bytes or that of the operations."""
        computing = sum(count / peaks[kind] for kind, count in self.operations.items())
        return max(self.num_bytes / bandwidth, computing)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix: its bytes, with those of a bias, and the arithmetic of its products."""

    num_bytes: int
    shape: tuple[int, ...]
    kind: Arithmetic

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def rows(self) -> int:
        return self.shape[0]


@dataclass(frozen=True, slots=True)
class _AttentionOfLayer:
    spec: Attention | LatentAttention
    weights: AttentionWeights


class _CountingKernels:
    """Kernels that make of each weight its size."""

    def __init__(self, dtype: Literal["float32", "bfloat16"]) -> None:
        self._dtype = dtype

    def _size(self, weight: Weight, bias: Weight | None = None) -> _Matrix:
        parts = (*weight.parts, *(() if bias is None else bias.parts))
        is_packed = any(part.packed_as is not None for part in weight.parts)
        kind: Arithmetic = "int8" if is_packed else self._dtype
        num_bytes = sum(self._bytes_of(part) for part in parts)
        return _Matrix(num_bytes, weight.shape, kind)

    def _bytes_of(self, part: StoredTensor) -> int:
        """Bytes that the engine keeps of a tensor; one in bfloat16 is kept so, if rows are not."""
        if part.packed_as is not None:
            return part.num_bytes
        is_short = self._dtype == "bfloat16" or part.dtype == "BF16"
        return prod(part.read_shape) * (2 if is_short else 4)

    def product(self, weight: Weight, bias: Weight | None) -> _Matrix:
        """The size of the matrix and its bias."""
        return self._size(weight, bias)

    def inner_product(self, weight: Weight, bias: Weight | None, _mlp: Any) -> _Matrix:
        """The same."""
        return self._size(weight, bias)

    def table(self, weight: Weight, _use: str = "both") -> _Matrix:
        """The same."""
        return self._size(weight)

    def vector(self, weight: Weight) -> _Matrix:
        """Of a vector."""
        return self._size(weight)

    exact_vector = vector

    def exact_product(self, _weight: Weight, _bias: Weight | None) -> _Matrix:
        """Only routers have such products."""
        raise FloorError(
            "the model is a mixture of experts: the weights that a step reads depend on its tokens"
        )

    def attention(
        self, spec: Attention | LatentAttention, weights: AttentionWeights
    ) -> _AttentionOfLayer:
        """Settings of a layer that its attention depends on."""
        return _AttentionOfLayer(spec, weights)

    def differ(self, first: Weight, second: Weight) -> bool:
        """True if the numbers of two matrices differ: these are read."""
        nothing: Any = None
        return CpuKernels.differ(nothing, first, second)


def layer_parts(decoder: Decoder) -> Iterator[Any]:
    """The layers of a decoder, what they are made of, and their inputs for each token, if any."""
    if decoder._token_inputs is not None:
        yield decoder._token_inputs
    for layer in decoder._layers:
        yield layer
        if isinstance(layer._feed_forward, Experts):
            raise FloorError(
                "the model is a mixture of experts: the weights that a step reads depend on its "
                "tokens"
            )
        for part in (layer._mixer, layer._feed_forward, layer._token_input):
            if part is not None:
                yield part


def products(decoder: Decoder) -> Iterator[tuple[str, Linear]]:
    """Every product of the layers, with its part of the step."""
    for part in layer_parts(decoder):
        for name, value in vars(part).items():
            if isinstance(value, Linear):
                yield PRODUCTS.get(name, OTHER), value


def _norms(owner: Any) -> Iterator[NormWeights]:
    for value in vars(owner).values():
        for norm in value if isinstance(value, tuple) else (value,):
            if isinstance(norm, NormWeights):
                yield norm


class CountedModel:
    """The sizes of a model's weights, part by part.

    `path` is a folder or a GGUF file; rows are in `dtype`. Reads headers. Raises `FloorError` for a
    model that runs in transformers' modules, and for a mixture of experts.
    """

    def __init__(self, path: Path, dtype: Literal["float32", "bfloat16"]) -> None:
        with ExitStack() as files:
            if path.is_file():
                opened = open_gguf(files.enter_context(GGUFFile.open(path)))
            else:
                if reason := fallback_reason(path):
                    raise FloorError(f"the model runs in transformers' modules: {reason}")
                opened = open_model(path)
            self._count(opened, dtype)

    def _count(self, opened: OpenedModel, dtype: Literal["float32", "bfloat16"]) -> None:
        kernels: Any = _CountingKernels(dtype)
        self._decoder: Any = opened.decoder(kernels)
        self.spec = opened.spec
        self._row_bytes = 2 if dtype == "bfloat16" else 4
        self._kind: Arithmetic = dtype

    @property
    def weight_bytes(self) -> dict[str, int]:
        """The bytes of all weights by part; a table for both uses counts as the head."""
        decoder = self._decoder
        sizes = dict.fromkeys(MODEL_PARTS, 0)
        for part, matrix in self._matrices():
            sizes[part] += matrix.num_bytes
        for owner in (decoder, *layer_parts(decoder)):
            sizes[NORMS] += sum(_bytes_of(norm) for norm in _norms(owner))
        for attention in self._attentions():
            norms: tuple[NormWeights, ...] = attention.weights.head_norms or ()
            if attention.spec.shares is not None:  # keys are normed by their own layer's weights
                norms = norms[:1]
            sizes[ROTATION] += sum(_bytes_of(norm) for norm in norms)
            if attention.weights.sinks is not None:
                sizes[ATTENTION] += attention.weights.sinks.num_bytes
        sizes[HEAD] = decoder._head.num_bytes
        if decoder._embedding is not decoder._head:
            sizes[EMBEDDING] = decoder._embedding.num_bytes
        for table in self._other_tables():
            sizes[EMBEDDING] += table.num_bytes
        for layer in decoder._layers:
            if layer._scalar is not None:
                sizes[OTHER] += layer._scalar.num_bytes
        return sizes

    def _other_tables(self) -> Iterator[_Matrix]:
        """Tables of which only rows are read, beside the embedding."""
        if self._decoder._positions is not None:
            yield self._decoder._positions
        if self._decoder._token_inputs is not None:
            yield self._decoder._token_inputs._table

    def _matrices(self) -> Iterator[tuple[str, _Matrix]]:
        """The matrix of every product of the layers, and its part."""
        for part, linear in products(self._decoder):
            matrix: Any = linear.product
            yield part, matrix

    def _attentions(self) -> Iterator[_AttentionOfLayer]:
        for layer in self._decoder._layers:
            yield layer._mixer._attention

    def costs(self, step: StepShape, kv_bytes: int) -> dict[str, Cost]:
        """The cost of each part of a step, with keys and values of `kv_bytes` a number.

        A sequence of several new tokens is a prompt, which gives one row of logits.
        """
        spec, decoder, stored = self.spec, self._decoder, self.weight_bytes
        costs = {part: Cost() for part in PARTS}
        for table in (decoder._embedding, *self._other_tables()):
            costs[EMBEDDING].add(step.tokens * table.num_bytes / table.rows)
        for part, matrix in self._matrices():
            costs[part].add(matrix.num_bytes, 2 * matrix.elements * step.tokens, matrix.kind)
        widths = [norm.size for owner in layer_parts(decoder) for norm in _norms(owner)]
        rows = step.tokens * sum(widths) + step.rows * decoder._norm.size
        costs[NORMS].add(stored[NORMS], _NORM_OPERATIONS * rows)
        for attention in self._attentions():
            self._add_attention(costs, attention.spec, step, kv_bytes)
        logits = step.rows * spec.vocab_size
        head = decoder._head
        costs[HEAD].add(
            head.num_bytes + logits * self._row_bytes, 2 * head.elements * step.rows, head.kind
        )
        costs[SAMPLING].add(logits * self._row_bytes, logits)
        return costs

    def _add_attention(
        self, costs: dict[str, Cost], spec: Any, step: StepShape, kv_bytes: int
    ) -> None:
        cache = spec.cache(None)
        per_token = cache.num_kv_heads * (cache.head_dim_k + cache.head_dim_v) * kv_bytes
        pairs, read = step.seen(spec.window)
        sizes = cache.head_dim_k + cache.head_dim_v
        costs[ATTENTION].add(per_token * read, 2 * pairs * spec.heads * sizes, self._kind)
        turned = 0 if spec.rotary is None else spec.rotary.size
        heads = step.tokens * (spec.heads + cache.num_kv_heads)
        costs[ROTATION].add(per_token * step.tokens, _ROTATION_OPERATIONS * heads * turned)


def _bytes_of(norm: NormWeights) -> int:
    return sum(vector.num_bytes for vector in (norm.weight, norm.bias) if vector is not None)


def floor_seconds(
    costs: dict[str, Cost], bandwidth: float, peaks: dict[Arithmetic, float]
) -> dict[str, float]:
    """The least time of each part."""
    return {part: cost.seconds(bandwidth, peaks) for part, cost in costs.items()}


def total(costs: Sequence[Cost]) -> Cost:
    """The sum of the costs of several parts."""
    whole = Cost()
    for cost in costs:
        whole.add(cost.num_bytes)
        for kind, count in cost.operations.items():
            whole.add(0, count, kind)
    return whole
