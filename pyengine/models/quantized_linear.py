"""Linear layers and embeddings whose weights stay in 4 to 8 bits, multiplied by the Rust kernels.

A `QuantizedProduct` is a product as those of `models/cpu_kernels.py`: `ProductLinear`,
`PrepackedMLP` and `PackedEmbedding` compute with it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pyengine.cpu import QuantizedWeight
from pyengine.models.cpu_kernels import KernelProduct, kernel_threads
from pyengine.models.linear import (
    ATTENTION,
    GATED,
    PrepackedMLP,
    ProductLinear,
    gate_activation,
    mlp_linears,
    replace_linears,
)
from pyengine.utils.host_copy import cpu_array


class QuantizedProduct(KernelProduct):
    """Products with one quantised weight. `dtype` is that of rows and results.

    A row has the same bits in every batch. Layers with the same weight can share it.
    """

    def __init__(
        self, packed: QuantizedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> None:
        self._packed = packed
        self._bias = None if bias is None else cpu_array(bias.detach().float().contiguous())
        self._threads = kernel_threads(torch.get_num_threads())
        self.weight = torch.empty(packed.shape, dtype=dtype, device="meta")

    @property
    def format(self) -> str:
        """The name of the weight's format, as in GGUF files: `Q4_K`."""
        return str(self._packed.format)

    def can_gate(self, gate: object) -> bool:
        """See `KernelProduct.can_gate`."""
        same = isinstance(gate, QuantizedProduct) and self.format == gate.format
        return same and super().can_gate(gate)


class ReorderedProduct(QuantizedProduct):
    """The same with a weight whose inputs are in another order: `order` are their numbers."""

    def __init__(
        self,
        packed: QuantizedWeight,
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        order: torch.Tensor,
    ) -> None:
        super().__init__(packed, dtype, bias)
        self._order = order

    @property
    def takes_rows(self) -> bool:
        """See `KernelProduct.takes_rows`."""
        return False

    def can_gate(self, _gate: object) -> bool:
        """See `KernelProduct.can_gate`."""
        return False

    def _arrays(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat, out = super()._arrays(rows)
        return flat.index_select(1, self._order), out


def replace_by_products(
    model: nn.Module,
    takes: Callable[[nn.Module], bool],
    made: Callable[[Sequence[nn.Linear]], KernelProduct],
    kind: Callable[[nn.Linear], object] = lambda _: None,
) -> int:
    """Replace the linear layers that `takes` takes by products; returns how many there were.

    Those of a gated MLP are computed with its activation. Query, key and value, and gate and up
    elsewhere, are one product where they are of one `kind`: `made` gets all of them then.
    """
    num_gated = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            activation = gate_activation(child)
            if activation is not None and all(map(takes, mlp_linears(child))):
                gate, up, down = (_layer(made([linear])) for linear in mlp_linears(child))
                num_gated += 3
                setattr(parent, name, PrepackedMLP(gate, up, down, activation))
    together = (ATTENTION, GATED)
    num_others = replace_linears(
        model, takes, lambda linears: _layer(made(linears)), together, kind
    )
    return num_gated + num_others


def joined_bias(linears: Sequence[nn.Linear]) -> torch.Tensor | None:
    """The biases of layers whose outputs follow each other, if they have any."""
    biases: list[Any] = [linear.bias for linear in linears]
    return None if biases[0] is None else torch.cat(biases)


def _layer(product: KernelProduct) -> ProductLinear:
    out_features, in_features = product.weight.shape
    return ProductLinear(product, in_features, out_features)
