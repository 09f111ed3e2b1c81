"""Models as data: a frozen description that holds for every file of the family.

A `DecoderSpec` is made from a configuration by a row of the table of families
(`models/decoder/families`), and `Decoder` is built from it. Layers may differ: each has a spec of
its own. Sizes are numbers of elements; no weights and no arrays are here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from pyengine.errors import ModelLoadError
from pyengine.kv_cache.pool import KVCacheSpec
from pyengine.kv_cache.states import StateSpec
from pyengine.models.decoder.recurrent import Mamba2, RecurrentMixer
from pyengine.utils.dtypes import DType

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""`gelu` is the exact one, `gelu_tanh` its formula with tanh, `relu2` the square of `relu`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm over the last axis: `x / rms(x)`, or `(x - mean) / deviation` for "layer".

    The result is multiplied by `offset + weight` (Gemma: 1 + weight). `eps` is under the root.
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    has_bias: bool = False
    has_weight: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All frequencies divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, as in Llama 3.1; `original` positions were trained."""

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): low frequencies divided by `factor`, cosines times `attention`."""

    factor: float
    original: int
    attention: float
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753) up to the trained positions: each frequency has a divisor."""

    divisors: tuple[float, ...]
    attention: float


Scaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """A rotary embedding (arXiv 2104.09864) of the first `size` numbers of each head.

    Number i turns with `i + size / 2` ("halves"), or 2 i with 2 i + 1 ("pairs"), by the angle
    `position * theta ** (-2 i / exponent_size)`. Pairs from `turned` on do not turn.
    """

    size: int
    theta: float
    exponent_size: int
    turned: int
    order: Literal["halves", "pairs"] = "halves"
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        if self.size < 2 or self.size % 2:
            raise ModelLoadError(
                f"{self.size} numbers of a head rotate, by head_dim and partial_rotary_factor: "
                "that must be even and at least 2"
            )
        if isinstance(self.scaling, LongRopeScaling):
            count = len(self.scaling.divisors)
            if count != self.size // 2:
                raise ModelLoadError(
                    f"short_factor has {count} numbers, and {self.size // 2} pairs of a head rotate"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryKeyNorm:
    """A norm of queries and keys before their rotation, over each head or over the whole row."""

    norm: Norm
    over: Literal["head", "row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Queries grow with their position p: times `1 + beta * log(1 + floor(p / original))`."""

    beta: float
    original: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention to the positions before, over keys and values.

    - `value_dim`: the size of a value head; None: `head_dim`.
    - `scaling`: factor on the products of queries and keys; `value_scale`: on values.
    - `window`: a query sees its own position and the `window - 1` before it; None: all.
    - `softcap`, `sinks`: as in `AttentionOptions`.
    - `value_norm`: a norm of each value head. `values_are_keys`: values are keys, before the norm
      and the rotation of those.
    - `output_gate`: a sigmoid multiplies each number of the result. Queries come with it: for each
      head, first the query, then the gate.
    - `input_scale`, `output_scale`: factors on rows before and after attention.
    - `shares`: the layer whose keys and values it reads; None: it has its own. That
      layer `is_shared`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    rotary: Rotary | None
    value_dim: int | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    query_key_norm: QueryKeyNorm | None = None
    query_growth: QueryGrowth | None = None
    value_scale: float = 1.0
    value_norm: Norm | None = None
    values_are_keys: bool = False
    output_gate: bool = False
    input_scale: float = 1.0
    output_scale: float = 1.0
    shares: int | None = None
    is_shared: bool = False
    qkv_bias: bool = False
    out_bias: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelLoadError(
                f"num_attention_heads={self.heads} is not a multiple of "
                f"num_key_value_heads={self.kv_heads}: heads share keys evenly"
            )
        if self.values_are_keys and self.value_size != self.head_dim:
            raise ModelLoadError("values that are keys have their size")
        if self.output_gate and (self.values_are_keys or self.shares is not None):
            raise ModelLoadError("attention with an output gate cannot share keys and values")
        if self.rotary is not None and self.rotary.size > self.head_dim:
            raise ModelLoadError(
                f"{self.rotary.size} numbers of a head rotate, by partial_rotary_factor, and "
                f"head_dim={self.head_dim}"
            )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The elements of a token's queries, keys and values."""
        heads, kv_heads = self.heads, self.kv_heads
        return heads * self.head_dim, kv_heads * self.head_dim, kv_heads * self.value_size

    @property
    def value_size(self) -> int:
        """The elements of a value head."""
        return self.head_dim if self.value_dim is None else self.value_dim

    def cache(self, dtype: DType) -> KVCacheSpec:
        """The KV cache that this layer needs."""
        return KVCacheSpec(self.kv_heads, self.head_dim, self.value_size, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1).

    A head's query and key are `plain_dim` numbers of its own and `shared_dim`, which rotate; keys
    have the latter in common. Without `rotary` nothing rotates (Kimi Linear). Keys and values come
    from `kv_rank` numbers, queries from `query_rank` (None: directly). They are cached as heads,
    which every backend attends to.
    """

    heads: int
    plain_dim: int
    shared_dim: int
    value_dim: int
    kv_rank: int
    query_rank: int | None
    scaling: float
    rotary: Rotary | None
    norm: Norm
    has_bias: bool = False
    query_growth: QueryGrowth | None = None

    window: ClassVar[int | None] = None
    softcap: ClassVar[float | None] = None
    shares: ClassVar[int | None] = None
    is_shared: ClassVar[bool] = False
    """It sees all positions, without a cap, and its keys and values are read by no other layer."""

    @property
    def head_dim(self) -> int:
        """The elements of a query or key head."""
        return self.plain_dim + self.shared_dim

    def cache(self, dtype: DType) -> KVCacheSpec:
        """The KV cache that this layer needs."""
        return KVCacheSpec(self.heads, self.head_dim, self.value_dim, dtype)


AttentionMixer: TypeAlias = Attention | LatentAttention
"""A mixer that keeps keys and values."""
Mixer: TypeAlias = AttentionMixer | RecurrentMixer
"""The part of a layer that reads other tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedGate:
    """GPT-OSS's gate: `gate * sigmoid(alpha * gate) * (up + 1)`, both clamped to `limit` first."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """`down(activation(gate(x)) * up(x))` if it `is_gated`, else `down(activation(up(x)))`.

    `size` is the number of elements in the middle. `input_scale`, `output_scale` are factors on
    rows before and after.
    """

    size: int
    activation: Activation | ClampedGate
    is_gated: bool = True
    has_bias: bool = False
    input_scale: float = 1.0
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.activation, ClampedGate) and not self.is_gated:
            raise ModelLoadError(f"{self.activation} is for gated MLPs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How `chosen` of `count` experts are chosen for a token, and their factors.

    - `score`: over all experts, before the choice: "softmax", "sigmoid"; or "chosen", a softmax
      over the chosen ones only.
    - `has_correction`: a vector is added to scores for the choice, not for the factors.
    - `groups`, `chosen_groups`: experts are in as many groups, of which the best are considered.
    - `is_normalised`: factors are divided by their sum and `min_sum`; then multiplied by `scale`.
    """

    count: int
    chosen: int
    score: Literal["softmax", "sigmoid", "chosen"]
    is_normalised: bool = False
    min_sum: float = 1e-20
    scale: float = 1.0
    has_bias: bool = False
    has_correction: bool = False
    groups: int = 1
    chosen_groups: int = 1

    def __post_init__(self) -> None:
        if self.count % self.groups:
            raise ModelLoadError(f"n_group={self.groups} does not divide {self.count} experts")
        if self.chosen_groups > self.groups:
            raise ModelLoadError(
                f"topk_group={self.chosen_groups} is more than n_group={self.groups}"
            )
        open_experts = self.count // self.groups * self.chosen_groups
        if self.chosen > open_experts:
            raise ModelLoadError(
                f"num_experts_per_tok={self.chosen} is more than the {open_experts} experts that a "
                "token can choose from"
            )
        if self.groups > 1 and self.count // self.groups < 2:
            raise ModelLoadError("a group of experts is scored by its best two, and has one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts, each an `mlp`; `shared` is computed for every token.

    If `shared_gate`, a sigmoid of one linear output multiplies the shared expert. With `latent` the
    experts read and give as many numbers, which a matrix makes of a row, and another one maps back.
    """

    routing: Routing
    mlp: MLP
    shared: MLP | None = None
    shared_gate: bool = False
    latent: int | None = None


FeedForward: TypeAlias = MLP | Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInput:
    """A vector of `size` elements for each token and layer, beside the embedding (Gemma 3n).

    It is the sum of a look-up and of a product with the embedding, which has `norm`. A layer
    multiplies it by `activation(gate(x))`, and adds the normalised product of that.
    """

    size: int
    vocab_size: int
    activation: Activation
    norm: Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A decoder layer: each part reads normalised states, and adds its result to the residual.

    Absent norms and parts are None; a layer has at least one part. The result of a mixer `beside`
    the first one is added to its result (Falcon-H1). If it `is_parallel`, both parts read the
    states before the layer; without `before_feed_forward` they share a norm. Results are multiplied
    by `residual_scale` when they are added. With `token_input` there is a third part; if it
    `has_scalar`, a number of the file multiplies the sum at the end.
    """

    mixer: Mixer | None
    feed_forward: FeedForward | None
    before_mixer: Norm | None = None
    after_mixer: Norm | None = None
    before_feed_forward: Norm | None = None
    after_feed_forward: Norm | None = None
    is_parallel: bool = False
    residual_scale: float = 1.0
    token_input: TokenInput | None = None
    has_scalar: bool = False
    beside: Mamba2 | None = None

    @property
    def attention(self) -> AttentionMixer | None:
        """The mixer that keeps keys and values, if there is one."""
        return self.mixer if isinstance(self.mixer, Attention | LatentAttention) else None

    @property
    def recurrent(self) -> RecurrentMixer | None:
        """The mixer that keeps a state, if there is one."""
        return self.mixer if isinstance(self.mixer, RecurrentMixer) else self.beside

    def __post_init__(self) -> None:
        if self.mixer is None and self.feed_forward is None:
            raise ModelLoadError("a layer has neither a mixer nor a feed-forward part")
        if self.beside is not None and self.attention is None:
            raise ModelLoadError("a second mixer is beside attention")
        if self.is_parallel and (self.mixer is None or self.feed_forward is None):
            raise ModelLoadError("a parallel layer has two parts")
        after = (self.after_mixer, self.after_feed_forward, self.token_input)
        if self.is_parallel and (any(after) or self.has_scalar):
            raise ModelLoadError("a parallel layer has no norms after its parts, and no third part")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A causal language model.

    - `max_positions`: the positions that it can be used for.
    - `norm`: after the last layer. `is_tied`: the head is the embedding.
    - `embedding_scale`, `logit_scale`, `logit_softcap`: factors, and a cap as for attention.
    - `learned_positions`: the number of vectors that are added by position; None: none are.
    - `mtp_layers`: layers after the last one that the file may have for speculation.
    - `saved_dtype`: the number format that the configuration names, if any.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    layers: tuple[Layer, ...]
    norm: Norm
    is_tied: bool
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    learned_positions: int | None = None
    mtp_layers: tuple[Layer, ...] = ()
    saved_dtype: str | None = None

    @property
    def cached(self) -> list[int]:
        """The layers that have their own KV cache, in order: those of the pool."""
        return [number for number, layer in enumerate(self.layers) if _caches(layer)]

    @property
    def recurrent(self) -> list[int]:
        """The layers that keep a state, in order: those of the `StatePool`."""
        return [number for number, layer in enumerate(self.layers) if layer.recurrent is not None]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of every cached layer, for `choose_layer_groups`."""
        return tuple(mixer.window for mixer in self._cached_mixers)

    def cache_specs(self, dtype: DType) -> Sequence[KVCacheSpec]:
        """The KV cache of every cached layer, for `KVPool`."""
        return [mixer.cache(dtype) for mixer in self._cached_mixers]

    @property
    def state_specs(self) -> Sequence[StateSpec]:
        """The state of every recurrent layer, for `StatePool`."""
        mixers = (layer.recurrent for layer in self.layers)
        return [mixer.state for mixer in mixers if mixer is not None]

    @property
    def _cached_mixers(self) -> list[AttentionMixer]:
        mixers = (layer.attention for layer in self.layers)
        return [mixer for mixer in mixers if mixer is not None and mixer.shares is None]

    @property
    def token_input(self) -> TokenInput | None:
        """That of all layers, if they have any."""
        return self.layers[0].token_input

    def __post_init__(self) -> None:
        if len({layer.token_input for layer in self.layers}) > 1:
            raise ModelLoadError("layers differ in the inputs that they have for each token")
        for number, layer in enumerate(self.layers):
            source = None if layer.attention is None else layer.attention.shares
            if source is None:
                continue
            read = self.layers[source].attention if source < number else None
            if read is None or not read.is_shared:
                raise ModelLoadError(f"layer {number} reads keys and values of layer {source}")


def _caches(layer: Layer) -> bool:
    """True if a layer has its own KV cache."""
    return layer.attention is not None and layer.attention.shares is None
