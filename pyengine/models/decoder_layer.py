"""Decoder layers on the CPU in few calls: arrays go from kernel to kernel, past torch's modules.

A layer of transformers calls some ten modules, which for a token of a small model takes longer than
the arithmetic. `shorten_layers` finds layers whose `forward` is that of `LlamaDecoderLayer` or of
`Gemma3DecoderLayer`, instruction by instruction, and whose parts are ours: `FusedRMSNorm`,
`OwnRotation`, and linear layers by the Rust kernels. They get a `forward` that calls the same
kernels in the same order, with the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy.typing as npt
import torch
from torch import nn

from pyengine.attention.cpu import CpuPlan, rotation_numbers
from pyengine.models.cpu_kernels import (
    Activation,
    FusedRMSNorm,
    KernelProduct,
    activated,
    instructions_of,
)
from pyengine.models.linear import FusedLinear, PrepackedMLP, ProductLinear
from pyengine.models.rotary import OwnRotation
from pyengine.utils.host_copy import cpu_array

Array = npt.NDArray[Any]


@dataclass(slots=True)
class _Buffer:
    """A tensor `[T, size]`, and the same memory for kernels."""

    rows: torch.Tensor
    array: Array


@dataclass(slots=True)
class _Workspace:
    """Memory that the layers of a model use in turns, for one number of tokens."""

    hidden: torch.Tensor | None = None
    """The hidden states of this forward pass, to which layers add in place."""
    residual: Any = None
    """Their rows, a `_Buffer`."""
    angles: dict[int, tuple[object, tuple[Array, ...]]] = field(default_factory=dict)
    """By the identity of the model's pair of cosines and sines: the pair, and its arrays."""
    _num_tokens: int = -1
    _buffers: dict[tuple[str, int], _Buffer] = field(default_factory=dict)

    def begin(self, hidden: torch.Tensor) -> None:
        """Take over `hidden` `[1, T, size]`."""
        rows = hidden[0]
        self.hidden, self.residual = hidden, _Buffer(rows, cpu_array(rows))
        self.angles.clear()
        if len(rows) != self._num_tokens:
            self._num_tokens, self._buffers = len(rows), {}

    def angles_of(self, embeddings: tuple[torch.Tensor, ...]) -> tuple[Array, ...]:
        """Cosines and sines `[1, T, columns]` as the kernel takes them."""
        found = self.angles.get(id(embeddings))
        if found is None:
            arrays = tuple(cpu_array(each[0].contiguous()) for each in embeddings)
            found = self.angles[id(embeddings)] = embeddings, arrays
        return found[1]

    def buffer(self, purpose: str, size: int) -> _Buffer:
        """Rows `[T, size]` with unknown content."""
        found = self._buffers.get((purpose, size))
        if found is None:
            rows = self.residual.rows.new_empty(self._num_tokens, size)
            found = self._buffers[purpose, size] = _Buffer(rows, cpu_array(rows))
        return found


class _ShortForward:
    """The `forward` of a decoder layer."""

    def __init__(self, layer: Any, workspace: _Workspace) -> None:
        attention: OwnRotation = layer.self_attn
        self._workspace = workspace
        self._layer: int = attention.layer_idx
        self._norms = _norms(layer)
        linears = _input_layers(attention)
        products = [_computed_by(linear).product for linear in linears]
        self._projections = list(dict.fromkeys(products))
        places = map(self._projections.index, products)
        self._parts = list(zip(places, map(_columns, linears), strict=True))
        self._head_dim = attention.head_dim
        self._options = attention.options
        self._rotation = rotation_numbers(attention.layout, attention.head_norm)
        self._output = attention.o_proj.product
        self._mlp: Any = layer.mlp
        self._linears: list[Any] | None = None
        if _is_mlp_of_ours(layer.mlp):
            gate, up, down = (linear.product for linear in _mlp_layers(layer.mlp))
            self._linears = [gate, up, down]
            self._activation: Activation = layer.mlp.activation
            self._is_gated_by_kernel = up.can_gate(gate)

    def __call__(self, hidden_states: torch.Tensor, *_args: Any, **kwargs: Any) -> torch.Tensor:
        """Map `hidden_states` `[1, T, hidden]` in place."""
        work, paged = self._workspace, kwargs["paged"]
        if hidden_states is not work.hidden:
            work.begin(hidden_states)
        residual: _Buffer = work.residual
        size = residual.array.shape[1]
        normed, change = work.buffer("normed", size), work.buffer("change", size)
        before_attention, after_attention, before_mlp, after_mlp = self._norms

        before_attention.write(residual.array, normed.array)
        query, key, value = self._project(normed.array)
        attended = work.buffer("attended", self._output.weight.shape[1]).array
        paged.count(self._layer, self._options.sliding_window)
        rotation = (*work.angles_of(kwargs["position_embeddings"]), *self._rotation)
        arrays = query, key, value, attended.reshape(*query.shape[:2], -1)
        cast(CpuPlan, paged.plan).attend(self._layer, arrays, self._options, rotation)
        self._output.write(attended, change.array)
        if after_attention is not None:
            after_attention.write(change.array, normed.array)
            change, normed = normed, change
        residual.rows += change.rows

        before_mlp.write(residual.array, normed.array)
        if self._linears is None:
            rows = self._mlp(normed.rows[None])[0]
            change = _Buffer(rows, cpu_array(rows))
        else:
            self._feed_forward(self._linears, normed, change)
        if after_mlp is not None:
            after_mlp.write(change.array, normed.array)
            change = normed
        residual.rows += change.rows
        return hidden_states

    def _feed_forward(self, linears: Sequence[Any], rows: _Buffer, out: _Buffer) -> None:
        gate, up, down = linears
        gated = self._workspace.buffer("gated", up.weight.shape[0])
        if self._is_gated_by_kernel:
            up.write_gated(rows.array, gate, gated.array, self._activation)
        else:
            gates = self._workspace.buffer("gates", gate.weight.shape[0])
            gate.write(rows.array, gates.array)
            up.write(rows.array, gated.array)
            gated.rows *= activated(gates.rows, self._activation)
        down.write(gated.array, out.array)

    def _project(self, rows: Array) -> list[Array]:
        """Query, key and value, each `[T, heads, head_dim]`."""
        found = []
        for place, product in enumerate(self._projections):
            out = self._workspace.buffer(f"projected {place}", product.weight.shape[0]).array
            product.write(rows, out)
            found.append(out)
        shape = len(rows), -1, self._head_dim
        return [found[place][:, columns].reshape(shape) for place, columns in self._parts]


