"""The interface of kernel sets: the arithmetic of a device, which layers ask for.

A layer calls no library. It keeps what its kernel set made of its weights, and passes rows on:
arrays `[T, ...]` of the set's own kind, of which it only takes slices and shapes. A device has one
set, chosen once (`torch_kernels` is the oracle of the others).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pyengine.models.decoder.recurrent import Convolution, GatedNorm
from pyengine.models.decoder.spec import (
    MLP,
    Attention,
    LatentAttention,
    Norm,
    QueryGrowth,
    Rotary,
    Routing,
)
from pyengine.models.decoder.stored_weight import Weight

if TYPE_CHECKING:
    from pyengine.attention.backend import AttentionMetadata
    from pyengine.kv_cache.states import LayerState, StateInputs
    from pyengine.models.adapters import AdapterLimits
    from pyengine.models.decoder.adapters import AdapterTable

TableUse = Literal["lookup", "product", "both"]
Rows = Any
"""An array of the kernel set; its first axis are the tokens of the step."""
MIN_NORM = 1e-6
"""Added to the square of a norm of queries and keys, as in flash-linear-attention."""


@dataclass(frozen=True, slots=True)
class NormWeights:
    """A norm over `size` elements with its weight and bias, as the kernel set keeps them."""

    norm: Norm
    size: int
    weight: Any
    bias: Any


class Product(Protocol):
    """A matrix `[outputs, inputs]`, laid out for products."""

    def multiply(self, rows: Rows) -> Rows:
        """`[T, inputs]` to `[T, outputs]`, with the bias if there is one."""


class Table(Product, Protocol):
    """A matrix whose rows are looked up, too."""

    def gather(self, ids: Rows) -> Rows:
        """`[T]` to `[T, inputs]`."""


class ExpertProducts(Protocol):
    """The matrices of a mixture of experts."""

    def multiply(self, rows: Rows, chosen: Rows, factors: Rows) -> Rows:
        """The results of the chosen experts `[T, k]` for `rows` `[T, hidden]`, summed by factors
        `[T, k]`."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a decoder.

    `ids`, `positions` are `[T]`. `angles` has cosines and sines of `positions` for each rotary
    embedding of the model. `kept` has the keys and values of layers that later ones share, by
    their number. `states` are those of recurrent layers, `sequences` what the kernel set made of
    them. `token_input` is `[T, layers, size]`, if the model has such inputs. `adapters` is what the
    kernel set made of the slots of tokens; None: no adapter changes any.
    """

    ids: Rows
    positions: Rows
    metadata: "AttentionMetadata"
    angles: dict[Rotary, tuple[Rows, Rows]]
    kept: dict[int, tuple[Rows, Rows]] = field(default_factory=dict)
    token_input: Rows = None
    states: "StateInputs | None" = None
    sequences: Any = None
    adapters: Any = None


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The needs of attention beside rows: the number of its cache, and small vectors.

    `head_norms` are those of query and key heads, before their rotation.
    """

    cache: int
    head_norms: tuple[NormWeights, NormWeights] | None = None
    sinks: Any = None


class AttentionKernel(Protocol):
    """The attention of a layer."""

    def attend(self, rows: tuple[Rows, Rows, Rows], step: Step) -> Rows:
        """Normalise heads, rotate, write keys and values, attend; `[T, heads * value_size]`.

        `rows` are queries, keys and values, `[T, heads, size]`; the first numbers of a head rotate.
        """


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """A convolution: its weight, as the kernel set lays it out, and its bias `[channels]` or None.

    Both are float32.
    """

    conv: Convolution
    weight: Any
    bias: Any


