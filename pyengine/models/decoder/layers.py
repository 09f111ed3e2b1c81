"""The parts of a decoder layer, written once for all families and devices.

Each takes rows `[T, hidden]` of a step and returns rows of the same shape. What it does is in its
spec, how it is computed in the kernel set.
"""

from collections.abc import Callable
from typing import TypeAlias

from pyengine.models.decoder import spec
from pyengine.models.decoder.kernels import AttentionWeights, NormWeights, Rows, Step
from pyengine.models.decoder.weights import Weights

Mixer: TypeAlias = "Attention | LatentAttention"
FeedForward: TypeAlias = "MLP | Experts"


class Attention:
    """Attention over the paged KV cache."""

    def __init__(self, attention: spec.Attention, weights: Weights, hidden: int) -> None:
        self._spec, self._kernels = attention, weights.kernels
        query, key, value = attention.sizes
        self._splits = (query, query + key, query + key + value)
        self._qkv = weights.linear("qkv", attention.sizes, hidden, has_bias=attention.qkv_bias)
        self._out = weights.linear(
            "out", hidden, attention.heads * attention.value_size, has_bias=attention.out_bias
        )
        self._row_norms = head_norms = None
        norm, size = attention.query_key_norm, attention.head_dim
        if norm is not None and norm.over == "row":
            self._row_norms = _norms(weights, norm.norm, query, key)
        elif norm is not None:
            head_norms = _norms(weights, norm.norm, size, size)
        sinks = weights.vector("sinks", attention.heads) if attention.sinks else None
        self._weights = AttentionWeights(weights.layer or 0, head_norms, sinks)

    def __call__(self, rows: Rows, step: Step) -> Rows:
        """Attend with the rows of the step."""
        attention, kernels = self._spec, self._kernels
        qkv, (first, second, third) = self._qkv(rows), self._splits
        query, key, value = qkv[:, :first], qkv[:, first:second], qkv[:, second:third]
        if self._row_norms is not None:
            query = kernels.norm(query, self._row_norms[0])
            key = kernels.norm(key, self._row_norms[1])
        query = query.reshape(len(rows), attention.heads, attention.head_dim)
        key = key.reshape(len(rows), attention.kv_heads, attention.head_dim)
        value = value.reshape(len(rows), attention.kv_heads, attention.value_size)
        if attention.query_growth is not None:
            query = kernels.grown(query, step.positions, attention.query_growth)
        if attention.value_scale != 1.0:
            value = value * attention.value_scale
        return self._out(kernels.attend(attention, self._weights, (query, key, value), step))


def _norms(
    weights: Weights, norm: spec.Norm, query: int, key: int
) -> tuple[NormWeights, NormWeights]:
    """The norms of queries and keys, over so many elements."""
    return weights.norm("query_norm", norm, query), weights.norm("key_norm", norm, key)