def shorten_layers(model: nn.Module) -> int:
    """Give the decoder layers of `model` a short `forward`; returns how many get one.

    Call it after everything else that replaces parts of the model, and not for a model that is
    compiled. The layers then run with a `CpuPlan` only.
    """
    workspace, num_shortened = _Workspace(), 0
    for layer in model.modules():
        if _is_decoder_layer(layer) and _has_our_parts(layer):
            own: Any = layer
            own.forward = _ShortForward(layer, workspace)
            num_shortened += 1
    return num_shortened


def _is_decoder_layer(layer: nn.Module) -> bool:
    """True for layers like Llama's and Gemma's."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    if not hasattr(layer, "self_attn"):
        return False
    if instructions_of(type(layer)) == instructions_of(LlamaDecoderLayer):
        return True
    from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer

    return instructions_of(type(layer)) == instructions_of(Gemma3DecoderLayer)


def _has_our_parts(layer: Any) -> bool:
    attention = layer.self_attn
    if not isinstance(attention, OwnRotation) or _is_watched(layer):
        return False
    linears = [*map(_computed_by, _input_layers(attention)), attention.o_proj]
    norms = [norm for norm in _norms(layer) if norm is not None]
    return all(isinstance(norm, FusedRMSNorm) for norm in norms) and all(map(_is_ours, linears))


def _norms(layer: Any) -> tuple[Any, Any, Any, Any]:
    """The norms before and after attention and MLP; None: there is none after it."""
    if hasattr(layer, "pre_feedforward_layernorm"):
        before_mlp, after_mlp = layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm
        return layer.input_layernorm, layer.post_attention_layernorm, before_mlp, after_mlp
    return layer.input_layernorm, None, layer.post_attention_layernorm, None


def _is_watched(layer: nn.Module) -> bool:
    """True if a part of the layer has hooks, which would no longer be called."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in layer.modules())


def _input_layers(attention: OwnRotation) -> Sequence[Any]:
    """The linear layers of query, key and value."""
    return attention.q_proj, attention.k_proj, attention.v_proj


def _computed_by(linear: Any) -> Any:
    """The layer that computes a linear layer: itself, or the one it is fused into."""
    return linear.product if isinstance(linear, FusedLinear) else linear


def _columns(linear: Any) -> slice:
    """The outputs of a linear layer among those of the one that computes it."""
    return linear.columns if isinstance(linear, FusedLinear) else slice(None)


def _is_ours(linear: Any) -> bool:
    product = linear.product if isinstance(linear, ProductLinear) else None
    return isinstance(product, KernelProduct) and product.takes_rows


def _is_mlp_of_ours(mlp: Any) -> bool:
    """True for `down(activation(gate(x)) * up(x))` by the kernel."""
    return isinstance(mlp, PrepackedMLP) and all(map(_is_ours, _mlp_layers(mlp)))


def _mlp_layers(mlp: PrepackedMLP) -> Sequence[Any]:
    return mlp.gate_proj, mlp.up_proj, mlp.down_proj
