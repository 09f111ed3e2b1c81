"""Decode steps as CUDA graphs: the launches of a forward pass, captured once per batch size.

A step of B sequences that all decode is replayed in the graph of the next larger size. Padding
has length 1, reads the null block and has no slots. Inputs are in tensors that never move; the
graphs share one memory pool, so the largest is captured first. Where a backend reads shared blocks
once, a size has a second graph for steps in which that is faster.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from pyengine.attention.backend import AttentionBackend, GraphMetadata, StepInputs
from pyengine.executor.input_buffers import InputBuffers, Padding, Plan

_log = logging.getLogger(__name__)

Compute = Callable[[], torch.Tensor]


Record = Callable[[Compute], Compute]
"""Captures launches on fixed tensors, after they have run once. The result replays them into the
same tensor."""


Between = Callable[[Sequence[torch.Tensor], torch.Tensor], object]
"""Runs between two pieces of a pass: reads tensors of the first, and fills one of the second."""


class Interrupt(Protocol):
    """Ends a piece of a pass that is captured, and begins the next."""

    def __call__(
        self, between: Between, sources: Sequence[torch.Tensor], shape: Sequence[int]
    ) -> torch.Tensor:
        """A tensor of `shape`, with the type of the first source, for the next piece.

        Each replay calls `between(sources, tensor)`. The capture does not.
        """


RecordPieces = Callable[[Callable[[Interrupt], torch.Tensor]], Compute]
"""Captures a pass that calls `Interrupt`. The result replays the pieces and runs what is between
them, and returns the tensor of the capture: valid until another graph is replayed."""


Agree = Callable[[bool], bool]
"""True if all ranks of a divided model say so; each calls it at the same places."""


class CaptureFailed(RuntimeError):
    """No rank has the graph, because one could not capture it."""


class CudaGraphRecorder:
    """Captures CUDA graphs that share one memory pool. See `Record`, and `RecordPieces`.

    With `has_peers`, other threads may ask CUDA meanwhile: NCCL's looks at its events.
    """

    def __init__(self, *, has_peers: bool = False) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._errors = "thread_local" if has_peers else "global"

    def __call__(self, compute: Compute) -> Compute:
        """Capture `compute`."""
        with self._capturing() as context:
            result = compute()
        graph = context.cuda_graph

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    def pieces(self, compute: Callable[[Interrupt], torch.Tensor]) -> Compute:
        """Capture `compute` as several graphs.

        The memory between pieces belongs to the pool. Later pieces, and passes captured later, use
        it again: replays keep the order of the capture, and one pass ends before another begins.
        """
        pieces: list[tuple[torch.cuda.CUDAGraph, Callable[[], object]]] = []

        def interrupt(
            between: Between, sources: Sequence[torch.Tensor], shape: Sequence[int]
        ) -> torch.Tensor:
            ended = context.cuda_graph
            ended.capture_end()
            context.cuda_graph = torch.cuda.CUDAGraph()
            context.cuda_graph.capture_begin(pool=self._pool, capture_error_mode=self._errors)
            result = sources[0].new_empty(shape)
            memory = [unowned(source) for source in sources]
            pieces.append((ended, partial(between, memory, unowned(result))))
            return result

        with self._capturing() as context:
            result = unowned(compute(interrupt))
        last = context.cuda_graph

        def replay() -> torch.Tensor:
            for graph, between in pieces:
                graph.replay()
                between()
            last.replay()
            return result

        return replay

    @contextmanager
    def _capturing(self) -> Iterator[torch.cuda.graph]:
        """Inside, launches are captured. The end of it ends the capture of the context's graph."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        context = torch.cuda.graph(graph, pool=self._pool, capture_error_mode=self._errors)
        # The outer context restores the stream, which torch < 2.12 leaves if the capture fails.
        with torch.cuda.stream(torch.cuda.current_stream()), context:
            yield context


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, size and strides, without keeping the allocator from using it again."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr(), tensor.device, extent * tensor.itemsize
    )
    return tensor.new_empty(0).set_(storage, 0, tensor.shape, tensor.stride())


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: 1, 2, 4, every 8th to 256, every 32nd to 512; and the largest."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, 513, 32)]
    largest = min(max_num_seqs, sizes[-1])
    return [size for size in sizes if size < largest] + [largest]


