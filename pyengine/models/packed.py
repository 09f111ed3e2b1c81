"""Linear layers whose weights lie as oneDNN wants them: on CPUs with AVX-512.

torch multiplies float32 matrices by MKL, which leaves AVX-512 unused on processors that are not
Intel's. oneDNN, which torch carries too, does not: with weights laid out for it once it is a
quarter faster where 32 rows meet the weights of SmolLM2, and never slower (AMD EPYC, torch 2.15).
In bfloat16 torch goes by oneDNN in any case, and lays out the weights anew in every call.
torch's compiler lays out weights that it freezes in the same way, by the same operators
(`torch._inductor.fx_passes.mkldnn_fusion`).
"""

from itertools import count
from typing import Any, TypeGuard
from weakref import WeakValueDictionary

import torch
from torch import nn

from pyengine.models.joined import replace_linears
from pyengine.models.placement import bfloat16_instructions

_ROWS = 32
"""Rows for which weights are laid out: as good for one and for hundreds."""

_FORMATS = (torch.float32, torch.bfloat16)

_numbers = count()


class PackedLinear(nn.Module):
    """Computes what `linear` does; its weight is a copy, laid out for oneDNN.

    `weight` is opaque: it has a shape and a dtype, and no arithmetic of its own.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        operators: Any = torch.ops.mkldnn
        with torch.no_grad():
            self.weight = operators._reorder_linear_weight(linear.weight.detach(), _ROWS)
        bias: torch.Tensor | None = linear.bias
        self.bias = None if bias is None else bias.detach()
        self._multiply = operators._linear_pointwise.default
        self._number = next(_numbers)
        _layers[self._number] = self

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        if torch.compiler.is_compiling():
            found: torch.Tensor = torch.ops.pyengine.packed_linear(
                rows, self._number, self.out_features
            )
            return found
        return self.multiply(rows)

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """`forward`, outside a graph."""
        found: torch.Tensor = self._multiply(rows, self.weight, self.bias, "none", [], "")
        return found


_layers: "WeakValueDictionary[int, PackedLinear]" = WeakValueDictionary()
"""A compiled graph cannot hold a packed weight: it holds the number of the layer that does."""


def _packed_linear(rows: torch.Tensor, number: int, _out_features: int) -> torch.Tensor:
    return _layers[number].multiply(rows)


def _shape(rows: torch.Tensor, _number: int, out_features: int) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], out_features)


# Not `custom_op`, which costs several microseconds more for each of some hundred layers.
torch.library.define(
    "pyengine::packed_linear", "(Tensor rows, int number, int out_features) -> Tensor"
)
torch.library.impl("pyengine::packed_linear", "CPU")(_packed_linear)
torch.library.register_fake("pyengine::packed_linear")(_shape)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packing helps a model there; in bfloat16 where the CPU has instructions for it."""
    onednn: Any = torch.backends.mkldnn
    if device.type != "cpu" or dtype not in _FORMATS or not onednn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bfloat16_instructions() is not None
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def pack_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` of `model` by a packed one, and return how many there were.

    Those that multiply the same rows become one (`models/joined.py`). Weights are copied one by
    one, and given back where nothing else holds them: an embedding that is tied to one stays as it
    was.
    """
    return replace_linears(model, _is_linear, PackedLinear)


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.weight.dtype in _FORMATS
