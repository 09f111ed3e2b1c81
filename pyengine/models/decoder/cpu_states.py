"""The operations of recurrent layers on CPUs, by the Rust kernels, over NumPy arrays.

A token has the same bits in every batch, and however its sequence is divided into steps.
"""

import numpy as np

from pyengine.cpu import (
    CpuAttention,
    CpuStateStep,
    gated_delta,
    gated_norm,
    mamba,
    mamba2,
    short_conv,
)
from pyengine.kv_cache.states import LayerState, StateInputs
from pyengine.models.decoder.cpu_numbers import read
from pyengine.models.decoder.kernels import (
    MIN_NORM,
    ConvWeights,
    DeltaWeights,
    GatedNormWeights,
    MambaWeights,
)
from pyengine.models.decoder.recurrent import Convolution
from pyengine.models.decoder.rotary import Floats
from pyengine.models.decoder.stored_weight import Weight
from pyengine.utils.dtypes import Rows


class CpuStates:
    """The part of `Kernels` for recurrent layers."""

    __slots__ = ()
    threads: CpuAttention

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
        self,
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
        self,
        rows: tuple[Rows, Rows, Rows, Rows, Rows],
        weights: DeltaWeights,
        state: LayerState,
        sequences: CpuStateStep,
    ) -> Rows:
        """See `Kernels.gated_delta`."""
        value = rows[2]
        out = np.empty(value.shape, value.dtype)
        gated_delta(
            self.threads,
            sequences,
            *rows,
            (weights.rate, weights.bias),
            state.recurrent,
            out,
            scaling=rows[1].shape[2] ** -0.5,
            epsilon=MIN_NORM,
            beta_scale=weights.beta_scale,
            tiled_heads=weights.tiled_heads,
        )
        return out

    def mamba(
        self,
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

    def gated_norm(self, rows: Rows, gate: Rows, weights: GatedNormWeights) -> Rows:
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
