"""Decoder layers on the CPU in few calls: arrays go from kernel to kernel, past torch's modules.

A layer of transformers calls some ten modules, which for a token of a small model takes longer than
the arithmetic. `shorten_layers` finds layers whose `forward` is that of `LlamaDecoderLayer`,
instruction by instruction, and whose parts are ours: `FusedRMSNorm`, `OwnRotation`, and linear
layers by the Rust kernel. They get a `forward` that calls the same kernels in the same order, with
the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy.typing as npt
import torch
from torch import nn

from pyengine.attention.cpu import CpuPlan, rotation_numbers
from pyengine.models.cpu_kernels import FusedRMSNorm, KernelProduct, instructions_of
from pyengine.models.linear import FusedLinear, PrepackedLinear, PrepackedMLP
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
    embeddings: object = None
    """The cosines and sines of `angles`."""
    angles: tuple[Array, ...] = ()
    _num_tokens: int = -1
    _buffers: dict[tuple[str, int], _Buffer] = field(default_factory=dict)

    def begin(self, hidden: torch.Tensor) -> None:
        """Take over `hidden` `[1, T, size]`."""
        rows = hidden[0].detach()
        self.hidden, self.residual = hidden, _Buffer(rows, cpu_array(rows))
        self.embeddings = None
        if len(rows) != self._num_tokens:
            self._num_tokens, self._buffers = len(rows), {}

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
        self._norm: FusedRMSNorm = layer.input_layernorm
        self._projections = [_kernel(linear) for linear in _input_layers(attention)]
        self._head_dim = attention.head_dim
        self._sizes = [
            linear.out_features for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        self._options = attention.options
        self._rotation = rotation_numbers(attention.layout, attention.head_norm)
        self._output = _kernel(attention.o_proj)
        self._second_norm: FusedRMSNorm = layer.post_attention_layernorm
        self._mlp: nn.Module = layer.mlp
        self._gated: list[KernelProduct] | None = None
        if _is_short_mlp(layer.mlp):
            linears = layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj
            self._gated = [_kernel(linear) for linear in linears]

    def __call__(self, hidden_states: torch.Tensor, *_args: Any, **kwargs: Any) -> torch.Tensor:
        """Map `hidden_states` `[1, T, hidden]` in place."""
        work, paged = self._workspace, kwargs["paged"]
        if hidden_states is not work.hidden:
            work.begin(hidden_states)
        embeddings = kwargs["position_embeddings"]
        if embeddings is not work.embeddings:
            work.angles = tuple(cpu_array(each[0].contiguous()) for each in embeddings)
            work.embeddings = embeddings
        residual: _Buffer = work.residual
        size = residual.array.shape[1]
        normed, change = work.buffer("normed", size), work.buffer("change", size)

        self._norm.write(residual.array, normed.array)
        query, key, value = self._project(normed.array)
        attended = work.buffer("attended", self._output.weight.shape[1]).array
        paged.count(self._layer, self._options.sliding_window)
        plan = cast(CpuPlan, paged.plan)
        arrays = query, key, value, attended.reshape(*query.shape[:2], -1)
        plan.attend(self._layer, arrays, self._options, (*work.angles, *self._rotation))
        self._output.write(attended, change.array)
        residual.rows += change.rows

        self._second_norm.write(residual.array, normed.array)
        if self._gated is None:
            residual.rows += self._mlp(normed.rows[None])[0]
        else:
            gate, up, down = self._gated
            gated = work.buffer("gated", up.weight.shape[0]).array
            up.write_gated(normed.array, gate, gated)
            down.write(gated, change.array)
            residual.rows += change.rows
        return hidden_states

    def _project(self, rows: Array) -> list[Array]:
        """Query, key and value, each `[T, heads, head_dim]`."""
        found = []
        for place, product in enumerate(self._projections):
            out = self._workspace.buffer(f"projected {place}", product.weight.shape[0]).array
            product.write(rows, out)
            found.append(out)
        if len(found) == 1:  # the three are one product
            query, key, _ = self._sizes
            [out] = found
            found = [out[:, :query], out[:, query : query + key], out[:, query + key :]]
        return [part.reshape(len(rows), -1, self._head_dim) for part in found]


def shorten_layers(model: nn.Module) -> int:
    """Give the decoder layers of `model` a short `forward`; returns how many get one.

    Call it after everything else that replaces parts of the model, and not before it is compiled.
    The layers then run with a `CpuPlan` only.
    """
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    workspace, num_shortened = _Workspace(), 0
    expected = instructions_of(LlamaDecoderLayer)
    for layer in model.modules():
        if instructions_of(type(layer)) == expected and _has_our_parts(layer):
            own: Any = layer
            own.forward = _ShortForward(layer, workspace)
            num_shortened += 1
    return num_shortened


def _has_our_parts(layer: Any) -> bool:
    attention = layer.self_attn
    if not isinstance(attention, OwnRotation) or _hooked(layer):
        return False
    linears = [*_input_layers(attention), attention.o_proj]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    return all(isinstance(norm, FusedRMSNorm) for norm in norms) and all(map(_is_ours, linears))


def _hooked(layer: nn.Module) -> bool:
    """True if somebody watches a part of the layer, which would no longer be called."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in layer.modules())


def _input_layers(attention: OwnRotation) -> Sequence[Any]:
    """The linear layers of query, key and value: one if they are fused."""
    linears = [attention.q_proj, attention.k_proj, attention.v_proj]
    if all(isinstance(linear, FusedLinear) for linear in linears):
        return [linears[0].product]
    return linears


def _is_ours(linear: Any) -> bool:
    return isinstance(linear, PrepackedLinear) and isinstance(linear.product, KernelProduct)


def _kernel(linear: PrepackedLinear) -> KernelProduct:
    return cast(KernelProduct, linear.product)


def _is_short_mlp(mlp: nn.Module) -> bool:
    if not isinstance(mlp, PrepackedMLP):
        return False
    linears = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    return all(map(_is_ours, linears)) and not any(
        _kernel(linear).has_bias for linear in linears[:2]
    )
