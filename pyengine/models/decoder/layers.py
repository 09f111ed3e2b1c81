"""The parts of a decoder layer, written once for all families and devices.

Each takes rows `[T, hidden]` of a step and returns rows of the same shape. Its spec says what it
does, the kernel set how it is computed.

In a divided model the mixer and the feed-forward part return what this rank adds to their result:
`DecoderLayer` sums over ranks. Call sites say which axis of a weight is divided.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from pyengine.models.decoder import spec
from pyengine.models.decoder.kernels import AttentionWeights, NormWeights, Rows, Step
from pyengine.models.decoder.recurrent_layers import RecurrentLayer, recurrent_layer
from pyengine.models.decoder.weights import Linear, Weights

AttentionLayer: TypeAlias = "Attention | SharedAttention | LatentAttention"
Mixer: TypeAlias = "AttentionLayer | RecurrentLayer | BothMixers"
FeedForward: TypeAlias = "MLP | Experts"


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """The numbers of a layer in the KV pool and in the pool of states, where it has some."""

    kv: int | None = None
    state: int | None = None


class Attention:
    """Attention over the paged KV cache."""

    def __init__(
        self, attention: spec.Attention, weights: Weights, hidden: int, *, cache: int
    ) -> None:
        """`cache` is the number of its layer in the pool."""
        self._spec, self._kernels, self._layer = attention, weights.kernels, weights.layer or 0
        self._rank = weights.rank
        query, key, value = attention.sizes
        gated = 2 * query if attention.output_gate else query
        name, sizes = "qkv", (gated, key, value)
        if attention.values_are_keys:
            name, sizes = "query_key", (query, key, 0)
        self._splits = (gated, gated + key, gated + key + sizes[2])
        parts = [size for size in sizes if size]
        self._qkv = weights.linear(
            name, parts, hidden, has_bias=attention.qkv_bias, divided="outputs"
        )
        self._out = _out(weights, attention, hidden)
        self._row_norms = head_norms = None
        norm, size = attention.query_key_norm, attention.head_dim
        if norm is not None and norm.over == "row":
            ranks = self._rank.size
            self._row_norms = _norms(weights, norm.norm, query * ranks, key * ranks)
        elif norm is not None:
            head_norms = _norms(weights, norm.norm, size, size)
        self._value_norm = None
        if attention.value_norm is not None:
            self._value_norm = weights.norm(
                "value_norm", attention.value_norm, attention.value_size
            )
        sinks = None
        if attention.sinks:
            sinks = weights.vector("sinks", attention.heads, divided="outputs")
        small = AttentionWeights(cache, head_norms, sinks)
        self._attention = weights.kernels.attention(attention, small)

    def __call__(self, rows: Rows, step: Step) -> Rows:
        """Attend with the rows of the step."""
        attention, kernels = self._spec, self._kernels
        if attention.input_scale != 1.0:
            rows = kernels.multiplied(rows, attention.input_scale)
        qkv, (first, second, third) = self._qkv(rows, step), self._splits
        query, key, value = qkv[:, :first], qkv[:, first:second], qkv[:, second:third]
        if attention.values_are_keys:
            value = key
        gate = None
        if attention.output_gate:
            pairs = query.reshape(len(rows), attention.heads, 2 * attention.head_dim)
            query, gate = pairs[:, :, : attention.head_dim], pairs[:, :, attention.head_dim :]
        if self._row_norms is not None:
            query = self._row_normed(query, self._row_norms[0])
            key = self._row_normed(key, self._row_norms[1])
        query = query.reshape(len(rows), attention.heads, attention.head_dim)
        key = key.reshape(len(rows), attention.kv_heads, attention.head_dim)
        value = value.reshape(len(rows), attention.kv_heads, attention.value_size)
        if attention.query_growth is not None:
            query = kernels.grown(query, step.positions, attention.query_growth)
        if self._value_norm is not None:
            value = kernels.norm(value, self._value_norm)
        if attention.value_scale != 1.0:
            value = kernels.multiplied(value, attention.value_scale)
        if attention.is_shared:
            step.kept[self._layer] = key, value
        attended = self._attention.attend((query, key, value), step)
        if gate is not None:
            gates = kernels.sigmoid(gate.reshape(len(rows), -1))
            attended = kernels.multiplied(attended, gates)
        result = self._out(attended, step)
        if attention.output_scale != 1.0:
            result = kernels.multiplied(result, attention.output_scale)
        return result

    def _row_normed(self, rows: Rows, norm: NormWeights) -> Rows:
        """Rows normalised over the heads of all ranks."""
        whole = self._rank.gather(rows, norm.size)
        return self._kernels.norm(whole, norm)[:, self._rank.part(norm.size)]


class SharedAttention:
    """Attention to the keys and values of another layer, which has computed them in this step.

    They are written a second time, unchanged.
    """

    def __init__(
        self, attention: spec.Attention, weights: Weights, hidden: int, *, cache: int
    ) -> None:
        """`cache` is the number of the other layer in the pool."""
        self._heads, self._source = attention.heads, attention.shares or 0
        size = attention.heads * attention.head_dim
        self._query = weights.linear(
            "query", size, hidden, has_bias=attention.qkv_bias, divided="outputs"
        )
        self._out = _out(weights, attention, hidden)
        norms = None
        if attention.query_key_norm is not None:
            norm, of_source = attention.query_key_norm.norm, weights.of_layer(self._source)
            norms = (
                weights.norm("query_norm", norm, attention.head_dim),
                of_source.norm("key_norm", norm, attention.head_dim),
            )
        self._attention = weights.kernels.attention(attention, AttentionWeights(cache, norms))

    def __call__(self, rows: Rows, step: Step) -> Rows:
        """Attend with the rows of the step."""
        query = self._query(rows, step).reshape(len(rows), self._heads, -1)
        attended = self._attention.attend((query, *step.kept[self._source]), step)
        return self._out(attended, step)


def _out(weights: Weights, attention: spec.Attention, hidden: int) -> Linear:
    """The last matrix of attention."""
    values = attention.heads * attention.value_size
    return weights.linear("out", hidden, values, has_bias=attention.out_bias, divided="inputs")


def _norms(
    weights: Weights, norm: spec.Norm, query: int, key: int
) -> tuple[NormWeights, NormWeights]:
    """The norms of queries and keys, over this many elements."""
    return weights.norm("query_norm", norm, query), weights.norm("key_norm", norm, key)


class LatentAttention:
    """Multi-head latent attention; keys and values are expanded to heads before they are cached.

    In a head the numbers that rotate come first, unlike in files: products of queries and keys do
    not depend on the order.
    """

    def __init__(
        self, attention: spec.LatentAttention, weights: Weights, hidden: int, *, cache: int
    ) -> None:
        """`cache` is the number of its layer in the pool."""
        self._spec, self._kernels = attention, weights.kernels
        has_bias, rank = attention.has_bias, attention.query_rank
        queries = attention.heads * attention.head_dim
        self._query: Callable[[Rows, Step], Rows]
        if rank is None:
            self._query = weights.linear("query", queries, hidden, divided="outputs")
        else:
            self._query_down = weights.linear("query_down", rank, hidden, has_bias=has_bias)
            self._query_latent = weights.norm("query_latent", attention.norm, rank)
            self._query_up = weights.linear("query_up", queries, rank, divided="outputs")
            self._query = self._query_by_latent
        latent = attention.kv_rank + attention.shared_dim
        self._kv_down = weights.linear("kv_down", latent, hidden, has_bias=has_bias)
        self._kv_latent = weights.norm("kv_latent", attention.norm, attention.kv_rank)
        expanded = attention.heads * (attention.plain_dim + attention.value_dim)
        self._kv_up = weights.linear("kv_up", expanded, attention.kv_rank, divided="outputs")
        values = attention.heads * attention.value_dim
        self._out = weights.linear("out", hidden, values, has_bias=has_bias, divided="inputs")
        self._attention = weights.kernels.attention(attention, AttentionWeights(cache))

    def __call__(self, rows: Rows, step: Step) -> Rows:
        """Attend with the rows of the step."""
        attention, kernels = self._spec, self._kernels
        count, heads, plain = len(rows), attention.heads, attention.plain_dim
        query = self._query(rows, step).reshape(count, heads, attention.head_dim)
        query = kernels.concatenated(query[:, :, plain:], query[:, :, :plain])
        latent = self._kv_down(rows, step)
        rotated = latent[:, attention.kv_rank :].reshape(count, 1, attention.shared_dim)
        expanded = self._kv_up(kernels.norm(latent[:, : attention.kv_rank], self._kv_latent), step)
        expanded = expanded.reshape(count, heads, plain + attention.value_dim)
        key = kernels.concatenated(rotated, expanded[:, :, :plain])
        value = expanded[:, :, plain:]
        if attention.query_growth is not None:
            query = kernels.grown(query, step.positions, attention.query_growth)
        return self._out(self._attention.attend((query, key, value), step), step)

    def _query_by_latent(self, rows: Rows, step: Step) -> Rows:
        latent = self._kernels.norm(self._query_down(rows, step), self._query_latent)
        return self._query_up(latent, step)


class MLP:
    """`down(activation(gate) * up)`, or `down(activation(up))`."""

    def __init__(self, mlp: spec.MLP, weights: Weights, hidden: int, prefix: str = "") -> None:
        """`prefix` is what its names begin with: the shared expert's differ."""
        self._kernels, self._scales = weights.kernels, (mlp.input_scale, mlp.output_scale)
        self._inner = weights.inner(prefix, mlp, hidden)
        self._down = weights.linear(
            prefix + "down", hidden, mlp.size, has_bias=mlp.has_bias, divided="inputs"
        )

    def __call__(self, rows: Rows, step: Step) -> Rows:
        """Map the rows of the step."""
        before, after = self._scales
        if before != 1.0:
            rows = self._kernels.multiplied(rows, before)
        rows = self._down(self._inner(rows, step), step)
        return rows if after == 1.0 else self._kernels.multiplied(rows, after)


