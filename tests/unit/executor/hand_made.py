"""A paged run without the block manager: plans made by hand, block ids out of order."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pyengine.attention.choice import choose_backend
from pyengine.attention.needs import AttentionNeeds
from pyengine.executor.cuda_graphs import Record
from pyengine.executor.input_buffers import HostArrays, RunnerLimits
from pyengine.executor.kv_cache_config import cache_specs
from pyengine.executor.model_runner import ModelRunner
from pyengine.kv_cache.layer_groups import LayerGroups, choose_layer_groups
from pyengine.kv_cache.pool import KVPool
from pyengine.models.decoder.kernel_sets import KernelSettings
from pyengine.models.loaded import LoadedModel
from pyengine.utils.devices import CPU
from pyengine.utils.tensors import tensor_of
from tests.support.checkpoints import BASE
from tests.support.models import BY_TORCH, as_loaded

POISON = 7.0


@dataclass
class Entry:
    """Tokens `start .. end` of a sequence, to be computed in a step."""

    tokens: list[int]
    start: int
    end: int
    tables: list[list[int]]
    """One per layer group."""
    writes: bool = True

    @property
    def samples(self) -> bool:
        return self.end == len(self.tokens)


@dataclass
class HandMadePlan:
    """Fills the arrays as `BLOCKS.md` says a plan does; stale table entries are left alone."""

    entries: list[Entry]
    arrays: HostArrays
    block_size: int
    num_tokens: int = field(init=False)
    num_sequences: int = field(init=False)
    num_samples: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = sum(e.end - e.start for e in self.entries)
        self.num_sequences = len(self.entries)
        self.num_samples = sum(e.samples for e in self.entries)

    def copies(self) -> list[tuple[int, int]]:
        return []

    def fill(self, buffers: object, shared: object = None) -> None:
        a, row, sample = self.arrays, 0, 0
        a.query_start_loc[0] = 0
        for i, e in enumerate(self.entries):
            for position in range(e.start, e.end):
                a.input_ids[row] = e.tokens[position]
                a.positions[row] = position
                for group, table in enumerate(e.tables):
                    block = table[position // self.block_size]
                    slot = block * self.block_size + position % self.block_size
                    a.slot_mapping[group, row] = slot if e.writes else -1
                row += 1
            a.query_start_loc[i + 1] = row
            a.seq_lens[i] = e.end
            for group, table in enumerate(e.tables):
                a.block_tables[group, i, : len(table)] = table
            if e.samples:
                a.logits_indices[sample] = row - 1
                sample += 1


class PagedRun:
    """A random model, a poisoned pool, and block ids dealt in random order.

    With `grouped`, its layers are in groups; otherwise in one that keeps everything.
    """

    def __init__(
        self,
        model: Any,  # of transformers, or loaded already
        *,
        block_size: int = 4,
        num_blocks: int = 60,
        grouped: bool = False,
        backend: Callable[[KVPool], Any] | None = None,
        record: Record | None = None,
        max_tokens: int = 64,
        rows_per_seq: int = 1,
        kernels: KernelSettings = BY_TORCH,
    ) -> None:
        device = CPU
        self.block_size = block_size
        loaded = model if isinstance(model, LoadedModel) else as_loaded(model, kernels=kernels)
        specs = cache_specs(loaded, "float32")
        self.groups = LayerGroups.single(len(specs))
        if grouped:
            windows = [each.window for each in loaded.layers]
            self.groups = choose_layer_groups(windows, [each.token_bytes for each in specs], 256)
        self.pool = KVPool(specs, num_blocks, block_size, device, self.groups)
        for tensor in (*self.pool.keys, *self.pool.values):
            tensor.fill_(POISON)
        self.free = Random(3).sample(range(num_blocks), num_blocks)
        choice = choose_backend(
            "auto", AttentionNeeds(device=device, block_size=block_size, dtype="float32")
        )
        limits = RunnerLimits(
            max_num_batched_tokens=max_tokens,
            max_num_seqs=8,
            max_blocks_per_seq=16,
            num_groups=len(self.groups.windows),
            rows_per_seq=rows_per_seq,
        )
        built = backend(self.pool) if backend else choice.build(self.pool)
        self.runner = ModelRunner(loaded, self.pool, built, limits, record=record)
        self.runner.capture()
        for buffers in (self.runner.buffers, self.runner._other_buffers):
            buffers.arrays.block_tables.fill(num_blocks - 1)  # stale from the start

    def tables(self, num_tokens: int, shared: list[list[int]] | None = None) -> list[list[int]]:
        """Blocks for `num_tokens` in every group, the first of them given."""
        size = -(-num_tokens // self.block_size)
        begun = shared or [[] for _ in self.groups.windows]
        return [[*own, *(self.free.pop() for _ in range(size - len(own)))] for own in begun]

    def slide(self, tables: list[list[int]], num_computed: int) -> int:
        """Give back, and poison, what no token from `num_computed` on sees; how many blocks."""
        given = 0
        for table, window in zip(tables, self.groups.windows, strict=True):
            behind = 0 if window is None else max(0, num_computed - window + 1) // self.block_size
            for at in range(behind):
                if table[at] != self.pool.num_blocks:
                    for tensor in (*self.pool.keys, *self.pool.values):
                        tensor[table[at]] = 10 * POISON
                    table[at] = self.pool.num_blocks
                    given += 1
        return given

    def step(
        self, entries: list[Entry], *, all_rows: bool = True
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Logits of every row, per entry, unless they are not wanted; and of the sampling rows."""
        plan = HandMadePlan(entries, self.runner.buffers.arrays, self.block_size)
        if not all_rows:
            return [], tensor_of(self.runner.prepare(plan)(None).sampling)
        rows = np.arange(plan.num_tokens, dtype=np.int64)
        logits = self.runner.prepare(plan, extra_rows=rows)(None)
        rows_of_entries = tensor_of(logits.extra).split([e.end - e.start for e in entries])
        return list(rows_of_entries), tensor_of(logits.sampling)


def random_model(family: str, **settings: Any) -> Any:
    """A small random model of a family, in eager attention."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**BASE, **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # they start at zero: make them matter
            torch.nn.init.normal_(parameter)
    return model.eval()
