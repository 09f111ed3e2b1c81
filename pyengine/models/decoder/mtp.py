"""Layers for multi-token prediction (MTP), which follow a model's last layer in its files.

Gloeckle et al. (2024), arXiv:2404.19737, and DeepSeek-V3, section 2.2. Each is one more decoder
layer. Its inputs are the embedding of a token and the hidden state before it, its results states
from which the head predicts one token further. Embedding and head are the model's.
"""

from typing import TYPE_CHECKING

from pyengine.models.decoder.decoder import Decoder, DecoderLayer, table_of
from pyengine.models.decoder.kernels import Rows, Step, Table, TableUse
from pyengine.models.decoder.layers import LayerCaches
from pyengine.models.decoder.spec import DecoderSpec, Layer
from pyengine.models.decoder.weights import Weights

if TYPE_CHECKING:
    from pyengine.attention.backend import AttentionMetadata


class MTPLayer:
    """A decoder layer behind the projection of a token's embedding and the state before it."""

    def __init__(self, layer: Layer, spec: DecoderSpec, weights: Weights, cache: int) -> None:
        """`cache` is the number of its layer in the pool."""
        hidden, self._kernels = spec.hidden_size, weights.kernels
        self._embedding_norm = weights.norm("mtp_embedding_norm", spec.norm, hidden)
        self._state_norm = weights.norm("mtp_state_norm", spec.norm, hidden)
        self._projection = weights.linear("mtp_projection", hidden, 2 * hidden)
        self._layer = DecoderLayer(layer, weights, hidden, LayerCaches(cache))
        self._norm = weights.norm("mtp_norm", spec.norm, hidden)
        self._scale = layer.residual_scale
        self._rotary = None if layer.attention is None else layer.attention.rotary

    def __call__(
        self, ids: Rows, vectors: Rows, states: Rows, positions: Rows, metadata: "AttentionMetadata"
    ) -> Rows:
        """See `MTPLayers.states`; `vectors` `[T, hidden]` are the embeddings of `ids`."""
        kernels, shape = self._kernels, (len(ids), 1, -1)
        first = kernels.norm(vectors, self._embedding_norm).reshape(shape)
        second = kernels.norm(states, self._state_norm).reshape(shape)
        pairs = kernels.concatenated(first, second).reshape(len(ids), -1)
        angles = {}
        if self._rotary is not None:
            angles[self._rotary] = kernels.angles(positions, self._rotary)
        step = Step(ids, positions, metadata, angles)
        stream, change = self._layer(self._projection(pairs, step), None, step)
        return kernels.add_norm(stream, change, self._scale, self._norm)[1]


class MTPLayers:
    """The MTP layers of a model, in order. Their caches follow those of its layers.

    Building them reads their weights.
    """

    def __init__(self, decoder: Decoder, weights: Weights) -> None:
        spec, self._decoder = decoder.spec, decoder
        first, caches = len(spec.layers), len(spec.cached)
        of_layers = [weights.of_layer(first + number) for number in range(len(spec.mtp_layers))]
        self._layers = [
            MTPLayer(layer, spec, of_layers[number], caches + number)
            for number, layer in enumerate(spec.mtp_layers)
        ]
        self._embeddings = [_own(layer, spec, "mtp_embedding", "embedding") for layer in of_layers]
        self._heads = [_own(layer, spec, "mtp_head", "head") for layer in of_layers]

    def __len__(self) -> int:
        """The number of layers."""
        return len(self._layers)

    def states(
        self, layer: int, ids: Rows, previous: Rows, positions: Rows, metadata: "AttentionMetadata"
    ) -> Rows:
        """The states of a layer `[T, hidden]`, after its norm.

        `ids` and `positions` are `[T]`; `previous` `[T, hidden]` are the states before each token,
        of the layer before, and for the first one of the model. `metadata` is over the whole pool.
        """
        embedded = self._decoder.embedded(ids, positions, self._embeddings[layer])
        return self._layers[layer](ids, embedded, previous, positions, metadata)

    def logits(self, layer: int, rows: Rows) -> Rows:
        """The logits `[S, vocab]` of states `[S, hidden]` of a layer."""
        return self._decoder.logits(rows, self._heads[layer])


def _own(weights: Weights, spec: DecoderSpec, name: str, shared: str) -> Table | None:
    """A table that the file has for this layer, unless it is that of the model."""
    rows, columns = spec.vocab_size, spec.hidden_size
    if not weights.has(name):
        return None
    if not weights.outside().has(shared):  # the head of a tied model
        shared = "embedding"
    if not weights.differs(name, shared, rows, columns):
        return None
    use: TableUse = "lookup" if name == "mtp_embedding" else "product"
    return table_of(name, weights, rows, columns, use)
