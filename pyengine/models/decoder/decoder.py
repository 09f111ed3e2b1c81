"""The decoder: embedding, layers, norm, head. One forward pass for all families and devices.

A token's way through it: `Decoder.__call__` looks its vector up, each `DecoderLayer` adds the
results of attention and of the feed-forward part to it, and the head maps some rows to logits.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyengine.models.decoder.kernels import Rows, Step, Table, TableUse
from pyengine.models.decoder.layers import LayerCaches, TokenInput, feed_forward_of, mixer_of
from pyengine.models.decoder.spec import DecoderSpec, Layer
from pyengine.models.decoder.weights import Weights

if TYPE_CHECKING:
    from pyengine.attention.backend import AttentionMetadata
    from pyengine.kv_cache.states import StateInputs


_NOTHING: Any = None
"""The change before the first layer."""


class DecoderLayer:
    """Attention and feed-forward, each with its norms.

    The residual goes from layer to layer as two parts, the sum so far and the change that is still
    to be added: the addition and the norm after it are one operation.
    """

    def __init__(self, layer: Layer, weights: Weights, hidden: int, caches: LayerCaches) -> None:
        self._kernels, self._scale = weights.kernels, layer.residual_scale
        self._rank = weights.rank
        self._is_parallel = layer.is_parallel
        norm = weights.optional_norm
        self._before_mixer = norm("before_mixer", layer.before_mixer, hidden)
        self._mixer = mixer_of(layer, weights, hidden, caches)
        self._after_mixer = norm("after_mixer", layer.after_mixer, hidden)
        self._before_feed_forward = norm("before_feed_forward", layer.before_feed_forward, hidden)
        self._feed_forward = feed_forward_of(layer, weights, hidden)
        self._after_feed_forward = norm("after_feed_forward", layer.after_feed_forward, hidden)
        self._token_input = None
        if layer.token_input is not None:
            after = layer.after_feed_forward
            self._token_input = TokenInput(layer.token_input, after, weights, hidden)
        self._scalar = weights.scalar("scalar") if layer.has_scalar else None

    def __call__(self, stream: Rows, change: Rows, step: Step) -> tuple[Rows, Rows]:
        """The residual `[T, hidden]` and the change that this layer adds to it, or None."""
        kernels, scale, rank = self._kernels, self._scale, self._rank
        if self._mixer is not None:
            stream, rows = kernels.add_norm(stream, change, scale, self._before_mixer)
            change = self._mixer(rows, step)
            if self._is_parallel and self._feed_forward is not None:
                if self._before_feed_forward is not None:
                    rows = kernels.norm(stream, self._before_feed_forward)
                return stream, rank.sum(kernels.added(change, self._feed_forward(rows, step)))
            change = rank.sum(change)
            if self._after_mixer is not None:
                change = kernels.norm(change, self._after_mixer)
        if self._feed_forward is not None:
            stream, rows = kernels.add_norm(stream, change, scale, self._before_feed_forward)
            change = rank.sum(self._feed_forward(rows, step))
            if self._after_feed_forward is not None:
                change = kernels.norm(change, self._after_feed_forward)
        if self._token_input is not None:
            stream, rows = kernels.add_norm(stream, change, scale, None)
            change = self._token_input(rows, step)
        if self._scalar is None:
            return stream, change
        stream, rows = kernels.add_norm(stream, change, scale, None)
        return kernels.multiplied(rows, self._scalar), _NOTHING


class DividedTable:
    """An embedding or a head; each rank of a divided model has a part of the vocabulary."""

    def __init__(
        self, name: str, weights: Weights, vocabulary: int, hidden: int, use: TableUse
    ) -> None:
        self._rank, self._vocabulary = weights.rank, vocabulary
        self._part = weights.rank.part(vocabulary)
        self._table = weights.table(name, vocabulary, hidden, use=use, is_divided=True)

    def gather(self, ids: Rows) -> Rows:
        """`[T]` to `[T, hidden]`."""
        own = ids - self._part.start
        is_here = (own >= 0) & (own < self._part.stop - self._part.start)
        return self._rank.sum(self._table.gather(own * is_here) * is_here[:, None])

    def multiply(self, rows: Rows) -> Rows:
        """`[S, hidden]` to `[S, vocab]`."""
        return self._rank.gather(self._table.multiply(rows), self._vocabulary)


def table_of(
    name: str, weights: Weights, vocabulary: int, hidden: int, use: TableUse = "both"
) -> Table:
    """An embedding or a head, or a rank's part of it."""
    if weights.rank.size == 1:
        return weights.table(name, vocabulary, hidden, use=use)
    return DividedTable(name, weights, vocabulary, hidden, use)


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The parts that a new decoder shares with a `decoder` of the same spec and kernels.

    `layers` are the numbers of layers; with `outside`, what is outside of them, too.
    """

    decoder: "Decoder"
    layers: frozenset[int]
    outside: bool


class Decoder:
    """A causal language model over a paged KV cache, or one rank's part of it.

    Building one reads all of its weights, layer by layer, but not those that are `unchanged`.
    """

    def __init__(
        self, spec: DecoderSpec, weights: Weights, unchanged: "Unchanged | None" = None
    ) -> None:
        self.spec = spec
        self.kernels, self.rank = weights.kernels, weights.rank
        self.adapters = weights.adapters
        if unchanged is not None and unchanged.outside:
            self._take_outside(unchanged.decoder)
        else:
            self._read_outside(spec, weights)
        self._layers = _layers(spec, weights, unchanged)
        self._residual_scale = spec.layers[-1].residual_scale
        # In the order of layers: a compiled graph is found in torch's cache by its text.
        mixers = (layer.attention for layer in spec.layers)
        rotaries = [mixer.rotary for mixer in mixers if mixer is not None]
        self._rotaries = [rotary for rotary in dict.fromkeys(rotaries) if rotary is not None]

    def _read_outside(self, spec: DecoderSpec, weights: Weights) -> None:
        """Read what is outside of layers."""
        hidden, vocabulary = spec.hidden_size, spec.vocab_size
        # A head in the file is used, whatever the configuration says.
        is_tied = spec.is_tied and not weights.differs("head", "embedding", vocabulary, hidden)
        use: TableUse = "both" if is_tied else "lookup"
        self._embedding = table_of("embedding", weights, vocabulary, hidden, use)
        self._positions = None
        if spec.learned_positions is not None:
            self._positions = weights.table(
                "positions", spec.learned_positions, hidden, use="lookup"
            )
        self._token_inputs = TokenInputs(spec, weights) if spec.token_input else None
        self._norm = weights.norm("norm", spec.norm, hidden)
        self._head = self._embedding
        if not is_tied:
            self._head = table_of("head", weights, vocabulary, hidden, "product")

    def _take_outside(self, other: "Decoder") -> None:
        """Share what is outside of layers with another decoder."""
        self._embedding, self._head, self._norm = other._embedding, other._head, other._norm
        self._positions, self._token_inputs = other._positions, other._token_inputs

    def __call__(
        self,
        ids: Rows,
        positions: Rows,
        logits_rows: Rows,
        metadata: "AttentionMetadata",
        states: "StateInputs | None" = None,
        adapter_slots: Rows = None,
    ) -> Rows:
        """The logits `[S, vocab]` of the rows `logits_rows` `[S]`.

        `ids` and `positions` are `[T]`, the tokens of all sequences of a step; `metadata` is its
        attention, prepared over the pool that `spec.cache_specs` describes. `states` are those of
        its sequences, over the pool that `spec.state_specs` describes, if that has any.
        `adapter_slots` are those of its tokens, int32 `[T]`, -1: none.
        """
        return self.logits(
            self.hidden_states(
                ids, positions, metadata, states, rows=logits_rows, adapter_slots=adapter_slots
            )
        )

    def hidden_states(
        self,
        ids: Rows,
        positions: Rows,
        metadata: "AttentionMetadata",
        states: "StateInputs | None" = None,
        *,
        rows: Rows = None,
        adapter_slots: Rows = None,
    ) -> Rows:
        """The states after the last norm `[T, hidden]`, or those of some `rows` `[S]` of the T."""
        kernels = self.kernels
        angles = {rotary: kernels.angles(positions, rotary) for rotary in self._rotaries}
        stream, change = self.embedded(ids, positions), _NOTHING
        step = Step(ids, positions, metadata, angles, states=states)
        if states is not None:
            step = replace(step, sequences=kernels.sequences(states))
        if adapter_slots is not None and self.adapters is not None:
            max_loras = self.adapters.limits.max_loras
            step = replace(step, adapters=kernels.adapter_slots(adapter_slots, max_loras))
        if self._token_inputs is not None:
            step = replace(step, token_input=self._token_inputs(stream, step))
        for layer in self._layers:
            stream, change = layer(stream, change, step)
        if rows is not None:
            stream, change = stream[rows], None if change is None else change[rows]
        return kernels.add_norm(stream, change, self._residual_scale, self._norm)[1]

    def logits(self, rows: Rows, head: Table | None = None) -> Rows:
        """The logits `[S, vocab]` of hidden states `[S, hidden]`, by the model's head."""
        spec, logits = self.spec, (head or self._head).multiply(rows)
        if spec.logit_scale != 1.0:
            logits = self.kernels.multiplied(logits, spec.logit_scale)
        if spec.logit_softcap is None:
            return logits
        return self.kernels.capped(logits, spec.logit_softcap)

    def embedded(self, ids: Rows, positions: Rows, table: Table | None = None) -> Rows:
        """The vectors `[T, hidden]` of tokens `[T]`, by the model's embedding."""
        rows = (table or self._embedding).gather(ids)
        if self.spec.embedding_scale != 1.0:
            rows = self.kernels.scaled(rows, self.spec.embedding_scale)
        if self._positions is None:
            return rows
        return self.kernels.added(rows, self._positions.gather(positions))


