"""Mixers that keep a state of fixed size per sequence: see `layers` and `recurrent`.

Each continues the states of `Step.states`, those of its layer in the pool.
"""

from typing import Any, TypeAlias

from pyengine.kv_cache.states import LayerState
from pyengine.models.decoder import recurrent
from pyengine.models.decoder.kernels import DeltaWeights, MambaWeights, Rows, Step
from pyengine.models.decoder.spec import Norm
from pyengine.models.decoder.weights import Weights

RecurrentLayer: TypeAlias = "GatedDelta | DeltaAttention | Mamba2 | Mamba | ShortConv"


class _Recurrent:
    """The state of a layer."""

    def __init__(self, weights: Weights, state: int) -> None:
        """`state` is the number of its layer in the pool of states."""
        self.kernels, self._state = weights.kernels, state

    def _states(self, step: Step) -> tuple[LayerState, Any]:
        """The arrays of this layer, and the sequences of the step."""
        assert step.states is not None
        return step.states.layers[self._state], step.sequences


class GatedDelta(_Recurrent):
    """A gated delta rule, with a convolution before it and a gated norm after it."""

    def __init__(
        self, delta: recurrent.GatedDelta, weights: Weights, hidden: int, *, state: int
    ) -> None:
        super().__init__(weights, state)
        self._spec, heads = delta, delta.value_heads
        sizes, values = delta.sizes, heads * delta.value_dim
        self._qkvz = weights.linear("delta_qkvz", [*sizes, values], hidden, groups=delta.key_heads)
        self._ba = weights.linear("delta_ba", [heads, heads], hidden, groups=delta.key_heads)
        self._conv = weights.conv("conv", delta.conv, sizes)
        rate = weights.array("rate", (heads,), is_log=delta.has_logs)
        bias = weights.array("time_bias", (heads,))
        self._decay = DeltaWeights(rate, bias, delta.beta_scale, delta.tiled_heads)
        self._norm = weights.gated_norm("delta_norm", delta.norm, delta.value_dim)
        self._out = weights.linear("delta_out", hidden, values)

    def __call__(self, rows: Rows, step: Step) -> Rows:
        """Mix the rows of the step."""
        delta, count = self._spec, len(rows)
        qkvz, ba, channels = self._qkvz(rows, step), self._ba(rows, step), sum(delta.sizes)
        state, states = self._states(step)
        qkv = self.kernels.short_conv(qkvz[:, :channels], self._conv, state, states)
        keys, values = delta.sizes[0], (count, delta.value_heads, delta.value_dim)
        parts = (
            qkv[:, :keys].reshape(count, delta.key_heads, delta.key_dim),
            qkv[:, keys : 2 * keys].reshape(count, delta.key_heads, delta.key_dim),
            qkv[:, 2 * keys :].reshape(values),
            ba[:, delta.value_heads :],
            ba[:, : delta.value_heads],
        )
        mixed = self.kernels.gated_delta(parts, self._decay, state, states)
        gate = qkvz[:, channels:].reshape(-1, delta.value_dim)
        normed = self.kernels.gated_norm(mixed.reshape(gate.shape), gate, self._norm)
        return self._out(normed.reshape(count, -1), step)


