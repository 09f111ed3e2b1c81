"""Attention by torch's own `varlen_attn` with block tables: torch 2.12 and later.

Torch's copy of flash-attn 2 runs it, with pages of 256 tokens. `num_splits=1`: with more, rows
were left unwritten upstream. There is no softcap; sinks are added from the logarithm of the sum
under the softmax.
"""

import importlib
from typing import Any

import numpy as np
import torch

from pyengine.attention.backend import AttentionOptions, StepInputs
from pyengine.attention.flash_attn import flash_kernel_obstacle
from pyengine.attention.needs import AttentionNeeds, cuda_obstacle
from pyengine.attention.paged import KVWriter, apply_sinks, window_left
from pyengine.errors import ConfigurationError
from pyengine.kv_cache.pool import KVPool

_LEAST_TORCH = (2, 12)


def varlen_obstacle(needs: AttentionNeeds) -> str | None:
    """Why torch's varlen_attn cannot serve; None: it can."""
    obstacle = cuda_obstacle(needs, (8, 0))
    if obstacle is not None:
        return obstacle
    if needs.torch_version < _LEAST_TORCH:
        version = ".".join(map(str, needs.torch_version))
        return f"varlen_attn takes block tables from torch 2.12 on, this is {version}"
    if any(layer.softcap is not None for layer in needs.layers):
        return "varlen_attn has no softcap, which the model needs"
    return flash_kernel_obstacle(needs)


class VarlenBackend:
    """Attention over a `KVPool` by `torch.nn.attention.varlen.varlen_attn`.

    Raises `ImportError` for a torch that has none.
    """

    name = "varlen"
    supports_graphs = True
    reads_tables = True
    shared_group = None

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.writer = KVWriter(pool)
        self.library: Any = importlib.import_module("torch.nn.attention.varlen")

    def plan(self, inputs: StepInputs) -> "VarlenPlan":
        """Prepare a step."""
        longest = int(inputs.host_seq_lens.max())
        return VarlenPlan(self, inputs, longest)

    def graph_plan(self, inputs: StepInputs) -> "VarlenPlan":
        """Prepare a step whose sequences may grow to the width of their tables."""
        return VarlenPlan(self, inputs, inputs.block_tables.shape[2] * self.pool.block_size)


class VarlenPlan:
    """One step by `varlen_attn`; no sequence is longer than `longest`."""

    def __init__(self, backend: VarlenBackend, inputs: StepInputs, longest: int) -> None:
        self._backend = backend
        self._inputs = inputs
        self._longest = longest
        self._max_rows = int(np.diff(inputs.host_query_start_loc).max())
        self._key_starts = torch.zeros_like(inputs.query_start_loc)
        self.refresh(inputs)

    def refresh(self, inputs: StepInputs) -> None:
        """See `GraphPlan.refresh`."""
        torch.cumsum(inputs.seq_lens, 0, dtype=torch.int32, out=self._key_starts[1:])

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See `AttentionPlan.forward`."""
        if options.softcap is not None:
            raise ConfigurationError(
                f"layer {layer} asks for a softcap of {options.softcap}, which "
                "attention_backend='varlen' does not have; choose another"
            )
        pool, inputs = self._backend.pool, self._inputs
        group = pool.groups.places[layer].group
        rows, writer = (query, key, value), self._backend.writer
        query = writer.write_step(layer, rows, inputs.slot_mapping, options.rotation)
        library = self._backend.library
        sinks = options.sinks
        result = library.varlen_attn(
            query.contiguous(),
            pool.keys[layer],
            pool.values[layer],
            inputs.query_start_loc,
            self._key_starts,
            self._max_rows,
            self._longest,
            return_aux=None if sinks is None else library.AuxRequest(lse=True),
            scale=options.scaling,
            window_size=(window_left(options.sliding_window), 0),
            enable_gqa=True,
            seqused_k=inputs.seq_lens,
            block_table=inputs.block_tables[group],
            num_splits=1,
        )
        if sinks is None:
            out: torch.Tensor = result
            return out
        attended, lse = result  # [T, heads, d] and [heads, T]
        return apply_sinks(attended, lse.T, sinks)
