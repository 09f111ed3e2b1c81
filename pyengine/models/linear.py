"""Linear layers on the CPU: fused, and with weights laid out once.

Linear layers that multiply the same rows are one product, since a product has a cost that does not
depend on its size. The layers stay where transformers looks for them. The one that is called first
multiplies for all of them; the others, called with the very same tensor, have their part.

`models/linear_products.py` has the products, `models/linear_kernels.py` chooses among them. In
bfloat16 torch calls oneDNN in any case, and lays out the weights anew in every call. torch's
compiler lays out weights that it freezes by the same operators
(`torch._inductor.fx_passes.mkldnn_fusion`).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, TypeGuard
from weakref import WeakValueDictionary

import torch
from torch import nn

from pyengine.models.linear_kernels import LayerShape
from pyengine.models.linear_products import (
    FORMATS,
    KernelProduct,
    Product,
    kernel_supports,
    onednn_supports,
    prepared_product,
)
from pyengine.models.packed_embedding import packed_embedding

ATTENTION = ("q_proj", "k_proj", "v_proj")
GATED = ("gate_proj", "up_proj")
"""Names of layers of one parent that see the same input."""


class _FusedProduct:
    """The product of several layers, and what of it has not been asked for yet.

    Not a module: setting an attribute of one takes microseconds.
    """

    def __init__(self, product: nn.Module, sizes: list[int]) -> None:
        self.product = product
        self._sizes = sizes
        self._rows: torch.Tensor | None = None
        self._parts: Sequence[torch.Tensor] = ()
        self._to_come = 0

    def part(self, rows: torch.Tensor, place: int) -> torch.Tensor:
        """`[..., sizes[place]]`; not to be written to before the last part is asked for."""
        if rows is not self._rows:
            self._rows, self._parts = rows, self.product(rows).split(self._sizes, -1)
            self._to_come = len(self._sizes)
        part = self._parts[place]
        self._to_come -= 1
        if not self._to_come:
            self._rows, self._parts = None, ()
        return part


class FusedLinear(nn.Module):
    """One of several linear layers that are computed together."""

    def __init__(self, linear: nn.Linear, fused_product: _FusedProduct, place: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._fused, self._place = fused_product, place
        self.product = fused_product.product  # where those who walk over modules find it

    @property
    def weight(self) -> Any:
        """That of all of them: opaque, for its dtype."""
        return self._fused.product.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`; not contiguous."""
        return self._fused.part(rows, self._place)


def fuse_linears(model: nn.Module) -> int:
    """Join what sees the same input, on a device where a product more is a launch more.

    Returns how many layers `model` has of those that can be fused.
    """
    return replace_linears(
        model, lambda module: type(module) is nn.Linear, lambda linear: linear, (ATTENTION, GATED)
    )


def replace_linears(
    model: nn.Module,
    takes: Callable[[nn.Module], bool],
    made: Callable[[nn.Linear], nn.Module],
    together: Sequence[tuple[str, ...]],
) -> int:
    """Replace every linear layer that `takes` takes by what is `made` of it; returns how many.

    Those of a parent whose names stand `together` are fused first. Weights are freed one
    by one, where nothing else holds them.
    """
    num_replaced = 0
    for parent in list(model.modules()):
        names = [name for name, child in parent.named_children() if takes(child)]
        num_replaced += len(names)
        for group in together:
            linears: list[Any] = [getattr(parent, name) for name in group if name in names]
            if len(linears) == len(group) and _go_together(linears):
                fused_product = _FusedProduct(
                    made(_concatenated(linears)), [linear.out_features for linear in linears]
                )
                for place, name in enumerate(group):
                    setattr(parent, name, FusedLinear(linears[place], fused_product, place))
                    names.remove(name)
        for name in names:
            setattr(parent, name, made(getattr(parent, name)))
    return num_replaced


def _go_together(linears: Sequence[nn.Linear]) -> bool:
    kinds = {(linear.in_features, linear.bias is None, linear.weight.dtype) for linear in linears}
    return len(kinds) == 1


@torch.no_grad()
def _concatenated(linears: Sequence[nn.Linear]) -> nn.Linear:
    """A layer with the outputs of all of them, one after the other."""
    first, num_outputs = linears[0], sum(linear.out_features for linear in linears)
    whole = nn.Linear(first.in_features, num_outputs, bias=first.bias is not None, device="meta")
    whole.weight = nn.Parameter(
        torch.cat([linear.weight for linear in linears]), requires_grad=False
    )
    if first.bias is not None:
        whole.bias = nn.Parameter(
            torch.cat([linear.bias for linear in linears]), requires_grad=False
        )
    return whole


_numbers = count()


class PrepackedLinear(nn.Module):
    """Computes what `linear` does, by oneDNN or the Rust kernel; its weight is mostly a copy.

    `weight` has a shape and a dtype, and no arithmetic. With the product "onednn-unpacked" it is
    that of `linear`.
    """

    def __init__(self, linear: nn.Linear, product: Product = "onednn") -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.product = prepared_product(linear.weight, linear.bias, product)
        self.number = next(_numbers)
        _layers[self.number] = self

    @property
    def weight(self) -> Any:
        """Opaque, for its shape and dtype."""
        return self.product.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        if torch.compiler.is_compiling():
            found: torch.Tensor = torch.ops.pyengine.prepacked_linear(
                rows, self.number, self.out_features
            )
            return found
        return self.multiply(rows)

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """`forward`, outside a graph."""
        found: torch.Tensor = self.product.multiply(rows)
        return found

    def multiply_gated(self, rows: torch.Tensor, gate: "PrepackedLinear") -> torch.Tensor:
        """`silu(gate(rows)) * self(rows)`, outside a graph; both have the same kind of product."""
        found: torch.Tensor = self.product.multiply_gated(rows, gate.product)
        return found


