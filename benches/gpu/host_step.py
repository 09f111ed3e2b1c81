"""The host's time for a decode step on a GPU, with stand-ins for the device's part.

    python -m benches.gpu.host_step [--steps 30]

A real block manager, the runner's input buffers, graphs and the flashinfer backend; its wrappers
and the replay of the graph do nothing, and copies to the device are copies on the host. So what is
left out are the calls of CUDA (a copy is about 5 us to ask for, and there are `copies` of them, and
one more for each group's pages) and flashinfer's own plan, which divides the work in C++. The time
is the processor's, of the one thread.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from statistics import median
from time import thread_time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from pyengine.attention.backend import AttentionMetadata, AttentionOptions, StepInputs
from pyengine.attention.flashinfer import FlashInferBackend
from pyengine.executor.cuda_graphs import DecodeGraphs
from pyengine.executor.input_buffers import (
    InputBuffers,
    RunnerLimits,
    upload_at_once,
)
from pyengine.kv_cache import BlockManager
from pyengine.kv_cache.pool import KVCacheSpec, KVPool

BLOCK, CONTEXT, HEAD_DIM = 16, 570, 64
CPU = torch.device("cpu")


class Wrapper:
    """A wrapper of flashinfer that plans nothing and attends to nothing."""

    def __init__(self, *_: object, **settings: Any) -> None:
        self._pin_memory_int_workspace_buffer = torch.zeros(1, dtype=torch.uint8)
        self.settings = settings

    def reset_workspace_buffer(self, *_: object) -> None:
        """As flashinfer's."""

    def plan(self, *_: object, **__: object) -> None:
        """As flashinfer's."""

    def run(
        self, query: torch.Tensor, _cache: object, *, return_lse: bool = False, **_: object
    ) -> object:
        """As flashinfer's."""
        return (query, query[..., 0]) if return_lse else query


LIBRARY = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=Wrapper,
    BatchPrefillWithPagedKVCacheWrapper=Wrapper,
    fast_decode_plan=lambda *_, **__: None,
    merge_state_in_place=lambda *_: None,
)


class NoLaunches:
    """Captures nothing: a replay gives what the first pass gave."""

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """See `executor.cuda_graphs.Record`."""
        result = compute()
        return lambda: result


class CountingCopies:
    """Copies at once, and counts."""

    def __init__(self) -> None:
        self.count = self.num_bytes = 0

    def __call__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See `input_buffers.Upload`."""
        self.count += 1
        self.num_bytes += source.nbytes
        upload_at_once(source, target)


@dataclass(frozen=True)
class Case:
    """A step of `rows` decodes, tables of up to `width` pages, `groups` of layers.

    `longest`: one of the sequences is as long as its table.
    """

    rows: int
    width: int
    groups: int
    longest: bool = False


class Host:
    """Everything between a plan and the launch of its graph."""

    def __init__(self, case: Case) -> None:
        self.case, self.copies = case, CountingCopies()
        lengths = [CONTEXT + row % BLOCK for row in range(case.rows)]
        if case.longest:
            lengths[-1] = case.width * BLOCK - 8 * BLOCK  # and grows meanwhile
        windows = (None,) * case.groups
        blocks = case.groups * sum(-(-each_length // BLOCK) + 20 for each_length in lengths)
        self.manager = BlockManager(blocks, BLOCK, groups=windows)
        specs = [KVCacheSpec(1, HEAD_DIM, HEAD_DIM, "bfloat16")] * case.groups
        pool = KVPool(specs, 1, BLOCK, CPU)
        pool.groups = SimpleNamespace(  # type: ignore[assignment]
            locations=[SimpleNamespace(group=group, index=group) for group in range(case.groups)],
            windows=windows,
        )
        with patch.dict(sys.modules, {"flashinfer": LIBRARY}):
            self.backend = FlashInferBackend(pool)
        self.backend.writer.write_step = lambda _layer, rows, *_: rows[0]  # type: ignore[method-assign]
        limits = RunnerLimits(
            max_num_batched_tokens=case.rows,
            max_num_seqs=case.rows,
            max_blocks_per_seq=case.width,
            num_groups=case.groups,
        )
        self.buffers = InputBuffers(limits, BLOCK, CPU, self.backend, apart=True)
        self.buffers._upload = self.copies
        self.graphs = DecodeGraphs(self._forward, self.backend, self.buffers, blocks)
        self.graphs.capture([case.rows], NoLaunches())
        self.sequences = [
            self.manager.sequence(np.arange(each_length) + 7 * each_length)
            for each_length in lengths
        ]
        for sequence, length in zip(self.sequences, lengths, strict=True):
            plan = self.manager.begin_step(length)
            plan.prefill(sequence, length)
            plan.commit([1])

    def _forward(self, inputs: StepInputs, metadata: AttentionMetadata) -> torch.Tensor:
        rows = torch.zeros(len(inputs.seq_lens), 1, HEAD_DIM, dtype=torch.bfloat16)
        for layer in range(self.case.groups):
            metadata.forward(layer, (rows, rows, rows), AttentionOptions(1.0))
        return rows[:, 0]

    def step(self) -> tuple[float, float]:
        """Seconds of the host: from the plan to the launch; and with the plan and its commit."""
        begin = thread_time()
        plan = self.manager.begin_step(self.case.rows)
        plan.decode(self.sequences)
        planned = thread_time()
        filled = self.buffers.fill(plan, self.graphs.padding(plan))
        self.graphs.run(filled.upload())
        launched = thread_time()
        plan.commit(np.ones(self.case.rows, dtype=np.int64))
        return launched - planned, thread_time() - begin


def figures(cases: list[Case], steps: int) -> Iterator[dict[str, object]]:
    """Medians of so many steps, after three."""
    for case in cases:
        host = Host(case)
        for _ in range(3):
            host.step()
        host.copies.count = host.copies.num_bytes = 0
        inputs, whole = zip(*(host.step() for _ in range(steps)), strict=True)
        yield {
            "rows": case.rows,
            "pages": case.width,
            "groups": case.groups,
            "one as long": "yes" if case.longest else "no",
            "inputs ms": round(1000 * median(inputs), 3),
            "with plan and commit ms": round(1000 * median(whole), 3),
            "copies": host.copies.count // steps,
            "bytes": host.copies.num_bytes // steps,
        }


def main(arguments: list[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benches.gpu.host_step", description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--pages", type=int, nargs="+", default=[263, 2560, 8192])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 7])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    several = product(options.rows, options.groups, options.pages, (False, True))
    cases = [Case(rows, pages, groups, longest) for rows, groups, pages, longest in several]
    for number, row in enumerate(figures(cases, options.steps)):
        if not number:
            print(f"| {' | '.join(row)} |\n|{'---:|' * len(row)}")
        cells = [f"{match:,}" if isinstance(match, int) else str(match) for match in row.values()]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
