"""Runs a decoder over a KV pool: several sequences in a step, chunks of prompts, decodes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pyengine.attention.backend import AttentionBackend, StepInputs
from pyengine.attention.cpu import CpuBackend
from pyengine.attention.gather import GatherBackend
from pyengine.kv_cache.layer_groups import choose_layer_groups
from pyengine.kv_cache.part_tables import PartTables
from pyengine.kv_cache.pool import KVPool
from pyengine.kv_cache.states import StateInputs, StatePool
from pyengine.models.decoder.decoder import Decoder
from pyengine.utils.dtypes import dtype_of

BLOCK = 4
_NUM_BLOCKS = 600
_NUM_SLOTS = 16
_LONGEST = 100
CPU = torch.device("cpu")


@dataclass
class Running:
    """A sequence: its tokens, how many are computed, and its blocks in each layer group.

    `source` is the slot of the state after what is computed, -1: none; `slot` that of later ones.
    """

    tokens: list[int]
    tables: list[list[int]]
    computed: int = 0
    source: int = -1
    slot: int = -1
    logits: list[torch.Tensor] = field(default_factory=list)
    """One for every token that was computed."""


class Runner:
    """A decoder over its own pool, with a backend for attention."""

    def __init__(
        self,
        decoder: Decoder,
        backend: type[AttentionBackend] = GatherBackend,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.decoder, spec = decoder, decoder.spec
        specs = spec.cache_specs(dtype_of(dtype))
        groups = choose_layer_groups(spec.windows, [each.token_bytes for each in specs], _LONGEST)
        self.pool = KVPool(specs, _NUM_BLOCKS, BLOCK, CPU, groups)
        self.backend = backend(self.pool)
        self.states = StatePool(spec.state_specs, _NUM_SLOTS, CPU)
        self._free = np.random.default_rng(0).permutation(_NUM_BLOCKS).tolist()
        self._free_slots = np.random.default_rng(1).permutation(_NUM_SLOTS).tolist()

    def add(self, tokens: Sequence[int]) -> Running:
        count = -(-_LONGEST // BLOCK)
        if len(self._free) < count * len(self.pool.groups.windows):
            raise RuntimeError("the pool is too small for these sequences")
        tables = [[self._free.pop() for _ in range(count)] for _ in self.pool.groups.windows]
        return Running(list(tokens), tables, slot=self.new_slot())

    def new_slot(self) -> int:
        """A slot of a state, whose content is arbitrary; -1 for a model without states."""
        return self._free_slots.pop() if self.states.specs else -1

    @torch.inference_mode()
    def step(self, *chunks: tuple[Running, int]) -> None:
        """Compute further tokens of sequences; keeps the logits of all of them."""
        inputs = self._inputs(chunks)
        ids, positions, rows = inputs.input_ids, inputs.positions, inputs.logits_indices
        metadata = self.backend.metadata(inputs)
        states = self._state_inputs(inputs, chunks)
        if isinstance(self.backend, CpuBackend):
            arrays = ids.numpy(), positions.numpy(), rows.numpy()
            result = torch.from_numpy(self.decoder(*arrays, metadata, states))
            result = result.view(torch.bfloat16) if result.dtype == torch.uint16 else result
        else:
            result = self.decoder(ids, positions, rows, metadata, states)
        start = 0
        for sequence, count in chunks:
            sequence.logits += result[start : start + count].unbind()
            sequence.computed += count
            sequence.source = sequence.slot
            start += count

    def _state_inputs(
        self, inputs: StepInputs, chunks: Sequence[tuple[Running, int]]
    ) -> StateInputs | None:
        if not self.states.specs:
            return None
        sources, slots = (
            np.array([getattr(seq, name) for seq, _ in chunks], np.int64)
            for name in ("source", "slot")
        )
        starts = inputs.host_query_start_loc
        if isinstance(self.backend, CpuBackend):
            return StateInputs(starts, sources, slots, self.states.layers)
        arrays = (torch.from_numpy(array) for array in (starts, sources, slots))
        return StateInputs(*arrays, self.states.tensors)

    def _inputs(self, chunks: Sequence[tuple[Running, int]]) -> StepInputs:
        spans = [(seq, range(seq.computed, seq.computed + count)) for seq, count in chunks]
        slots = [
            [
                seq.tables[group][position // BLOCK] * BLOCK + position % BLOCK
                for seq, span in spans
                for position in span
            ]
            for group in range(len(self.pool.groups.windows))
        ]
        tables = np.array(
            [[seq.tables[group] for seq, _ in chunks] for group in range(len(slots))], np.int32
        )
        parts = PartTables(self.pool.tables, BLOCK)
        tables, slots = parts.block_tables(tables), parts.slots(np.array(slots))
        starts = np.cumsum([0, *(count for _, count in chunks)], dtype=np.int32)
        lengths = np.array([span.stop for _, span in spans], np.int32)
        return StepInputs(
            input_ids=torch.tensor([seq.tokens[at] for seq, span in spans for at in span]),
            positions=torch.tensor([at for _, span in spans for at in span]),
            slot_mapping=torch.from_numpy(slots),
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(lengths),
            block_tables=torch.from_numpy(tables),
            logits_indices=torch.arange(int(starts[-1])),
            host_query_start_loc=starts,
            host_seq_lens=lengths,
            host_block_tables=tables,
        )


def generate(runner: Runner, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Running]:
    """Greedy answers: the prompts in chunks, beside each other, then decodes of all in one step."""
    running = [runner.add(prompt) for prompt in prompts]
    for number, sequence in enumerate(running):
        while (left := len(sequence.tokens) - sequence.computed) > 0:
            decodes = [(earlier, 1) for earlier in running[:number]]
            for earlier, _ in decodes:
                earlier.tokens.append(int(earlier.logits[-1].argmax()))
            runner.step(*decodes, (sequence, min(left, 7)))
    longest = max(len(prompt) for prompt in prompts) + new_tokens
    while any(len(sequence.tokens) < longest for sequence in running):
        unfinished = [sequence for sequence in running if len(sequence.tokens) < longest]
        for sequence in unfinished:
            sequence.tokens.append(int(sequence.logits[-1].argmax()))
        runner.step(*((sequence, 1) for sequence in unfinished))
    return running
