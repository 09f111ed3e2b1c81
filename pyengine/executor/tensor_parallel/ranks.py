"""Messages between rank 0 and the workers, and the work of every rank.

A worker receives two setups, then steps, and answers each with a report.

Inside the forward pass the ranks meet in one collective operation after the other, and a rank that
waits there for one that does not come waits for ever. So they ask each other before the first of
them, when each has its inputs, has copied its blocks and has prepared its attention. If a rank
failed at that, all of them leave the step in the same state.
"""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from pyengine.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    GraphMetadata,
    StepInputs,
)
from pyengine.attention.choice import Choice
from pyengine.executor.cuda_graphs import CudaGraphRecorder
from pyengine.executor.input_buffers import HostArrays, Plan, RunnerLimits
from pyengine.executor.model_runner import ModelRunner
from pyengine.kv_cache import SharedPrefixes, StepBuffers
from pyengine.models.loaded import LoadedModel
from pyengine.models.source import ModelSource

if TYPE_CHECKING:
    from pyengine.executor.kv_cache_config import KVCacheConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """The first message to a worker: which rank it is, of which model.

    `store` is a file through which the ranks find each other. `device` is that of rank 0.
    `num_threads` compute on the CPU in each rank.
    """

    rank: int
    size: int
    store: Path
    model: ModelSource
    device: str
    dtype: torch.dtype | str
    num_threads: int

    @property
    def own_device(self) -> torch.device:
        """The device of this rank: on CUDA one for each."""
        on_cuda = torch.device(self.device).type == "cuda"
        return torch.device("cuda", self.rank) if on_cuda else torch.device("cpu")


@dataclass(frozen=True, slots=True)
class RunnerSetup:
    """The second message: the KV cache, the attention backend and the largest step.

    All ranks have the same number of blocks, each with its part of the KV heads in them. With
    `graphs` they capture decode steps.
    """

    cache: "KVCacheConfig"
    choice: Choice
    limits: RunnerLimits
    graphs: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """A worker has done its task, unless it has a traceback.

    `in_forward`: it failed in the forward pass. Then it goes on only when rank 0 says that all
    ranks have left the pass.
    """

    traceback: str = ""
    in_forward: bool = False
    available_memory: int = 0
    """Bytes on its device, once it has its part of the model."""


CARRY_ON = b""
"""The message to a worker that failed in the forward pass; a step is never empty."""


@dataclass(slots=True)
class PackedStep:
    """A step plan for another process: it fills the arrays there as the plan filled rank 0's."""

    num_tokens: int
    num_sequences: int
    num_samples: int
    filled: HostArrays
    """The part of the arrays that the step has written."""
    extra_rows: npt.NDArray[np.int64] | None
    block_copies: list[tuple[int, int]]
    arrays: HostArrays | None = None
    """Those of the process that has received it."""

    def copies(self) -> list[tuple[int, int]]:
        """Blocks to copy before the step, (source, destination)."""
        return self.block_copies

    def fill(self, _buffers: StepBuffers, /, *, shared: SharedPrefixes | None = None) -> None:
        """Write the step's inputs into this process's arrays."""
        for name in HostArrays.__dataclass_fields__:
            numbers = getattr(self.filled, name)
            getattr(self.arrays, name)[tuple(map(slice, numbers.shape))] = numbers