_BuildMetadata = Callable[[StepInputs], GraphMetadata | None]


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step: its inputs on the device, its attention, and its replay."""

    inputs: StepInputs
    metadata: GraphMetadata
    replay: Compute


class DecodeGraphs:
    """The graphs of all sizes over one set of input tensors.

    `forward(inputs, metadata)` runs the model and returns the logits of `inputs.logits_indices`,
    which are all rows in a decode step.
    """

    def __init__(
        self,
        forward: Callable[[StepInputs, GraphMetadata], torch.Tensor],
        backend: AttentionBackend,
        buffers: InputBuffers,
        null_block: int,
        agree: Agree | None = None,
    ) -> None:
        """With `agree`, all ranks have a graph or none; they capture at the same time."""
        self._forward = forward
        self._agree = agree
        self._backend = backend
        self._buffers = buffers
        self._null_block = null_block
        self._graphs: dict[int, _Graph] = {}
        self._sharing: dict[int, _Graph] = {}
        self.sizes: list[int] = []
        """The batch sizes that have a graph, smallest first."""
        self.sharing_sizes: list[int] = []
        """Those that have one that reads shared blocks once, too."""
        self.has_failed = False
        """True if a capture failed: no other may follow."""
        self._logits: torch.Tensor | None = None
        """One tensor for all graphs, as wide as the largest: separate ones would stay allocated."""

    def capture(self, sizes: Sequence[int], record: Record) -> None:
        """Capture a graph for each size, the largest first.

        No capture follows one that fails: CUDA and the allocator may still be in it. The log says
        why. Steps without a graph run in the next larger one, or eagerly without one.

        Raises the error of a pass without a capture if other ranks take part: they wait in it.
        """
        backend = self._backend
        is_done = self._capture_all(sizes, record, backend.graph_metadata, self._graphs)
        if is_done and backend.shared_group is not None:
            self._capture_all(sizes, record, backend.sharing_graph_metadata, self._sharing)
        self.sizes, self.sharing_sizes = sorted(self._graphs), sorted(self._sharing)

    def _capture_all(
        self, sizes: Sequence[int], record: Record, build: _BuildMetadata, graphs: dict[int, _Graph]
    ) -> bool:
        """Capture into `graphs`; False: a capture failed."""
        left = sorted(sizes)
        while left:
            try:
                graph = self._captured(left[-1], record, build)
            except Exception as error:  # any kernel may refuse to be captured
                if self._agree is not None and not isinstance(error, CaptureFailed):
                    raise
                kind = "CUDA graphs" if graphs is self._graphs else "CUDA graphs with shared blocks"
                said = f"{type(error).__name__}: {error}"
                _log.warning("no %s for batches of %s, %s", kind, left, said)
                self.has_failed = True
                return False
            size = left.pop()
            if graph is not None:
                graphs[size] = graph
        return True

    @torch.inference_mode()
    def _captured(self, size: int, record: Record, build: _BuildMetadata) -> _Graph | None:
        inputs = self._buffers.fixed_inputs(Padding(size, self._null_block))
        metadata = build(inputs)
        if metadata is None:
            return None
        first = self._forward(inputs, metadata)  # all first-use setup runs now
        if self._logits is None:
            self._logits = torch.empty_like(first)
        logits = self._logits[:size]

        def compute() -> torch.Tensor:
            return logits.copy_(self._forward(inputs, metadata))

        return _Graph(inputs, metadata, self._recorded(record, compute))

    def _recorded(self, record: Record, compute: Compute) -> Compute:
        if self._agree is None:
            return record(compute)
        failure: Exception | None = None
        try:
            replay = record(compute)
        except Exception as error:
            failure = error
        if not self._agree(failure is None):
            said = "on another rank" if failure is None else f"{type(failure).__name__}: {failure}"
            raise CaptureFailed(said) from failure
        return replay

    def padding(self, plan: Plan) -> Padding | None:
        """The padding of a step; None if not all of its sequences decode, or there is no graph."""
        count = plan.num_sequences
        if not plan.num_tokens == count == plan.num_samples:
            return None
        at = bisect_left(self.sizes, count)
        return Padding(self.sizes[at], self._null_block) if at < len(self.sizes) else None

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> torch.Tensor:
        """The logits of a padded step: `[B, vocab]`, valid until the next call.

        `inputs` are on the device, in the buffers of the graphs, except pending tokens and tables.
        Tables are as wide as the step's longest, and copied into the first columns of the
        graph's if the backend reads them.
        """
        size = len(inputs.seq_lens)
        cascade = self._backend.cascade(inputs) if size in self._sharing else None
        graph = (self._graphs if cascade is None else self._sharing)[size]
        fixed = graph.inputs
        if inputs.input_ids.data_ptr() != fixed.input_ids.data_ptr():
            fixed.input_ids.copy_(inputs.input_ids)
        if self._backend.reads_tables:
            width = inputs.block_tables.shape[2]
            fixed.block_tables[:, :, :width].copy_(inputs.block_tables)
        graph.metadata.refresh(
            replace(
                fixed,
                host_query_start_loc=inputs.host_query_start_loc,
                host_seq_lens=inputs.host_seq_lens,
                host_block_tables=inputs.host_block_tables,
                cascade=cascade,
            )
        )
        return graph.replay()
