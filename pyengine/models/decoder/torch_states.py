"""The operations of recurrent layers in plain torch, token by token: the oracle of other forms.

All compute in float32 and round their results once.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from pyengine.kv_cache.states import LayerState, StateInputs
from pyengine.models.decoder.kernels import (
    MIN_NORM,
    ConvWeights,
    DeltaWeights,
    GatedNormWeights,
    MambaWeights,
)


class TorchStates:
    """The part of `Kernels` for recurrent layers."""

    def sequences(self, states: StateInputs) -> StateInputs:
        """See `Kernels.sequences`."""
        return states

    def short_conv(
        self,
        rows: torch.Tensor,
        weights: ConvWeights,
        state: LayerState,
        sequences: StateInputs,
        gates: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """See `Kernels.short_conv`."""
        gated, out = rows.float(), torch.empty(rows.shape, device=rows.device)
        if gates is not None:
            gated = gated * gates[0].float()
        for tokens, last in _sequences(state.conv, sequences):
            inputs = torch.cat([last, gated[tokens]])
            if len(inputs) > len(last):
                windows = inputs.unfold(0, weights.conv.size, 1)
                out[tokens] = (windows * weights.weight).sum(-1)
            last[:] = inputs[len(inputs) - len(last) :]
        if weights.bias is not None:
            out = out + weights.bias
        if weights.conv.activation == "silu":
            out = F.silu(out)
        if gates is not None:
            out = out * gates[1].float()
        return out.to(rows.dtype)

    def gated_delta(
        self,
        rows: tuple[torch.Tensor, ...],
        weights: DeltaWeights,
        state: LayerState,
        sequences: StateInputs,
    ) -> torch.Tensor:
        """See `Kernels.gated_delta`."""
        query, key, value, gate, rate_gate = (part.float() for part in rows)
        heads, shared = value.shape[1], value.shape[1] // key.shape[1]
        query, key = (_normed(part) for part in (query, key))
        if weights.tiled_heads:
            query, key = (part.repeat(1, shared, 1) for part in (query, key))
        else:
            query, key = (
                part.repeat_interleave(shared, 1, output_size=heads) for part in (query, key)
            )
        query = query * key.shape[2] ** -0.5
        opened = F.softplus(gate + weights.bias).reshape(len(value), heads, -1)
        decay = (weights.rate[:, None] * opened).exp()
        rate = weights.beta_scale * rate_gate.sigmoid()
        out = torch.empty_like(value)
        for tokens, matrix in _sequences(state.recurrent, sequences):
            for token in range(tokens.start, tokens.stop):
                matrix.mul_(decay[token, :, :, None])
                read = torch.einsum("hk,hkv->hv", key[token], matrix)
                change = rate[token, :, None] * (value[token] - read)
                matrix.add_(key[token, :, :, None] * change[:, None, :])
                out[token] = torch.einsum("hk,hkv->hv", query[token], matrix)
        return out.to(rows[2].dtype)

    def mamba(
        self,
        rows: tuple[torch.Tensor, ...],
        weights: MambaWeights,
        state: LayerState,
        sequences: StateInputs,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Kernels.mamba`."""
        x, time, b, c = (part.float() for part in rows)
        time = F.softplus(time + weights.bias)
        if weights.rate.ndim == 2:
            decay = (time[:, None, :] * weights.rate).exp()
            changes = b[:, :, None] * (time * x)[:, None, :]
            c, skipped = c[:, :, None], weights.skip * x
        else:
            decay = (time * weights.rate).exp()[:, :, None, None]
            heads, shared = x.shape[1], x.shape[1] // b.shape[1]
            b, c = (
                part.repeat_interleave(shared, 1, output_size=heads)[:, :, :, None]
                for part in (b, c)
            )
            changes = b * (time[:, :, None] * x)[:, :, None, :]
            skipped = weights.skip[:, None] * x
        out = torch.empty_like(x)
        for tokens, space in _sequences(state.recurrent, sequences):
            for token in range(tokens.start, tokens.stop):
                space.mul_(decay[token]).add_(changes[token])
                out[token] = (space * c[token]).sum(-2)
        result: torch.Tensor = out + skipped
        if gate is not None:
            result = result * F.silu(gate.float())
        return result.to(rows[0].dtype)

    def gated_norm(
        self, rows: torch.Tensor, gate: torch.Tensor, weights: GatedNormWeights
    ) -> torch.Tensor:
        """See `Kernels.gated_norm`."""
        norm, values = weights.norm, rows.float()
        gates = F.silu(gate.float()) if norm.activation == "silu" else gate.float().sigmoid()
        if norm.gates_first:
            values = values * gates
        grouped = values.reshape(len(rows), -1, norm.size)
        grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + norm.eps)
        normed: torch.Tensor = grouped.reshape(rows.shape) * weights.weight.float()
        return (normed if norm.gates_first else normed * gates).to(rows.dtype)


def _sequences(array: torch.Tensor, states: StateInputs) -> Iterator[tuple[slice, torch.Tensor]]:
    """The tokens of each sequence, and a copy of its state, which is kept after it was changed."""
    starts, sources, slots = (
        list(map(int, part)) for part in (states.query_starts, states.sources, states.slots)
    )
    for index, (source, slot) in enumerate(zip(sources, slots, strict=True)):
        value = array.new_zeros(array.shape[1:]) if source < 0 else array[source].clone()
        yield slice(starts[index], starts[index + 1]), value
        if slot >= 0:
            array[slot] = value


def _normed(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + MIN_NORM)
