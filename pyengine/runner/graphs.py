"""Decode steps as CUDA graphs: the launches of a forward pass, captured once per batch size.

A step of B sequences that all decode is replayed in the graph of the next larger size. What pads it
has length 1, reads the trash block and writes nowhere. Inputs stand in tensors that never move;
the graphs share one memory pool, so the largest is captured first.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from pyengine.attention.backend import AttentionBackend, AttentionPlan, GraphPlan, StepInputs
from pyengine.runner.buffers import InputBuffers
from pyengine.runner.interface import Plan

_log = logging.getLogger(__name__)

Compute = Callable[[], torch.Tensor]


class Recorder(Protocol):
    """Makes something that can be replayed out of launches on fixed tensors."""

    def record(self, compute: Compute) -> Compute:
        """Capture `compute`, which has run before. The result replays it, into the same tensor."""
        ...


class CudaRecorder:
    """CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Compute) -> Compute:
        """See `Recorder.record`."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool):
            result = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class EagerRecorder:
    """No graphs: the launches are made again. The oracle of graphs, on any device."""

    def record(self, compute: Compute) -> Compute:
        """See `Recorder.record`."""
        return compute


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: 1, 2, 4, every 8th to 256, every 32nd to 512; and the largest."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, 513, 32)]
    largest = min(max_num_seqs, sizes[-1])
    return [size for size in sizes if size < largest] + [largest]


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step: its inputs on the device, its attention, and what replays it."""

    inputs: StepInputs
    plan: GraphPlan
    replay: Compute


class DecodeGraphs:
    """The graphs of all sizes over one set of input tensors.

    `forward(inputs, plan)` runs the model and returns the logits of `inputs.logits_indices`, which
    in a decode step are all rows.
    """

    def __init__(
        self,
        forward: Callable[[StepInputs, AttentionPlan], torch.Tensor],
        backend: AttentionBackend,
        buffers: InputBuffers,
        trash_block: int,
    ) -> None:
        self._forward = forward
        self._backend = backend
        self._buffers = buffers
        self._trash_block = trash_block
        self._graphs: dict[int, _Graph] = {}
        self._sizes: list[int] = []

    @property
    def sizes(self) -> list[int]:
        """The batch sizes that have a graph, smallest first."""
        return list(self._sizes)

    def capture(self, sizes: Sequence[int], recorder: Recorder) -> None:
        """Capture a graph for each size, the largest first.

        If one cannot be captured, all steps run eagerly, and the log says why.
        """
        for size in sorted(sizes, reverse=True):
            try:
                self._graphs[size] = self._captured(size, recorder)
            except Exception as error:  # whatever a kernel says that cannot be captured
                _log.warning(
                    "no CUDA graphs, decode steps run eagerly: for a batch of %d, %s: %s",
                    size,
                    type(error).__name__,
                    error,
                )
                self._graphs, self._sizes = {}, []
                return
            self._sizes.insert(0, size)

    @torch.inference_mode()
    def _captured(self, size: int, recorder: Recorder) -> _Graph:
        inputs = self._pad(self._buffers.fixed_inputs(size), 0)
        plan = self._backend.graph_plan(inputs)

        def compute() -> torch.Tensor:
            return self._forward(inputs, plan)

        compute()  # what is made at first use is made now
        return _Graph(inputs, plan, recorder.record(compute))

    def fits(self, plan: Plan) -> bool:
        """Whether every sequence of the step decodes, and there is a graph for so many."""
        decodes = plan.num_tokens == plan.num_sequences == plan.num_samples
        return decodes and bool(self._sizes) and plan.num_sequences <= self._sizes[-1]

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> torch.Tensor:
        """The logits of a step that `fits`: `[B, vocab]`, valid until the next call.

        `inputs` are on the device, in the buffers that the graphs read, but for the tables: those
        are as wide as the step's longest, and copied into the first columns of the graph's.
        """
        count = len(inputs.seq_lens)
        graph = self._graphs[self._sizes[bisect_left(self._sizes, count)]]
        host = replace(
            graph.inputs,
            host_query_start_loc=inputs.host_query_start_loc,
            host_seq_lens=inputs.host_seq_lens,
            host_block_tables=inputs.host_block_tables,
        )
        graph.inputs.input_ids[:count].copy_(inputs.input_ids)  # what was pending is known now
        width = inputs.block_tables.shape[2]
        graph.inputs.block_tables[:, :count, :width].copy_(inputs.block_tables)
        graph.plan.refresh(self._pad(host, count))
        return graph.replay()[:count]

    def _pad(self, inputs: StepInputs, count: int) -> StepInputs:
        """Rows from `count` on: of length 1, in the trash block, written nowhere."""
        size = len(inputs.seq_lens)
        inputs.input_ids[count:].zero_()
        inputs.positions[count:].zero_()
        inputs.slot_mapping[:, count:].fill_(-1)
        inputs.seq_lens[count:].fill_(1)
        inputs.block_tables[:, count:, 0].fill_(self._trash_block)
        for tensor in (inputs.query_start_loc, inputs.logits_indices):
            torch.arange(len(tensor), dtype=tensor.dtype, device=tensor.device, out=tensor)
        groups, _, width = inputs.host_block_tables.shape
        tables = np.full((groups, size, width), self._trash_block, dtype=np.int32)
        tables[:, :count] = inputs.host_block_tables[:, :count]
        lengths = np.ones(size, dtype=np.int32)
        lengths[:count] = inputs.host_seq_lens[:count]
        return replace(
            inputs,
            host_query_start_loc=np.arange(size + 1, dtype=np.int32),
            host_seq_lens=lengths,
            host_block_tables=tables,
        )
