"""The operations of recurrent layers on CUDA devices, by Triton kernels; without triton by torch.

A launch takes all sequences of a step. A token's bits depend on its own sequence's state and tokens
in the step, not on other sequences. The host reads no number of the device, and the grids depend on
shapes alone, so that CUDA graphs can record the launches.
"""

from typing import Any

import torch

from pyengine.kernels import LARGEST_ROW
from pyengine.kv_cache.states import LayerState, StateInputs
from pyengine.models.decoder.kernels import (
    MIN_NORM,
    ConvWeights,
    DeltaWeights,
    GatedNormWeights,
    MambaWeights,
)
from pyengine.models.decoder.torch_states import TorchStates


class CudaStates(TorchStates):
    """The part of `Kernels` for recurrent layers."""

    _has_kernels: bool

    def sequences(self, states: StateInputs) -> Any:
        """See `Kernels.sequences`."""
        if not self._has_kernels:
            return super().sequences(states)
        from pyengine.kernels.sequences import Sequences

        return Sequences(states.query_starts, states.sources, states.slots)

    def short_conv(
        self,
        rows: torch.Tensor,
        weights: ConvWeights,
        state: LayerState,
        sequences: Any,
        gates: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """See `Kernels.short_conv`."""
        if not self._has_kernels:
            return super().short_conv(rows, weights, state, sequences, gates)
        from pyengine.kernels.short_conv import short_conv

        arrays, has_silu = (weights.weight, weights.bias), weights.conv.activation == "silu"
        return short_conv(rows, *arrays, state.conv, sequences, has_silu=has_silu, gates=gates)

    def gated_delta(
        self,
        rows: tuple[torch.Tensor, ...],
        weights: DeltaWeights,
        state: LayerState,
        sequences: Any,
    ) -> torch.Tensor:
        """See `Kernels.gated_delta`."""
        if not self._has_kernels:
            return super().gated_delta(rows, weights, state, sequences)
        from pyengine.kernels.delta_rule import DeltaRule, gated_delta

        rule = DeltaRule(
            weights.rate, weights.bias, weights.beta_scale, weights.tiled_heads, MIN_NORM
        )
        query, key, value, gate, rate_gate = rows
        parts = query, key, value, gate, rate_gate
        return gated_delta(parts, rule, state.recurrent, sequences)

    def mamba(
        self,
        rows: tuple[torch.Tensor, ...],
        weights: MambaWeights,
        state: LayerState,
        sequences: Any,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Kernels.mamba`."""
        if not self._has_kernels:
            return super().mamba(rows, weights, state, sequences, gate)
        from pyengine.kernels.state_space import SpaceWeights, state_space

        space = SpaceWeights(weights.rate, weights.bias, weights.skip)
        x, time, b, c = rows
        return state_space((x, time, b, c), space, state.recurrent, sequences, gate)

    def gated_norm(
        self, rows: torch.Tensor, gate: torch.Tensor, weights: GatedNormWeights
    ) -> torch.Tensor:
        """See `Kernels.gated_norm`."""
        norm = weights.norm
        if not self._has_kernels or torch.compiler.is_compiling() or norm.size > LARGEST_ROW:
            return super().gated_norm(rows, gate, weights)
        from pyengine.kernels.gated_norm import gated_norm

        return gated_norm(
            rows,
            gate,
            weights.weight,
            norm.size,
            norm.eps,
            has_silu=norm.activation == "silu",
            gates_first=norm.gates_first,
        )
