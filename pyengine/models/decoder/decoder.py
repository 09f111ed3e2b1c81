"""The decoder: embedding, layers, norm, head. One forward pass for all families and devices.

A token's way through it: `Decoder.__call__` looks its vector up, each `DecoderLayer` adds the
results of attention and of the feed-forward part to it, and the head turns the rows that are asked
for into logits.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyengine.models.decoder.kernels import Product, Rows, Step
from pyengine.models.decoder.layers import feed_forward_of, mixer_of
from pyengine.models.decoder.spec import DecoderSpec, Layer
from pyengine.models.decoder.weights import Weights

if TYPE_CHECKING:
    from pyengine.attention.backend import AttentionPlan


_NOTHING: Any = None
"""The change before the first layer."""


class DecoderLayer:
    """Attention and feed-forward, each with its norms.

    The residual goes from layer to layer as two parts, the sum so far and the change that is still
    to be added: the addition and the norm after it are one operation.
    """

    def __init__(self, layer: Layer, weights: Weights, hidden: int) -> None:
        self._kernels, self._scale = weights.kernels, layer.residual_scale
        self._is_parallel = layer.is_parallel
        self._before_mixer = weights.optional_norm("before_mixer", layer.before_mixer, hidden)
        self._after_mixer = weights.optional_norm("after_mixer", layer.after_mixer, hidden)
        self._before_feed_forward = weights.optional_norm(
            "before_feed_forward", layer.before_feed_forward, hidden
        )
        self._after_feed_forward = weights.optional_norm(
            "after_feed_forward", layer.after_feed_forward, hidden
        )
        self._mixer = mixer_of(layer, weights, hidden)
        self._feed_forward = feed_forward_of(layer, weights, hidden)

    def __call__(self, stream: Rows, change: Rows | None, step: Step) -> tuple[Rows, Rows]:
        """The residual `[T, hidden]` and the change that this layer adds to it."""
        kernels, scale = self._kernels, self._scale
        stream, rows = kernels.add_norm(stream, change, scale, self._before_mixer)
        change = self._mixer(rows, step)
        if self._is_parallel:
            if self._before_feed_forward is not None:
                rows = kernels.norm(stream, self._before_feed_forward)
            return stream, change + self._feed_forward(rows)
        if self._after_mixer is not None:
            change = kernels.norm(change, self._after_mixer)
        stream, rows = kernels.add_norm(stream, change, scale, self._before_feed_forward)
        change = self._feed_forward(rows)
        if self._after_feed_forward is not None:
            change = kernels.norm(change, self._after_feed_forward)
        return stream, change


class Decoder:
    """A causal language model over a paged KV cache.

    Building one reads all of its weights, layer by layer.
    """

    def __init__(self, spec: DecoderSpec, weights: Weights) -> None:
        self.spec = spec
        self._kernels: Any = weights.kernels
        hidden, vocabulary = spec.hidden_size, spec.vocab_size
        self._embedding = weights.table("embedding", vocabulary, hidden)
        self._positions = None
        if spec.learned_positions is not None:
            self._positions = weights.table("positions", spec.learned_positions, hidden)
        self._layers = [
            DecoderLayer(layer, weights.of_layer(number), hidden)
            for number, layer in enumerate(spec.layers)
        ]
        self._norm = weights.norm("norm", spec.norm, hidden)
        self._head: Product = self._embedding
        # A file that has a head of its own means it, whatever its configuration says.
        if not spec.is_tied or weights.differs("head", "embedding", vocabulary, hidden):
            self._head = weights.linear("head", vocabulary, hidden).product
        self._residual_scale = spec.layers[-1].residual_scale
        self._rotaries = {
            layer.mixer.rotary for layer in spec.layers if layer.mixer.rotary is not None
        }

    def __call__(
        self, ids: Rows, positions: Rows, logits_rows: Rows, plan: "AttentionPlan"
    ) -> Rows:
        """The logits `[S, vocab]` of the rows `logits_rows` `[S]`.

        `ids` and `positions` are `[T]`, the tokens of all sequences of a step; `plan` is the step's
        attention, prepared over the pool that `spec.cache_specs` describes.
        """
        kernels, spec = self._kernels, self.spec
        angles = {rotary: kernels.angles(positions, rotary) for rotary in self._rotaries}
        step = Step(ids, positions, logits_rows, plan, angles)
        stream, change = self._embedded(step), _NOTHING
        for layer in self._layers:
            stream, change = layer(stream, change, step)
        _, rows = kernels.add_norm(
            stream[logits_rows], change[logits_rows], self._residual_scale, self._norm
        )
        logits = self._head.multiply(rows)
        if spec.logit_scale != 1.0:
            logits = logits * spec.logit_scale
        return logits if spec.logit_softcap is None else kernels.capped(logits, spec.logit_softcap)

    def _embedded(self, step: Step) -> Rows:
        rows = self._embedding.gather(step.ids)
        if self.spec.embedding_scale != 1.0:
            rows = self._kernels.scaled(rows, self.spec.embedding_scale)
        if self._positions is not None:
            rows = rows + self._positions.gather(step.positions)
        return rows

    @property
    def layers(self) -> Sequence[DecoderLayer]:
        """Its layers, in order."""
        return self._layers