class DeltaAttention(_Recurrent):
    """A delta rule whose decay differs by channel."""

    def __init__(
        self, delta: recurrent.DeltaAttention, weights: Weights, hidden: int, *, state: int
    ) -> None:
        super().__init__(weights, state)
        self._spec, heads, size, width = delta, delta.heads, delta.head_dim, delta.width
        sizes = [width] * 3
        self._qkv = weights.linear("delta_qkv", sizes, hidden)
        self._conv = weights.conv("conv", delta.conv, sizes)
        self._rate_gate = weights.linear("delta_b", heads, hidden)
        self._decay_down = weights.linear("decay_down", size, hidden)
        self._decay_up = weights.linear("decay_up", width, size)
        self._gate_down = weights.linear("gate_down", size, hidden)
        self._gate_up = weights.linear("gate_up_heads", width, size)
        rate = weights.array("rate", (heads,), (1, 1, heads, 1), (1, 1, 1, heads), is_log=True)
        self._decay = DeltaWeights(rate, weights.array("time_bias", (width,)))
        self._norm = weights.gated_norm("delta_norm", delta.norm, size)
        self._out = weights.linear("delta_out", hidden, width)

    def __call__(self, rows: Rows, step: Step) -> Rows:
        """Mix the rows of the step."""
        delta, count = self._spec, len(rows)
        state, states = self._states(step)
        qkv = self.kernels.short_conv(self._qkv(rows, step), self._conv, state, states)
        shape, width = (count, delta.heads, delta.head_dim), delta.width
        parts = (
            qkv[:, :width].reshape(shape),
            qkv[:, width : 2 * width].reshape(shape),
            qkv[:, 2 * width :].reshape(shape),
            self._decay_up(self._decay_down(rows, step), step),
            self._rate_gate(rows, step),
        )
        mixed = self.kernels.gated_delta(parts, self._decay, state, states)
        gate = self._gate_up(self._gate_down(rows, step), step).reshape(-1, delta.head_dim)
        normed = self.kernels.gated_norm(mixed.reshape(gate.shape), gate, self._norm)
        return self._out(normed.reshape(count, -1), step)


class Mamba2(_Recurrent):
    """Mamba-2: a state space, with a convolution before it and a gated norm after it."""

    def __init__(
        self, mamba: recurrent.Mamba2, weights: Weights, hidden: int, *, state: int
    ) -> None:
        super().__init__(weights, state)
        self._spec, heads, width = mamba, mamba.heads, mamba.width
        inner = mamba.groups * mamba.state_size
        sizes = [width, width, inner, inner, heads]
        self._in = weights.linear("mamba_in", sum(sizes), hidden, has_bias=mamba.has_bias)
        self._factors = None
        if mamba.scales is not None:
            self._factors = weights.kernels.factors(mamba.scales, sizes)
        self._conv = weights.conv("conv", mamba.conv)
        rate = weights.array("rate", (heads,), (heads, 1), is_log=mamba.has_logs)
        skip = weights.array("skip", (heads,), (heads, 1))
        self._space = MambaWeights(rate, weights.array("time_bias", (heads,)), skip)
        self._norm = None
        if mamba.norm is not None:
            self._norm = weights.gated_norm("mamba_norm", mamba.norm, width)
        self._out = weights.linear("mamba_out", hidden, width, has_bias=mamba.out_bias)

    def __call__(self, rows: Rows, step: Step) -> Rows:
        """Mix the rows of the step."""
        mamba, count, kernels = self._spec, len(rows), self.kernels
        width, inner = mamba.width, mamba.groups * mamba.state_size
        if mamba.input_scale != 1.0:
            rows = kernels.multiplied(rows, mamba.input_scale)
        projected, end = self._in(rows, step), width + mamba.conv.channels
        if self._factors is not None:
            projected = kernels.multiplied(projected, self._factors)
        state, states = self._states(step)
        mixed = kernels.short_conv(projected[:, width:end], self._conv, state, states)
        groups = (count, mamba.groups, mamba.state_size)
        parts = (
            mixed[:, :width].reshape(count, mamba.heads, mamba.head_dim),
            projected[:, end:],
            mixed[:, width : width + inner].reshape(groups),
            mixed[:, width + inner :].reshape(groups),
        )
        gate = projected[:, :width]
        if self._norm is None:
            gates = gate.reshape(count, mamba.heads, mamba.head_dim)
            mixed = kernels.mamba(parts, self._space, state, states, gates).reshape(count, width)
        else:
            mixed = kernels.mamba(parts, self._space, state, states).reshape(count, width)
            mixed = kernels.gated_norm(mixed, gate, self._norm)
        result = self._out(mixed, step)
        if mamba.output_scale != 1.0:
            result = kernels.multiplied(result, mamba.output_scale)
        return result


