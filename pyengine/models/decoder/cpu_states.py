"""The operations of recurrent layers on CPUs, by the Rust kernels, over NumPy arrays.

A token has the same bits in every batch, and however its sequence is divided into steps.
"""

from typing import TYPE_CHECKING, Protocol

import numpy as np

from pyengine.cpu import (
    CpuAttention,
    CpuStateStep,
    gated_delta,
    gated_norm,
    log_decays,
    mamba,
    mamba2,
    short_conv,
)
from pyengine.kv_cache.states import LayerState, StateInputs
from pyengine.models.decoder.cpu_numbers import read
from pyengine.models.decoder.kernels import (
    ConvWeights,
    DeltaWeights,
    GatedNormWeights,
    MambaWeights,
)
from pyengine.models.decoder.recurrent import Convolution
from pyengine.models.decoder.rotary import Floats
from pyengine.models.decoder.stored_weight import Weight
from pyengine.utils.dtypes import Rows

_MIN_NORM = 1e-6
"""Added to the square of a query's or a key's norm, as in flash-linear-attention."""


if TYPE_CHECKING:

    class _Kernels(Protocol):
        """The operations of `CpuKernels` that these need."""

        threads: CpuAttention

        def sigmoid(self, rows: Rows) -> Rows: ...
        def multiplied(self, rows: Rows, factors: Rows | float) -> Rows: ...


class CpuStates:
    """The part of `Kernels` for recurrent layers."""

    __slots__ = ()

    def exact_array(self, weight: Weight, *, is_log: bool = False) -> Floats:
        """See `Kernels.exact_array`."""
        array = read(weight)
        return -np.exp(array) if is_log else array

    def conv_weights(self, conv: Convolution, weight: Weight, bias: Weight | None) -> ConvWeights:
        """See `Kernels.conv_weights`; the weight is `[size, channels]`."""
        vector = None if bias is None else read(bias)
        return ConvWeights(conv, np.ascontiguousarray(read(weight).T), vector)

    def sequences(self, states: StateInputs) -> CpuStateStep:
        """See `Kernels.sequences`."""
        starts, sources, slots = states.query_starts, states.sources, states.slots
        return CpuStateStep(query_start_loc=starts, sources=sources, slots=slots)

    def short_conv(
        self: "_Kernels",
        rows: Rows,
        weights: ConvWeights,
        state: LayerState,
        sequences: CpuStateStep,
        gates: tuple[Rows, Rows] | None = None,
    ) -> Rows:
        """See `Kernels.short_conv`."""
        out = np.empty(rows.shape, rows.dtype)
        short_conv(
            self.threads,
            sequences,
            rows,
            weights.weight,
            state.conv,
            out,
            bias=weights.bias,
            activation=weights.conv.activation,
            gates=gates,
        )
        return out

    def gated_delta(
        self: "_Kernels",
        rows: tuple[Rows, Rows, Rows, Rows, Rows],
        weights: DeltaWeights,
        state: LayerState,
        sequences: CpuStateStep,
    ) -> Rows:
        """See `Kernels.gated_delta`."""
        query, key, value, gate, rate_gate = rows
        if weights.tiled_heads:
            copies = (1, value.shape[1] // key.shape[1], 1)
            query, key = np.tile(query, copies), np.tile(key, copies)
        decay: Floats = np.empty(gate.shape, np.float32)
        log_decays(self.threads, gate, weights.bias, -weights.rate, decay)
        if gate.shape[1] != value.shape[1]:
            decay = decay.reshape(len(value), value.shape[1], -1)
        rate = self.sigmoid(rate_gate)
        if weights.beta_scale != 1.0:
            rate = self.multiplied(rate, weights.beta_scale)
        out = np.empty(value.shape, value.dtype)
        gated_delta(
            self.threads,
            sequences,
            query,
            key,
            value,
            decay,
            rate,
            state.recurrent,
            out,
            scaling=key.shape[2] ** -0.5,
            epsilon=_MIN_NORM,
        )
        return out

    def mamba(
        self: "_Kernels",
        rows: tuple[Rows, Rows, Rows, Rows],
        weights: MambaWeights,
        state: LayerState,
        sequences: CpuStateStep,
        gate: Rows | None = None,
    ) -> Rows:
        """See `Kernels.mamba`."""
        run, out = (
            mamba if weights.rate.ndim == 2 else mamba2,
            np.empty(rows[0].shape, rows[0].dtype),
        )
        numbers = weights.rate, weights.bias, weights.skip
        run(self.threads, sequences, *rows, numbers, state.recurrent, out, gate=gate)
        return out

    def gated_norm(self: "_Kernels", rows: Rows, gate: Rows, weights: GatedNormWeights) -> Rows:
        """See `Kernels.gated_norm`."""
        norm, out = weights.norm, np.empty(rows.shape, rows.dtype)
        gated_norm(
            self.threads,
            rows,
            gate,
            weights.weight,
            out,
            norm.eps,
            group_size=norm.size,
            function=norm.activation,
            is_norm_first=not norm.gates_first,
        )
        return out