class PrepackedMLP(nn.Module):
    """Computes `down(silu(gate(rows)) * up(rows))`, as transformers' `LlamaMLP` does.

    In bfloat16 the gate is rounded after the SiLU only.
    """

    def __init__(self, mlp: nn.Module, product: Product = "onednn") -> None:
        super().__init__()
        layers: dict[str, Any] = dict(mlp.named_children())
        self.gate_proj = PrepackedLinear(layers["gate_proj"], product)
        self.up_proj = PrepackedLinear(layers["up_proj"], product)
        self.down_proj = PrepackedLinear(layers["down_proj"], product)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` to `[..., hidden]`."""
        up, gate = self.up_proj, self.gate_proj
        gated: torch.Tensor
        if torch.compiler.is_compiling():
            gated = torch.ops.pyengine.prepacked_gated(
                rows, up.number, gate.number, up.out_features
            )
        else:
            gated = up.multiply_gated(rows, gate)
        found: torch.Tensor = self.down_proj(gated)
        return found


_layers: "WeakValueDictionary[int, PrepackedLinear]" = WeakValueDictionary()
"""A compiled graph cannot hold a prepacked weight: it holds the number of the layer that does."""


def _prepacked_linear(rows: torch.Tensor, number: int, _out_features: int) -> torch.Tensor:
    return _layers[number].multiply(rows)


def _prepacked_gated(rows: torch.Tensor, up: int, gate: int, _out_features: int) -> torch.Tensor:
    return _layers[up].multiply_gated(rows, _layers[gate])


def _shape(rows: torch.Tensor, *numbers: int) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], numbers[-1])


# Not `custom_op`, which costs several microseconds more for each of some hundred layers.
torch.library.define(
    "pyengine::prepacked_linear", "(Tensor rows, int number, int out_features) -> Tensor"
)
torch.library.impl("pyengine::prepacked_linear", "CPU")(_prepacked_linear)
torch.library.register_fake("pyengine::prepacked_linear")(_shape)
torch.library.define(
    "pyengine::prepacked_gated", "(Tensor rows, int up, int gate, int out_features) -> Tensor"
)
torch.library.impl("pyengine::prepacked_gated", "CPU")(_prepacked_gated)
torch.library.register_fake("pyengine::prepacked_gated")(_shape)


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """True if a model's layers can multiply there by more than torch's product."""
    return device.type == "cpu" and (onednn_supports(dtype) or kernel_supports(dtype))


Choose = Callable[[LayerShape, Sequence[torch.Tensor]], Product]
"""The product of layers of a shape; the weights are those of one of them."""


def always_onednn(_shape: LayerShape, _weights: Sequence[torch.Tensor]) -> Product:
    """oneDNN's product, in its own layout, for every layer."""
    return "onednn"


def prepack_linears(model: nn.Module, choose: Choose = always_onednn) -> int:
    """Let every `nn.Linear` of `model` multiply as `choose` says; returns how many there are.

    Query, key and value become one (`models/linear.py`), a gated MLP with its SiLU a
    `PrepackedMLP`.
    Weights are copied one by one, and released where nothing else holds them. An embedding that
    is tied to one looks up in our kernel's copy (`PackedEmbedding`), or stays as it was.
    """
    embedded = {
        layer.weight.data_ptr() for layer in model.modules() if isinstance(layer, nn.Embedding)
    }
    tied: dict[int, KernelProduct] = {}
    num_gated, unchanged = 0, set[nn.Module]()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_gated_mlp(child):
                num_gated += 3
                product = choose(*_gated_layers(child))
                if product == "torch":
                    unchanged.update(child.children())
                else:
                    setattr(parent, name, PrepackedMLP(child, product))

    def replaced(linear: nn.Linear) -> nn.Module:
        weight = linear.weight
        is_tied = weight.data_ptr() in embedded
        size = linear.in_features, linear.out_features
        product = choose(LayerShape(*size, weight.dtype, is_tied=is_tied), [weight])
        if product == "torch":
            return linear
        layer = PrepackedLinear(linear, product)
        if is_tied and product == "pyengine":
            tied[weight.data_ptr()] = layer.product
        return layer

    def is_left(module: nn.Module) -> bool:
        return _is_linear(module) and module not in unchanged

    num_replaced = num_gated + replace_linears(model, is_left, replaced, (ATTENTION,))
    _replace_embeddings(model, tied)
    return num_replaced


def _replace_embeddings(model: nn.Module, tied: Mapping[int, KernelProduct]) -> None:
    """Let embeddings look up in the products of their weights, which are known by address."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Embedding) and child.weight.data_ptr() in tied:
                setattr(parent, name, packed_embedding(child, tied[child.weight.data_ptr()]))


def _gated_layers(mlp: nn.Module) -> tuple[LayerShape, list[torch.Tensor]]:
    gate: Any = mlp.get_submodule("gate_proj")
    shape = LayerShape(gate.in_features, gate.out_features, gate.weight.dtype, is_gated=True)
    layers: list[Any] = [mlp.get_submodule(f"{name}_proj") for name in ("gate", "up", "down")]
    return shape, [layer.weight for layer in layers]


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
    return type(module) is nn.Linear and module.weight.dtype in FORMATS
