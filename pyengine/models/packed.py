"""Linear layers whose weights lie as oneDNN wants them: on CPUs with AVX-512.

torch multiplies float32 matrices by MKL, which leaves AVX-512 unused on processors that are not
Intel's. oneDNN, which torch carries too, does not: with weights laid out for it once it is a
quarter faster where 32 rows meet the weights of SmolLM2, and never slower (AMD EPYC, torch 2.15).
In bfloat16 torch goes by oneDNN in any case, and lays out the weights anew in every call.
torch's compiler lays out weights that it freezes in the same way, by the same operators
(`torch._inductor.fx_passes.mkldnn_fusion`).

oneDNN also computes what follows a product while that is in the processor's cache: the SiLU of a
gate, and the gate times what it lets through. By themselves they cost half as much as all products
where there are many rows.
"""

from itertools import count
from typing import Any, TypeGuard
from weakref import WeakValueDictionary

import torch
from torch import nn

from pyengine.models.joined import ATTENTION, replace_linears
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
        self._multiply_by = operators._linear_pointwise.binary
        self.number = next(_numbers)
        _layers[self.number] = self

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        if torch.compiler.is_compiling():
            found: torch.Tensor = torch.ops.pyengine.packed_linear(
                rows, self.number, self.out_features
            )
            return found
        return self.multiply(rows)

    def multiply(self, rows: torch.Tensor, after: str = "none") -> torch.Tensor:
        """`forward`, outside a graph; `after` is oneDNN's name of what is done to each element."""
        found: torch.Tensor = self._multiply(rows, self.weight, self.bias, after, [], "")
        return found

    def multiply_gated(self, rows: torch.Tensor, gate: "PackedLinear") -> torch.Tensor:
        """`silu(gate(rows)) * self(rows)`, outside a graph."""
        gates = gate.multiply(rows, "swish")
        found: torch.Tensor = self._multiply_by(rows, gates, self.weight, self.bias, "mul")
        return found


class PackedMLP(nn.Module):
    """Computes `down(silu(gate(rows)) * up(rows))`, as transformers' `LlamaMLP` does.

    In bfloat16 the gate is rounded after the SiLU only.
    """

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        layers: dict[str, Any] = dict(mlp.named_children())
        self.gate_proj = PackedLinear(layers["gate_proj"])
        self.up_proj = PackedLinear(layers["up_proj"])
        self.down_proj = PackedLinear(layers["down_proj"])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` to `[..., hidden]`."""
        up, gate = self.up_proj, self.gate_proj
        gated: torch.Tensor
        if torch.compiler.is_compiling():
            gated = torch.ops.pyengine.packed_gated(rows, up.number, gate.number, up.out_features)
        else:
            gated = up.multiply_gated(rows, gate)
        found: torch.Tensor = self.down_proj(gated)
        return found


_layers: "WeakValueDictionary[int, PackedLinear]" = WeakValueDictionary()
"""A compiled graph cannot hold a packed weight: it holds the number of the layer that does."""


def _packed_linear(rows: torch.Tensor, number: int, _out_features: int) -> torch.Tensor:
    return _layers[number].multiply(rows)


def _packed_gated(rows: torch.Tensor, up: int, gate: int, _out_features: int) -> torch.Tensor:
    return _layers[up].multiply_gated(rows, _layers[gate])


def _shape(rows: torch.Tensor, *numbers: int) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], numbers[-1])


# Not `custom_op`, which costs several microseconds more for each of some hundred layers.
torch.library.define(
    "pyengine::packed_linear", "(Tensor rows, int number, int out_features) -> Tensor"
)
torch.library.impl("pyengine::packed_linear", "CPU")(_packed_linear)
torch.library.register_fake("pyengine::packed_linear")(_shape)
torch.library.define(
    "pyengine::packed_gated", "(Tensor rows, int up, int gate, int out_features) -> Tensor"
)
torch.library.impl("pyengine::packed_gated", "CPU")(_packed_gated)
torch.library.register_fake("pyengine::packed_gated")(_shape)


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

    Query, key and value become one (`models/joined.py`), a gated MLP with its SiLU a `PackedMLP`.
    Weights are copied one by one, and given back where nothing else holds them: an embedding that
    is tied to one stays as it was.
    """
    num_gated = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_gated_mlp(child):
                setattr(parent, name, PackedMLP(child))
                num_gated += 3
    return num_gated + replace_linears(model, _is_linear, PackedLinear, (ATTENTION,))


def _is_gated_mlp(module: nn.Module) -> bool:
    """Whether it is `LlamaMLP`, or the same instruction by instruction: most families copy it."""
    from transformers.activations import SiLUActivation
    from transformers.models.llama.modeling_llama import LlamaMLP

    layers = dict(module.named_children())
    if layers.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    linears = [layer for name, layer in layers.items() if name != "act_fn"]
    is_plain = type(layers["act_fn"]) in (nn.SiLU, SiLUActivation) and all(map(_is_linear, linears))
    return is_plain and _instructions(type(module)) == _instructions(LlamaMLP)


def _instructions(kind: type[nn.Module]) -> tuple[object, ...]:
    code: Any = getattr(kind.forward, "__code__", None)
    return (code.co_code, code.co_names, code.co_consts) if code else (kind,)


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.weight.dtype in _FORMATS
