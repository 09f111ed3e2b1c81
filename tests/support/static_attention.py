"""Decode attention that a graph could hold: fixed shapes, everything read from tensors.

It gathers whole tables and masks them, so it is slow; that it does nothing on the host is what it
is for. Steps that are not decodes go the way of the gather backend.
"""

import torch

from pyengine.attention.backend import QKV, AttentionOptions, GraphMetadata, StepInputs
from pyengine.attention.gather import GatherBackend
from pyengine.attention.paged import KVWriter
from pyengine.kv_cache.pool import KVPool


class StaticBackend(GatherBackend):
    """The gather backend with metadata for graphs."""

    name = "static"
    supports_graphs = True
    reads_tables = True
    shared_group = None

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.graphs: list[StaticMetadata] = []

    def graph_metadata(self, inputs: StepInputs) -> GraphMetadata:
        self.graphs.append(StaticMetadata(self.pool, inputs))
        return self.graphs[-1]


class StaticMetadata:
    def __init__(self, pool: KVPool, inputs: StepInputs) -> None:
        self._pool = pool
        self._inputs = inputs
        self.refreshed: list[StepInputs] = []

    def refresh(self, inputs: StepInputs) -> None:
        self.refreshed.append(inputs)
        for name in ("input_ids", "positions", "slot_mapping", "seq_lens", "block_tables"):
            assert getattr(inputs, name).data_ptr() == getattr(self._inputs, name).data_ptr()
        assert (inputs.host_seq_lens == inputs.seq_lens.numpy()).all()
        assert (inputs.host_query_start_loc == inputs.query_start_loc.numpy()).all()

    def forward(self, layer: int, qkv: QKV, options: AttentionOptions) -> torch.Tensor:
        pool, inputs = self._pool, self._inputs
        group = pool.groups.locations[layer].group
        query = KVWriter(pool).write_step(layer, qkv, inputs.slot_mapping, options.rotation)
        tables = inputs.block_tables[group].long()
        keys = pool.keys[layer][tables].flatten(1, 2).transpose(1, 2)
        values = pool.values[layer][tables].flatten(1, 2).transpose(1, 2)
        positions = torch.arange(keys.shape[2])
        seen = positions < inputs.seq_lens[:, None]
        if options.sliding_window is not None:
            seen &= positions >= inputs.seq_lens[:, None] - options.sliding_window
        heads = query.unflatten(1, (keys.shape[1], -1))
        scores = heads @ keys.transpose(2, 3) * options.scaling
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        if options.sinks is not None:
            sinks = options.sinks.view(1, keys.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)[..., : keys.shape[2]]
        return (weights @ values).flatten(1, 2)
