"""Linear layers and embeddings whose weights stay in 4 to 8 bits, multiplied by the Rust kernels.

A `QuantizedProduct` is a product as those of `models/cpu_kernels.py`: `ProductLinear`,
`PrepackedMLP` and `PackedEmbedding` compute with it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import nn

from pyengine.kv_cache import QuantizedWeight
from pyengine.models.cpu_kernels import kernel_threads
from pyengine.models.linear import (
    ATTENTION,
    GATED,
    PrepackedMLP,
    ProductLinear,
    is_gated_mlp,
    mlp_linears,
    replace_linears,
)
from pyengine.utils.host_copy import cpu_array


class QuantizedProduct:
    """Products with one quantised weight. `dtype` is that of rows and results.

    `order` are the inputs in the order in which the weight has them, if that is not their own.
    A row has the same bits in every batch. Layers with the same weight can share it.
    """

    def __init__(
        self,
        packed: QuantizedWeight,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        self._packed, self._order = packed, order
        self._bias = None if bias is None else cpu_array(bias.detach().float().contiguous())
        self._threads = kernel_threads(torch.get_num_threads())
        self.weight = torch.empty(packed.shape, dtype=dtype, device="meta")

    @property
    def format(self) -> str:
        """The name of the weight's format, as in GGUF files: `Q4_K`."""
        return self._packed.format

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` times the transposed weight."""
        flat, out = self._arrays(rows)
        self.write(cpu_array(flat), cpu_array(out))
        return out.view(*rows.shape[:-1], out.shape[1])

    @property
    def has_order(self) -> bool:
        """True if rows have to be sorted before `write`."""
        return self._order is not None

    def write(self, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """The same from `rows` `[T, in_features]`, in order, into `out` `[T, out_features]`."""
        self._packed.multiply(self._threads, rows, out, self._bias)

    def can_gate(self, gate: object) -> bool:
        """True if `write_gated` takes this gate."""
        if not isinstance(gate, QuantizedProduct) or self.format != gate.format:
            return False
        return all(item._bias is None and item._order is None for item in (self, gate))

    def write_gated(
        self, rows: npt.NDArray[Any], gate: "QuantizedProduct", out: npt.NDArray[Any]
    ) -> None:
        """`multiply_gated` from `rows` into `out` `[T, out_features]`, for a gate of `can_gate`."""
        self._packed.multiply_gated(self._threads, rows, gate._packed, out)

    def multiply_gated(self, rows: torch.Tensor, gate: "QuantizedProduct") -> torch.Tensor:
        """`silu(gate(rows)) * self(rows)`."""
        if not self.can_gate(gate):
            return torch.nn.functional.silu(gate.multiply(rows)) * self.multiply(rows)
        flat, out = self._arrays(rows)
        self.write_gated(cpu_array(flat), gate, cpu_array(out))
        return out.view(*rows.shape[:-1], out.shape[1])

    def gather(self, outputs: torch.Tensor) -> torch.Tensor:
        """The rows of the weight with these numbers: `[...]` to `[..., in_features]`."""
        flat = outputs.reshape(-1).to(torch.int64).contiguous()
        out = torch.empty(flat.shape[0], self.weight.shape[1], dtype=self.weight.dtype)
        self._packed.gather(cpu_array(flat), cpu_array(out))
        return out.view(*outputs.shape, out.shape[1])

    def _arrays(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `[T, in_features]`, and memory for their products."""
        out_features, in_features = self.weight.shape
        flat = rows.detach().reshape(-1, in_features).contiguous()
        if self._order is not None:
            flat = flat.index_select(1, self._order)
        return flat, flat.new_empty(flat.shape[0], out_features)


def replace_by_products(
    model: nn.Module,
    takes: Callable[[nn.Module], bool],
    made: Callable[[Sequence[nn.Linear]], QuantizedProduct],
    kind: Callable[[nn.Linear], object] = lambda _: None,
) -> int:
    """Replace the linear layers that `takes` takes by products; returns how many there were.

    Those of a gated MLP are computed with its SiLU. Query, key and value, and gate and up
    elsewhere, are one product where they are of one `kind`: `made` gets all of them then.
    """
    num_gated = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_gated_mlp(child) and all(map(takes, mlp_linears(child))):
                layers = [_layer(made([linear])) for linear in mlp_linears(child)]
                num_gated += len(layers)
                setattr(parent, name, PrepackedMLP(*layers))
    together = (ATTENTION, GATED)
    num_others = replace_linears(
        model, takes, lambda linears: _layer(made(linears)), together, kind
    )
    return num_gated + num_others


def joined_bias(linears: Sequence[nn.Linear]) -> torch.Tensor | None:
    """The biases of layers whose outputs follow each other, if they have any."""
    biases: list[Any] = [linear.bias for linear in linears]
    return None if biases[0] is None else torch.cat(biases)


def _layer(product: QuantizedProduct) -> ProductLinear:
    out_features, in_features = product.weight.shape
    return ProductLinear(product, in_features, out_features)