class LatentAttention:
    """Multi-head latent attention; keys and values are expanded to heads before they are cached.

    In a head the numbers that rotate come first, unlike in files: products of queries and keys do
    not depend on the order.
    """

    def __init__(self, attention: spec.LatentAttention, weights: Weights, hidden: int) -> None:
        self._spec, self._kernels = attention, weights.kernels
        has_bias, rank = attention.has_bias, attention.query_rank
        queries = attention.heads * attention.head_dim
        self._query: Callable[[Rows], Rows]
        if rank is None:
            self._query = weights.linear("query", queries, hidden)
        else:
            self._query_down = weights.linear("query_down", rank, hidden, has_bias=has_bias)
            self._query_latent = weights.norm("query_latent", attention.norm, rank)
            self._query_up = weights.linear("query_up", queries, rank)
            self._query = self._query_by_latent
        latent = attention.kv_rank + attention.rotary.size
        self._kv_down = weights.linear("kv_down", latent, hidden, has_bias=has_bias)
        self._kv_latent = weights.norm("kv_latent", attention.norm, attention.kv_rank)
        expanded = attention.heads * (attention.plain_dim + attention.value_dim)
        self._kv_up = weights.linear("kv_up", expanded, attention.kv_rank)
        values = attention.heads * attention.value_dim
        self._out = weights.linear("out", hidden, values, has_bias=has_bias)
        self._weights = AttentionWeights(weights.layer or 0)

    def __call__(self, rows: Rows, step: Step) -> Rows:
        """Attend with the rows of the step."""
        attention, kernels = self._spec, self._kernels
        count, heads, plain = len(rows), attention.heads, attention.plain_dim
        query = self._query(rows).reshape(count, heads, attention.head_dim)
        query = kernels.concatenated(query[:, :, plain:], query[:, :, :plain])
        latent = self._kv_down(rows)
        rotated = latent[:, attention.kv_rank :].reshape(count, 1, attention.rotary.size)
        expanded = self._kv_up(kernels.norm(latent[:, : attention.kv_rank], self._kv_latent))
        expanded = expanded.reshape(count, heads, plain + attention.value_dim)
        key = kernels.concatenated(rotated, expanded[:, :, :plain])
        value = expanded[:, :, plain:]
        if attention.query_growth is not None:
            query = kernels.grown(query, step.positions, attention.query_growth)
        return self._out(kernels.attend(attention, self._weights, (query, key, value), step))

    def _query_by_latent(self, rows: Rows) -> Rows:
        latent = self._kernels.norm(self._query_down(rows), self._query_latent)
        return self._query_up(latent)


class MLP:
    """`down(activation(gate) * up)`, or `down(activation(up))`."""

    def __init__(self, mlp: spec.MLP, weights: Weights, hidden: int, prefix: str = "") -> None:
        """`prefix` is what its names begin with: the shared expert's differ."""
        self._inner = weights.inner(prefix, mlp, hidden)
        self._down = weights.linear(prefix + "down", hidden, mlp.size, has_bias=mlp.has_bias)

    def __call__(self, rows: Rows) -> Rows:
        """Map the rows."""
        return self._down(self._inner(rows))


class Experts:
    """A mixture of experts, with a shared one or without."""

    def __init__(self, experts: spec.Experts, weights: Weights, hidden: int) -> None:
        routing, self._kernels = experts.routing, weights.kernels
        self._routing = routing
        self._router = weights.linear("router", routing.count, hidden, has_bias=routing.has_bias)
        self._correction = None
        if routing.has_correction:
            self._correction = weights.vector("correction", routing.count)
        self._experts = weights.experts(routing.count, experts.mlp, hidden)
        self._shared = self._shared_gate = None
        if experts.shared is not None:
            self._shared = MLP(experts.shared, weights, hidden, "shared_")
            if experts.shared_gate:
                self._shared_gate = weights.linear("shared_gate", 1, hidden)

    def __call__(self, rows: Rows) -> Rows:
        """Map the rows."""
        kernels = self._kernels
        scores = self._router(rows)
        chosen, factors = kernels.route(scores, self._routing, self._correction)
        result = self._experts.multiply(rows, chosen, factors)
        if self._shared is None:
            return result
        shared = self._shared(rows)
        if self._shared_gate is not None:
            shared = shared * kernels.sigmoid(self._shared_gate(rows))
        return result + shared


def mixer_of(layer: spec.Layer, weights: Weights, hidden: int) -> Mixer:
    """The part of a layer that reads other tokens."""
    if isinstance(layer.mixer, spec.LatentAttention):
        return LatentAttention(layer.mixer, weights, hidden)
    return Attention(layer.mixer, weights, hidden)


def feed_forward_of(layer: spec.Layer, weights: Weights, hidden: int) -> FeedForward:
    """The part of a layer that maps each token for itself."""
    if isinstance(layer.feed_forward, spec.Experts):
        return Experts(layer.feed_forward, weights, hidden)
    return MLP(layer.feed_forward, weights, hidden)
