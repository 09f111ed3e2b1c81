"""Linear layers on the CPU: fused, and with weights laid out once.

Linear layers that multiply the same rows are one product, since a product has a cost that does not
depend on its size. The layers stay where transformers looks for them. The one that is called first
multiplies for all of them; the others, called with the very same tensor, have their part.

`models/cpu_kernels.py` has the products, `models/linear_kernels.py` chooses among them. In bfloat16
torch calls oneDNN, and lays out the weights anew in every call.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeGuard
from weakref import WeakValueDictionary

import torch
from torch import nn

from pyengine.models.cpu_kernels import (
    FORMATS,
    Activation,
    KernelProduct,
    Product,
    instructions_of,
    kernel_supports,
    onednn_supports,
    prepared_product,
)
from pyengine.models.linear_kernels import LayerShape

ATTENTION = ("q_proj", "k_proj", "v_proj")
GATED = ("gate_proj", "up_proj")
"""Names of layers of one parent that see the same input."""


@dataclass(slots=True, eq=False)
class _FusedProduct:
    """The product of several layers, and the parts of it that are still to be read.

    Not a module: setting an attribute of one takes microseconds.
    """

    product: nn.Module
    sizes: list[int]
    rows: torch.Tensor | None = None
    parts: Sequence[torch.Tensor] = ()
    num_unread: int = 0


class FusedLinear(nn.Module):
    """One of several linear layers that are computed together.

    `columns` are its outputs among theirs.
    """

    def __init__(self, linear: nn.Linear, fused_product: _FusedProduct, place: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._fused, self._place = fused_product, place
        self.product = fused_product.product  # where those who walk over modules find it
        first = sum(fused_product.sizes[:place])
        self.columns = slice(first, first + self.out_features)

    @property
    def weight(self) -> Any:
        """That of all of them: opaque, for its dtype."""
        return self._fused.product.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`; not contiguous.

        Not to be written to before the last of the layers is called.
        """
        fused = self._fused
        if rows is not fused.rows:
            fused.rows, fused.parts = rows, fused.product(rows).split(fused.sizes, -1)
            fused.num_unread = len(fused.sizes)
        part = fused.parts[self._place]
        fused.num_unread -= 1
        if not fused.num_unread:
            fused.rows, fused.parts = None, ()
        return part


def fuse_linears(model: nn.Module) -> int:
    """Join what sees the same input, on a device where a product more is a launch more.

    Returns how many layers `model` has of those that can be fused.
    """
    return replace_linears(
        model, lambda module: type(module) is nn.Linear, concatenated, (ATTENTION, GATED)
    )


def replace_linears(
    model: nn.Module,
    takes: Callable[[nn.Module], bool],
    made: Callable[[Sequence[nn.Linear]], nn.Module],
    together: Sequence[tuple[str, ...]],
    kind: Callable[[nn.Linear], object] = lambda _: None,
) -> int:
    """Replace every linear layer that `takes` takes by what is `made` of it; returns how many.

    Those of a parent whose names are `together` are fused first, if they are of one `kind`: `made`
    then gets all of them, whose outputs follow each other. Weights are freed one by one, where
    nothing else holds them.
    """
    num_replaced = 0
    for parent in list(model.modules()):
        names = [name for name, child in parent.named_children() if takes(child)]
        num_replaced += len(names)
        for group in together:
            if not set(group) <= set(names):
                continue
            for same in _of_one_kind(parent, group, kind):
                linears: list[Any] = [getattr(parent, name) for name in same]
                if len(linears) > 1:
                    fused_product = _FusedProduct(
                        made(linears), [linear.out_features for linear in linears]
                    )
                    for place, name in enumerate(same):
                        setattr(parent, name, FusedLinear(linears[place], fused_product, place))
                        names.remove(name)
        for name in names:
            setattr(parent, name, made([getattr(parent, name)]))
    return num_replaced


def _of_one_kind(
    parent: nn.Module, names: Sequence[str], kind: Callable[[nn.Linear], object]
) -> list[list[str]]:
    """The names of linear layers that can be one product, together."""
    groups: dict[object, list[str]] = {}
    for name in names:
        linear: Any = getattr(parent, name)
        weight = linear.in_features, linear.bias is None, linear.weight.dtype
        groups.setdefault((weight, kind(linear)), []).append(name)
    return list(groups.values())


