"""Embeddings that look tokens up in the packed weight of the head that they are tied to.

So the weight is in memory once: a token's row is every 16th element of a panel, which costs a
lookup some microseconds.
"""

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from pyengine.models.linear_products import KernelProduct

_numbers = count()


class PackedEmbedding(nn.Module):
    """The rows of a packed weight `[tokens, features]`, times `scale`."""

    def __init__(self, product: KernelProduct, scale: float = 1.0) -> None:
        super().__init__()
        self.product = product
        self._scale = scale
        self._number = next(_numbers)
        _embeddings[self._number] = self

    @property
    def weight(self) -> Any:
        """Opaque, for its shape and dtype."""
        return self.product.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`[...]` to `[..., features]`."""
        features = self.product.weight.shape[1]
        rows: torch.Tensor = torch.ops.pyengine.packed_embedding(ids, self._number, features)
        return rows if self._scale == 1.0 else rows * self._scale


def packed_embedding(embedding: nn.Module, product: KernelProduct) -> nn.Module:
    """A `PackedEmbedding` in the place of `embedding`; that one if it does more than look up."""
    from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding

    if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        return embedding
    if type(embedding) is nn.Embedding:
        return PackedEmbedding(product)
    if _code(type(embedding)) == _code(GemmaTextScaledWordEmbedding):
        scale: Any = embedding.embed_scale
        return PackedEmbedding(product, float(scale))
    return embedding


def _code(kind: type[nn.Module]) -> tuple[object, ...]:
    code: Any = getattr(kind.forward, "__code__", None)
    return (code.co_code, code.co_names, code.co_consts) if code else (kind,)


_embeddings: "WeakValueDictionary[int, PackedEmbedding]" = WeakValueDictionary()
"""A compiled graph cannot hold a packed weight: it holds the number of the embedding that does."""


def _look_up(ids: torch.Tensor, number: int, _features: int) -> torch.Tensor:
    return _embeddings[number].product.gather(ids)


def _shape(ids: torch.Tensor, _number: int, features: int) -> torch.Tensor:
    return ids.new_empty(*ids.shape, features, dtype=torch.float32)


torch.library.define(
    "pyengine::packed_embedding", "(Tensor ids, int number, int features) -> Tensor"
)
torch.library.impl("pyengine::packed_embedding", "CPU")(_look_up)
torch.library.register_fake("pyengine::packed_embedding")(_shape)