class Experts:
    """A mixture of experts, with a shared one or without."""

    def __init__(self, experts: spec.Experts, weights: Weights, hidden: int) -> None:
        routing, self._kernels = experts.routing, weights.kernels
        self._routing = routing
        self._router = weights.router(routing.count, hidden, has_bias=routing.has_bias)
        self._correction = None
        if routing.has_correction:
            self._correction = weights.vector("correction", routing.count)
        self._to_latent = self._from_latent = None
        if experts.latent is not None:
            has_bias = experts.mlp.has_bias
            latent = experts.latent
            self._to_latent = weights.linear("to_latent", latent, hidden, has_bias=has_bias)
            self._from_latent = weights.linear("from_latent", hidden, latent, has_bias=has_bias)
        self._experts = weights.experts(routing.count, experts.mlp, experts.latent or hidden)
        self._shared = self._shared_gate = None
        if experts.shared is not None:
            self._shared = MLP(experts.shared, weights, hidden, "shared_")
            if experts.shared_gate:
                self._shared_gate = weights.linear("shared_gate", 1, hidden)

    def __call__(self, rows: Rows, step: Step) -> Rows:
        """Map the rows of the step."""
        kernels = self._kernels
        scores = self._router(rows, step)
        chosen, factors = kernels.route(scores, self._routing, self._correction)
        inputs = rows if self._to_latent is None else self._to_latent(rows, step)
        result = self._experts.multiply(inputs, chosen, factors)
        if self._from_latent is not None:
            result = self._from_latent(result, step)
        if self._shared is None:
            return result
        shared = self._shared(rows, step)
        if self._shared_gate is not None:
            shared = kernels.multiplied(shared, kernels.sigmoid(self._shared_gate(rows, step)))
        return kernels.added(result, shared)