@torch.no_grad()
def concatenated(linears: Sequence[nn.Linear]) -> nn.Linear:
    """A layer with the outputs of all of them, one after the other."""
    if len(linears) == 1:
        return linears[0]
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


_layers: "WeakValueDictionary[int, Any]" = WeakValueDictionary()
_numbers = count()


def numbered(layer: nn.Module) -> int:
    """The number by which `layer_of` finds a layer; compiled graphs cannot hold such weights."""
    number = next(_numbers)
    _layers[number] = layer
    return number


def layer_of(number: int) -> Any:
    """The layer of this number."""
    return _layers[number]


def define_operator(
    schema: str,
    compute: Callable[..., torch.Tensor],
    shape: Callable[..., torch.Tensor],
    device: str = "CPU",
) -> None:
    """Define the operator `pyengine::...` for a kind of device, opaque to the compiler.

    `shape` returns an empty tensor like the result. Not `custom_op`, which costs several
    microseconds more for each of some hundred layers.
    """
    name = f"pyengine::{schema.partition('(')[0]}"
    torch.library.define(name, schema[schema.index("(") :])
    torch.library.impl(name, device)(compute)
    torch.library.register_fake(name)(shape)


class ProductLinear(nn.Module):
    """A linear layer that multiplies by `product`, which holds its weight and its bias.

    `weight` has a shape and a dtype, and no arithmetic.
    """

    def __init__(self, product: Any, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.product = product
        self.number = numbered(self)

    @property
    def weight(self) -> Any:
        """Opaque, for its shape and dtype."""
        return self.product.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        found: torch.Tensor
        if torch.compiler.is_compiling():
            found = torch.ops.pyengine.prepacked_linear(rows, self.number, self.out_features)
        else:
            found = self.product.multiply(rows)
        return found


class PrepackedLinear(ProductLinear):
    """Computes what `linear` does, by oneDNN or the Rust kernel; its weight is mostly a copy.

    With the product "onednn-unpacked" it is that of `linear`.
    """

    def __init__(self, linear: nn.Linear, product: Product = "onednn") -> None:
        prepared = prepared_product(linear.weight, linear.bias, product)
        super().__init__(prepared, linear.in_features, linear.out_features)


class PrepackedMLP(nn.Module):
    """Computes `down(activation(gate(rows)) * up(rows))`, as transformers' `LlamaMLP` does.

    In bfloat16 oneDNN rounds the gate after the activation, the Rust kernel only the product.
    """

    def __init__(
        self,
        gate: ProductLinear,
        up: ProductLinear,
        down: ProductLinear,
        activation: Activation,
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self.activation: Activation = activation

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` to `[..., hidden]`."""
        up, gate = self.up_proj, self.gate_proj
        gated: torch.Tensor
        if torch.compiler.is_compiling():
            gated = torch.ops.pyengine.prepacked_gated(
                rows, up.number, gate.number, self.activation, up.out_features
            )
        else:
            gated = up.product.multiply_gated(rows, gate.product, self.activation)
        found: torch.Tensor = self.down_proj(gated)
        return found


def _prepacked_linear(rows: torch.Tensor, number: int, _out_features: int) -> torch.Tensor:
    found: torch.Tensor = layer_of(number).product.multiply(rows)
    return found


def _prepacked_gated(
    rows: torch.Tensor, up: int, gate: int, activation: Activation, _out_features: int
) -> torch.Tensor:
    factors = layer_of(up).product, layer_of(gate).product
    found: torch.Tensor = factors[0].multiply_gated(rows, factors[1], activation)
    return found


def _shape(rows: torch.Tensor, *others: Any) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], others[-1])


define_operator(
    "prepacked_linear(Tensor rows, int number, int out_features) -> Tensor",
    _prepacked_linear,
    _shape,
)
define_operator(
    "prepacked_gated(Tensor rows, int up, int gate, str activation, int out_features) -> Tensor",
    _prepacked_gated,
    _shape,
)


class PackedEmbedding(nn.Module):
    """The rows of a packed weight `[tokens, features]`, times `scale`.

    For embeddings that are tied to a head, so that the weight is in memory once: a row is spread
    over the packed weight, which costs a lookup some microseconds.
    """

    def __init__(self, product: Any, scale: float = 1.0) -> None:
        super().__init__()
        self.product = product
        self._scale = scale
        self.number = numbered(self)

    @property
    def weight(self) -> Any:
        """Opaque, for its shape and dtype."""
        return self.product.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`[...]` to `[..., features]`."""
        rows: torch.Tensor
        if torch.compiler.is_compiling():
            features, dtype = self.product.weight.shape[1], self.product.weight.dtype
            lookup: Any = torch.ops.pyengine.packed_embedding
            rows = lookup(ids, self.number, features, dtype)
        else:
            rows = self.product.gather(ids)
        return rows if self._scale == 1.0 else rows * self._scale


def packed_embedding(embedding: nn.Module, product: Any) -> PackedEmbedding | None:
    """A `PackedEmbedding` in the place of `embedding`; None if that does more than look up."""
    if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        return None
    if type(embedding) is nn.Embedding:
        return PackedEmbedding(product)
    from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding

    if instructions_of(type(embedding)) == instructions_of(GemmaTextScaledWordEmbedding):
        scale: Any = embedding.embed_scale
        return PackedEmbedding(product, float(scale.to(embedding.weight.dtype)))
    return None


def _look_up(ids: torch.Tensor, number: int, _features: int, _dtype: torch.dtype) -> torch.Tensor:
    found: torch.Tensor = layer_of(number).product.gather(ids)
    return found


def _rows_shape(ids: torch.Tensor, _number: int, features: int, dtype: torch.dtype) -> torch.Tensor:
    return ids.new_empty(*ids.shape, features, dtype=dtype)


define_operator(
    "packed_embedding(Tensor ids, int number, int features, ScalarType dtype) -> Tensor",
    _look_up,
    _rows_shape,
)


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """True if a model's layers can multiply there by more than torch's product."""
    return device.type == "cpu" and (onednn_supports(dtype) or kernel_supports(dtype))


Choose = Callable[[LayerShape, Sequence[torch.Tensor]], Product]
"""The product of layers of a shape; the weights are those of one of them."""


def prepack_linears(model: nn.Module, choose: Choose) -> int:
    """Let every `nn.Linear` of `model` multiply as `choose` says; returns how many there are.

    Query, key and value become one (`models/linear.py`), a gated MLP a `PrepackedMLP`.
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
            if activation := gate_activation(child):
                num_gated += 3
                product = choose(*_gated_layers(child))
                if product == "torch":
                    unchanged.update(child.children())
                else:
                    gate, up, down = (
                        PrepackedLinear(linear, product) for linear in mlp_linears(child)
                    )
                    setattr(parent, name, PrepackedMLP(gate, up, down, activation))

    def replaced(linears: Sequence[nn.Linear]) -> nn.Module:
        linear = concatenated(linears)
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
                packed = packed_embedding(child, tied[child.weight.data_ptr()])
                setattr(parent, name, packed or child)


def _gated_layers(mlp: nn.Module) -> tuple[LayerShape, list[torch.Tensor]]:
    linears = mlp_linears(mlp)
    gate = linears[0]
    shape = LayerShape(gate.in_features, gate.out_features, gate.weight.dtype, is_gated=True)
    return shape, [linear.weight for linear in linears]


def mlp_linears(mlp: nn.Module) -> list[nn.Linear]:
    """Gate, up and down of a gated MLP."""
    layers: list[Any] = [mlp.get_submodule(f"{name}_proj") for name in ("gate", "up", "down")]
    return layers


def gate_activation(module: nn.Module) -> Activation | None:
    """The activation of a gated MLP that the products compute; None for other modules.

    That is `LlamaMLP`, or the same instruction by instruction: most families copy it.
    """
    from transformers.activations import GELUTanh, SiLUActivation
    from transformers.models.llama.modeling_llama import LlamaMLP

    layers = dict(module.named_children())
    if layers.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    function = layers.pop("act_fn")
    if instructions_of(type(module)) != instructions_of(LlamaMLP):
        return None
    if not all(map(_is_linear, layers.values())):
        return None
    if type(function) in (nn.SiLU, SiLUActivation):
        return "silu"
    return "gelu_tanh" if type(function) is GELUTanh else None


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.weight.dtype in FORMATS