class Mamba(_Recurrent):
    """Mamba as in Jamba, with norms of what depends on the input."""

    def __init__(
        self, mamba: recurrent.Mamba, weights: Weights, hidden: int, *, state: int
    ) -> None:
        super().__init__(weights, state)
        self._spec, width, size, rank = mamba, mamba.width, mamba.state_size, mamba.rank
        self._in = weights.linear("mamba_in", 2 * width, hidden, has_bias=mamba.has_bias)
        self._conv = weights.conv("conv", mamba.conv)
        self._rows = weights.linear("mamba_rows", rank + 2 * size, width)
        norm = Norm(eps=mamba.eps)
        self._norms = (
            weights.norm("time_norm", norm, rank),
            weights.norm("b_norm", norm, size),
            weights.norm("c_norm", norm, size),
        )
        self._time_up = weights.linear("time_up", width, rank)
        shape = (width, size)
        rate = weights.array("rate", shape, is_log=mamba.has_logs, is_transposed=True)
        bias, skip = (weights.array(name, (width,)) for name in ("time_bias", "skip"))
        self._space = MambaWeights(rate, bias, skip)
        self._out = weights.linear("mamba_out", hidden, width, has_bias=mamba.has_bias)

    def __call__(self, rows: Rows, step: Step) -> Rows:
        """Mix the rows of the step."""
        mamba, kernels = self._spec, self.kernels
        projected, width, size = self._in(rows, step), mamba.width, mamba.state_size
        state, states = self._states(step)
        mixed = kernels.short_conv(projected[:, :width], self._conv, state, states)
        inner, rank = self._rows(mixed, step), mamba.rank
        bounds = (slice(0, rank), slice(rank, rank + size), slice(rank + size, None))
        time, b, c = (
            kernels.norm(inner[:, part], norm)
            for part, norm in zip(bounds, self._norms, strict=True)
        )
        parts = mixed, self._time_up(time, step), b, c
        mixed = kernels.mamba(parts, self._space, state, states, projected[:, width:])
        return self._out(mixed, step)


class ShortConv(_Recurrent):
    """A convolution between two gates."""

    def __init__(
        self, conv: recurrent.ShortConv, weights: Weights, hidden: int, *, state: int
    ) -> None:
        super().__init__(weights, state)
        self._width = conv.width
        self._in = weights.linear("conv_in", 3 * conv.width, hidden, has_bias=conv.has_bias)
        self._conv = weights.conv("conv", conv.conv)
        self._out = weights.linear("conv_out", hidden, conv.width, has_bias=conv.has_bias)

    def __call__(self, rows: Rows, step: Step) -> Rows:
        """Mix the rows of the step."""
        projected, width = self._in(rows, step), self._width
        gates = projected[:, :width], projected[:, width : 2 * width]
        inputs = projected[:, 2 * width :]
        mixed = self.kernels.short_conv(inputs, self._conv, *self._states(step), gates)
        return self._out(mixed, step)


def recurrent_layer(
    mixer: recurrent.RecurrentMixer, weights: Weights, hidden: int, *, state: int
) -> RecurrentLayer:
    """The layer of a mixer; `state` is its number in the pool of states."""
    match mixer:
        case recurrent.GatedDelta():
            return GatedDelta(mixer, weights, hidden, state=state)
        case recurrent.DeltaAttention():
            return DeltaAttention(mixer, weights, hidden, state=state)
        case recurrent.Mamba2():
            return Mamba2(mixer, weights, hidden, state=state)
        case recurrent.Mamba():
            return Mamba(mixer, weights, hidden, state=state)
        case recurrent.ShortConv():
            return ShortConv(mixer, weights, hidden, state=state)