class TokenInput:
    """The third part of a layer with an input for each token: see `spec.TokenInput`."""

    def __init__(
        self, token_input: spec.TokenInput, norm: spec.Norm | None, weights: Weights, hidden: int
    ) -> None:
        self._kernels, self._layer = weights.kernels, weights.layer or 0
        gate = spec.MLP(size=token_input.size, activation=token_input.activation, is_gated=False)
        self._gate = weights.inner("token_input_gate_", gate, hidden, divided=None)
        self._out = weights.linear("token_input_out", hidden, token_input.size)
        self._norm = weights.optional_norm("after_token_input", norm, hidden)

    def __call__(self, rows: Rows, step: Step) -> Rows:
        """The change that the layer adds to `rows`."""
        gated = self._kernels.multiplied(self._gate(rows, step), step.token_input[:, self._layer])
        change = self._out(gated, step)
        return change if self._norm is None else self._kernels.norm(change, self._norm)


class BothMixers:
    """Two mixers of the same rows, whose results are added."""

    def __init__(self, attention: AttentionLayer, recurrent: RecurrentLayer) -> None:
        self._attention, self._recurrent = attention, recurrent

    def __call__(self, rows: Rows, step: Step) -> Rows:
        """Mix the rows of the step."""
        mixed = self._recurrent(rows, step)
        return self._recurrent.kernels.added(mixed, self._attention(rows, step))


def mixer_of(
    layer: spec.Layer, weights: Weights, hidden: int, caches: LayerCaches
) -> "Mixer | None":
    """The part of a layer that reads other tokens, if it has one."""
    attention = recurrent = None
    if layer.attention is not None:
        assert caches.kv is not None
        attention = _attention_layer(layer.attention, weights, hidden, cache=caches.kv)
    if layer.recurrent is not None:
        assert caches.state is not None
        recurrent = recurrent_layer(layer.recurrent, weights, hidden, state=caches.state)
    if attention is not None and recurrent is not None:
        return BothMixers(attention, recurrent)
    return attention or recurrent


def _attention_layer(
    attention: spec.AttentionMixer, weights: Weights, hidden: int, *, cache: int
) -> AttentionLayer:
    if isinstance(attention, spec.LatentAttention):
        return LatentAttention(attention, weights, hidden, cache=cache)
    kind = Attention if attention.shares is None else SharedAttention
    return kind(attention, weights, hidden, cache=cache)


def feed_forward_of(layer: spec.Layer, weights: Weights, hidden: int) -> "FeedForward | None":
    """The part of a layer that maps each token for itself, if it has one."""
    if layer.feed_forward is None:
        return None
    if isinstance(layer.feed_forward, spec.Experts):
        return Experts(layer.feed_forward, weights, hidden)
    return MLP(layer.feed_forward, weights, hidden)