class TokenInputs:
    """The inputs of all layers for each token: see `spec.TokenInput`."""

    def __init__(self, spec: DecoderSpec, weights: Weights) -> None:
        token_input, count = spec.token_input, len(spec.layers)
        assert token_input is not None
        self._kernels, self._size = weights.kernels, token_input.size
        self._hidden, width = spec.hidden_size, count * self._size
        self._table = weights.table("token_inputs", token_input.vocab_size, width, use="lookup")
        self._product = weights.linear("token_input_product", width, spec.hidden_size)
        self._norm = weights.norm("token_input_norm", token_input.norm, token_input.size)

    def __call__(self, embedded: Rows, step: Step) -> Rows:
        """`[T, layers, size]` for the step's tokens `[T]` and their embeddings `[T, hidden]`."""
        kernels, shape = self._kernels, (len(step.ids), -1, self._size)
        looked_up = kernels.scaled(self._table.gather(step.ids), self._size**0.5)
        product = kernels.scaled(self._product(embedded, step), self._hidden**-0.5)
        normed = kernels.norm(product.reshape(shape), self._norm)
        return kernels.scaled(kernels.added(normed, looked_up.reshape(shape)), 0.5**0.5)


def _layers(spec: DecoderSpec, weights: Weights, unchanged: Unchanged | None) -> list[DecoderLayer]:
    """The layers of a decoder; those that share keys and values have the cache of their source."""
    caches = {number: cache for cache, number in enumerate(spec.cached)}
    states = {number: state for state, number in enumerate(spec.recurrent)}
    layers = []
    for number, layer in enumerate(spec.layers):
        if unchanged is not None and number in unchanged.layers:
            layers.append(unchanged.decoder._layers[number])
            continue
        shares = None if layer.attention is None else layer.attention.shares
        cache = caches.get(number if shares is None else shares)
        own = weights.of_layer(number)
        of_layer = LayerCaches(cache, states.get(number))
        layers.append(DecoderLayer(layer, own, spec.hidden_size, of_layer))
    return layers