@dataclass(frozen=True, slots=True)
class GatedNormWeights:
    """A norm with a gate, and its weight `[width]`, in the dtype of rows."""

    norm: GatedNorm
    weight: Any


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The decay of a delta rule, float32: rates (negative) `[heads]`, and biases of its gate.

    Biases are `[heads]`, or `[heads * key_dim]` for a decay by channel. `beta_scale` and
    `tiled_heads` as in `GatedDelta`.
    """

    rate: Any
    bias: Any
    beta_scale: float = 1.0
    tiled_heads: bool = False


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """A state space, float32: rates (negative) `[heads]`, biases of time steps `[heads]`, and
    factors of inputs that skip the state `[heads]`.

    For Mamba these are `[state_size, channels]`, `[channels]` and `[channels]`.
    """

    rate: Any
    bias: Any
    skip: Any


class Kernels(Protocol):
    """The operations of a device. Sums are float32, and results are rounded once."""

    def product(self, weight: Weight, bias: Weight | None) -> Product:
        """Lay out a matrix and its bias for products."""

    def exact_product(self, weight: Weight, bias: Weight | None) -> Product:
        """The same with a matrix and results in float32, whatever the rows are."""

    def inner_product(self, weight: Weight, bias: Weight | None, mlp: MLP) -> Product:
        """Lay out the first matrix of an MLP; the product has its activation applied.

        A gated one has `[2 size, inputs]`, the gate first, and gives `[T, size]`.
        """

    def activated(self, rows: Rows, mlp: MLP) -> Rows:
        """`activation(gate) * up` of rows `[T, 2 size]`, or the activation of each number."""

    def adapter_table(
        self, ends: Sequence[int], inputs: int, limits: "AdapterLimits"
    ) -> "AdapterTable":
        """A table for the adapters of a linear layer, whose parts end at these outputs."""

    def adapter_slots(self, slots: Rows, max_loras: int) -> Any:
        """Prepare the slots of tokens (int32 `[T]`, -1: none) for the tables, once for a step."""

    def table(self, weight: Weight, use: TableUse = "both") -> Table:
        """Lay out a matrix for look-ups, for products, or for both: an embedding, or the head."""

    def differ(self, first: Weight, second: Weight) -> bool:
        """True if two matrices of one shape have other numbers."""

    def experts(
        self, gate_up: Sequence[Weight], down: Sequence[Weight], biases: Any, mlp: MLP
    ) -> ExpertProducts:
        """Lay out the matrices of all experts; `biases` are those of both, or None."""

    def vector(self, weight: Weight) -> Any:
        """Read a vector, in the dtype of rows."""

    def exact_vector(self, weight: Weight) -> Any:
        """Read a vector in float32."""

    def angles(self, positions: Rows, rotary: Rotary) -> tuple[Rows, Rows]:
        """Cosines and sines `[T, size / 2]` of the pairs of a head."""

    def norm(self, rows: Rows, norm: NormWeights) -> Rows:
        """Normalise the last axis."""

    def add_norm(
        self, stream: Rows, change: Rows | None, scale: float, norm: NormWeights | None
    ) -> tuple[Rows, Rows]:
        """`stream + scale * change`, and that normalised (or as it is).

        `stream` may be overwritten.
        """

    def added(self, first: Rows, second: Rows) -> Rows:
        """The sum of two arrays of one shape; `first` may be overwritten."""

    def multiplied(self, rows: Rows, factors: Rows | float) -> Rows:
        """Rows times a number, or times an array of their dtype that broadcasts to their shape."""

    def scaled(self, rows: Rows, factor: float) -> Rows:
        """Rows times a factor, which is rounded to their dtype first."""

    def attention(
        self, spec: Attention | LatentAttention, weights: AttentionWeights
    ) -> "AttentionKernel":
        """Prepare the attention of a layer."""

    def grown(self, query: Rows, positions: Rows, growth: QueryGrowth) -> Rows:
        """Queries `[T, heads, size]`, multiplied by the growth of their positions."""

    def concatenated(self, first: Rows, second: Rows) -> Rows:
        """`[T, heads, a]` and `[T, heads, b]` as `[T, heads, a + b]`; one head stands for all."""

    def sigmoid(self, rows: Rows) -> Rows:
        """The sigmoid of each number."""

    def route(self, scores: Rows, routing: Routing, correction: Any) -> tuple[Rows, Rows]:
        """The chosen experts `[T, k]` and their factors, from the router's outputs."""

    def capped(self, rows: Rows, cap: float) -> Rows:
        """`cap * tanh(rows / cap)`."""

    def exact_array(self, weight: Weight, *, is_log: bool = False) -> Any:
        """Read an array in float32; if it `is_log`, minus the exponential of its numbers."""

    def conv_weights(self, conv: Convolution, weight: Weight, bias: Weight | None) -> ConvWeights:
        """Lay out a convolution; its weight is `[channels, size]`."""

    def factors(self, numbers: Sequence[float], sizes: Sequence[int]) -> Any:
        """A row in the dtype of rows, in which each number is repeated by its size."""

    def sequences(self, states: "StateInputs") -> Any:
        """Prepare the sequences of a step for recurrent layers, once for all of them."""

    def short_conv(
        self,
        rows: Rows,
        weights: ConvWeights,
        state: "LayerState",
        sequences: Any,
        gates: tuple[Rows, Rows] | None = None,
    ) -> Rows:
        """The convolution of `[T, channels]`, of each sequence for itself.

        The positions before its first token are those of its state, or zeros. `gates` `[T,
        channels]` multiply inputs and results.
        """

    def gated_delta(
        self,
        rows: tuple[Rows, Rows, Rows, Rows, Rows],
        weights: DeltaWeights,
        state: "LayerState",
        sequences: Any,
    ) -> Rows:
        """The gated delta rule of each sequence, `[T, value_heads, value_dim]`.

        `rows` are queries and keys `[T, key_heads, key_dim]`, which are divided by their norms
        here, values `[T, value_heads, value_dim]`, the gate of decay `[T, value_heads]`, or
        `[T, heads * key_dim]` by channel, and that of the learning rate `[T, value_heads]`.

        For a token, with decay `g = exp(rate * softplus(gate + bias))`, learning rate
        `b = beta_scale * sigmoid(...)`, state S `[key_dim, value_dim]`, query q, key k, value v:
        `S = g S`; `S = S + k (b (v - k S))`; the result is `q S / sqrt(key_dim)`.
        """

    def mamba(
        self,
        rows: tuple[Rows, Rows, Rows, Rows],
        weights: MambaWeights,
        state: "LayerState",
        sequences: Any,
        gate: Rows | None = None,
    ) -> Rows:
        """The state space of each sequence, `[T, heads, head_dim]`.

        `rows` are x `[T, heads, head_dim]`, time steps `[T, heads]`, and B and C
        `[T, groups, state_size]`; `gate` is like x.

        For a token, with `d = softplus(time step + bias)` and state S `[state_size, head_dim]`:
        `S = exp(d rate) S + d x B`; the result is `S C + skip x`, times the SiLU of the gate.

        Mamba has x and time steps `[T, channels]`, B and C `[T, state_size]`: each channel is a
        head of one number, and its decay differs by number of the state.
        """

    def gated_norm(self, rows: Rows, gate: Rows, weights: GatedNormWeights) -> Rows:
        """A norm and a gate of `[N, width]`; the norm is over `weights.norm.size` elements."""