def pack_step(
    plan: Plan, arrays: HostArrays, extra_rows: npt.NDArray[np.int64] | None, block_size: int
) -> bytes:
    """The message of a step whose plan has filled `arrays`: a `PackedStep`, pickled.

    Tables are cut to the longest of the step.
    """
    tokens, sequences = plan.num_tokens, plan.num_sequences
    longest = int(arrays.seq_lens[:sequences].max(initial=0))
    filled = HostArrays(
        input_ids=arrays.input_ids[:tokens],
        positions=arrays.positions[:tokens],
        slot_mapping=arrays.slot_mapping[:, :tokens],
        query_start_loc=arrays.query_start_loc[: sequences + 1],
        seq_lens=arrays.seq_lens[:sequences],
        block_tables=arrays.block_tables[:, :sequences, : -(-longest // block_size)],
        logits_indices=arrays.logits_indices[: plan.num_samples],
    )
    step = PackedStep(tokens, sequences, plan.num_samples, filled, extra_rows, plan.copies())
    return pickle.dumps(step)


_MEETING_TIME = timedelta(seconds=60)
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOCAL_RANK = "LOCAL_RANK"


@contextmanager
def rank_environment(rank: int) -> Iterator[None]:
    """The environment in which a rank meets the others and loads; afterwards it is as before.

    Gloo's sockets are bound to this machine's loopback, unless the user chose. For its modules,
    transformers takes the CUDA device whose number is `LOCAL_RANK`.
    """
    ours = {_LOCAL_RANK: str(rank)}
    if _GLOO_INTERFACE not in os.environ:
        ours[_GLOO_INTERFACE] = "lo"
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def join(setup: RankSetup) -> None:
    """Meet the other ranks: torch's default process group, gloo on the CPU and NCCL on CUDA.

    Gloo is there with CUDA too: the ranks agree about a step on the host.
    """
    from torch.distributed import FileStore  # type: ignore[attr-defined] # it is public

    device = setup.own_device
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
    store = FileStore(str(setup.store), setup.size)
    store.set_timeout(_MEETING_TIME)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=store,
        rank=setup.rank,
        world_size=setup.size,
        device_id=device if on_cuda else None,
    )


class StepAbandoned(Exception):
    """Another rank was not ready, and no rank has entered the forward pass."""


class Barrier:
    """The barrier at which this rank says whether it can enter the current step."""

    def __init__(self) -> None:
        self._ready = torch.ones(1, dtype=torch.int32)
        self.is_asked = False

    def begin(self) -> None:
        """A new step: every rank answers once, with `confirm` or `refuse`."""
        self.is_asked = True

    def confirm(self) -> None:
        """This rank is ready. Raises `StepAbandoned` if another one is not."""
        if not self._all_ready(1):
            raise StepAbandoned

    def refuse(self) -> None:
        """This rank is not ready."""
        self._all_ready(0)

    def agree(self, own: bool) -> bool:
        """True if it is true on all ranks; between steps."""
        return self._all_ready(int(own))

    def _all_ready(self, ready: int) -> bool:
        self.is_asked = False
        self._ready.fill_(ready)
        dist.all_reduce(self._ready, op=dist.ReduceOp.MIN)
        return bool(self._ready.item())


class AgreedBackend(AttentionBackend):
    """An attention backend that builds and refreshes metadata on all ranks or on none."""

    def __init__(self, backend: AttentionBackend, barrier: Barrier) -> None:
        self.name = backend.name
        self.reads_tables = backend.reads_tables
        self.supports_graphs = backend.supports_graphs
        self._backend = backend
        self._barrier = barrier

    def metadata(self, inputs: StepInputs) -> AttentionMetadata:
        """Prepare a step, and wait until all ranks have: the last thing before the first layer."""
        metadata = self._backend.metadata(inputs)
        self._barrier.confirm()
        return metadata

    def graph_metadata(self, inputs: StepInputs) -> GraphMetadata:
        """Prepare a decode step that is captured on all ranks."""
        return _AgreedGraphMetadata(self._backend.graph_metadata(inputs), self._barrier)


class _AgreedGraphMetadata:
    """Metadata of a graph that is replayed on all ranks or on none."""

    def __init__(self, metadata: GraphMetadata, barrier: Barrier) -> None:
        self._metadata = metadata
        self._barrier = barrier
        self.forward = metadata.forward

    def refresh(self, inputs: StepInputs) -> None:
        """Prepare a step, and wait until all ranks have: the last thing before the replay."""
        self._metadata.refresh(inputs)
        self._barrier.confirm()


def make_runner(loaded: LoadedModel, setup: RunnerSetup, barrier: Barrier) -> ModelRunner:
    """A rank's runner, over its own pool: this process's part of every block.

    All ranks make it at the same time, and capture the same graphs.
    """
    pool = setup.cache.pool(loaded)
    backend = AgreedBackend(setup.choice.build(pool), barrier)
    with_graphs = setup.graphs and backend.supports_graphs
    record = CudaGraphRecorder(has_peers=True) if with_graphs else None
    runner = ModelRunner(loaded, pool, backend, setup.limits, record=record, agree=barrier.agree)
    runner.capture()
    return runner
