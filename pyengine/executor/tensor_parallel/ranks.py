"""Messages between rank 0 and the workers, and the work of every rank.

A worker receives two setups, then steps, and answers each with a report. A step is one int64 array:
a header, then the arrays of `StepInputs`::

    tokens | sequences | samples | groups | width | extra rows | copies
    input_ids, positions, slot_mapping, query_start_loc, seq_lens, block_tables, logits_indices
    extra rows, copies

`width` is that of the longest table in the step: what lies behind a sequence's last block is not
sent, as nothing reads it.

Every rank meets the others, makes its runner, and enters a step with them or not at all.

Inside the forward pass the ranks meet in one collective operation after the other, and who waits
there for a rank that does not come waits for ever. So they ask each other before the first of them:
each has its inputs, has copied its blocks and has prepared its attention. A rank that failed at
that says so, and all of them leave the step in the same state.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from pyengine.attention.backend import AttentionBackend, AttentionPlan, StepInputs
from pyengine.attention.choice import choose_backend
from pyengine.attention.needs import AttentionNeeds
from pyengine.executor.input_buffers import HostArrays, RunnerLimits
from pyengine.executor.model_runner import ModelRunner, Plan
from pyengine.kv_cache import SharedPrefixes, StepBuffers
from pyengine.kv_cache.layer_groups import LayerGroups
from pyengine.kv_cache.pool import KVPool, kv_cache_specs
from pyengine.models.loader import LoadedModel
from pyengine.models.source import ModelSource

Int64Array = npt.NDArray[np.int64]
_HEADER_SIZE = 7


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSetup:
    """The second thing: the KV pool, the attention backend and the largest step.

    All ranks have the same number of blocks, each with its part of the KV heads in them. `needs`
    are those of rank 0 but for the device.
    """

    num_blocks: int
    block_size: int
    groups: LayerGroups
    attention_backend: str
    needs: AttentionNeeds
    limits: RunnerLimits


@dataclass(frozen=True, slots=True)
class Started:
    """A worker's first word: it has imported what it needs."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A worker has its part of the model; bytes that are available on its device."""

    available_memory: int


@dataclass(frozen=True, slots=True)
class Done:
    """A worker has done its task."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker did not: its traceback.

    `in_forward`: it had entered the forward pass. Then it goes on only when rank 0 says that all
    ranks have left the pass.
    """

    traceback: str
    in_forward: bool


Report = Started | Loaded | Done | Failed
"""A report of a worker."""

CARRY_ON = b""
"""The message to a worker that failed in the forward pass; a step is never empty."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The header."""

    tokens: int
    sequences: int
    samples: int
    groups: int
    width: int
    extra_rows: int
    copies: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every part, in the order of the message."""
        return {
            "input_ids": (self.tokens,),
            "positions": (self.tokens,),
            "slot_mapping": (self.groups, self.tokens),
            "query_start_loc": (self.sequences + 1,),
            "seq_lens": (self.sequences,),
            "block_tables": (self.groups, self.sequences, self.width),
            "logits_indices": (self.samples,),
            "extra_rows": (self.extra_rows,),
            "copies": (self.copies, 2),
        }


def pack_step(
    plan: Plan, arrays: HostArrays, extra_rows: Int64Array | None, block_size: int
) -> Int64Array:
    """The message of a step whose plan has filled `arrays`."""
    copies = np.array(plan.copies(), dtype=np.int64).reshape(-1, 2)
    extra = np.empty(0, dtype=np.int64) if extra_rows is None else extra_rows
    longest = int(arrays.seq_lens[: plan.num_sequences].max(initial=0))
    sizes = _Sizes(
        tokens=plan.num_tokens,
        sequences=plan.num_sequences,
        samples=plan.num_samples,
        groups=len(arrays.block_tables),
        width=-(-longest // block_size),
        extra_rows=len(extra),
        copies=len(copies),
    )
    parts: list[npt.NDArray[np.int64 | np.int32]] = [
        np.array([getattr(sizes, name) for name in sizes.__dataclass_fields__], dtype=np.int64)
    ]
    for name, shape in sizes.shapes().items():
        if name not in ("extra_rows", "copies"):
            part = tuple(slice(size) for size in shape)
            parts.append(getattr(arrays, name)[part].reshape(-1))
    return np.concatenate([*parts, extra, copies.reshape(-1)], dtype=np.int64)


class ReceivedPlan:
    """A step plan out of a message: fills the arrays of this process as the plan filled rank 0's.

    `message` is what `pack_step` gave, as bytes; `arrays` those of this process's buffers.
    """

    def __init__(self, message: bytes, arrays: HostArrays) -> None:
        numbers = np.frombuffer(message, dtype=np.int64)
        sizes = _Sizes(*numbers[:_HEADER_SIZE].tolist())
        self._arrays = arrays
        self._parts: dict[str, Int64Array] = {}
        start = _HEADER_SIZE
        for name, shape in sizes.shapes().items():
            end = start + prod(shape)
            self._parts[name] = numbers[start:end].reshape(shape)
            start = end
        if start != len(numbers):
            raise ValueError(
                f"a step's message has {len(numbers)} numbers, its header says {start}"
            )
        self.num_tokens = sizes.tokens
        self.num_sequences = sizes.sequences
        self.num_samples = sizes.samples
        self.extra_rows = self._parts.pop("extra_rows").copy()
        self._copies = [(source, target) for source, target in self._parts.pop("copies").tolist()]

    def copies(self) -> list[tuple[int, int]]:
        """Blocks to copy before the step, (source, destination)."""
        return self._copies

    def fill(self, _buffers: StepBuffers, /, *, shared: SharedPrefixes | None = None) -> None:
        """Write the step's inputs into this process's arrays."""
        for name, numbers in self._parts.items():
            part = tuple(slice(size) for size in numbers.shape)
            getattr(self._arrays, name)[part] = numbers


_MEETING_TIME = timedelta(seconds=60)
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOCAL_RANK = "LOCAL_RANK"


@contextmanager
def rank_environment(rank: int) -> Iterator[None]:
    """The environment in which a rank meets the others and loads; afterwards it is as before.

    Gloo's sockets are bound to this machine's loopback, unless the user chose. transformers takes
    the CUDA device whose number is `LOCAL_RANK`, of rank 0 as of any other.
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

    def _all_ready(self, ready: int) -> bool:
        self.is_asked = False
        self._ready.fill_(ready)
        dist.all_reduce(self._ready, op=dist.ReduceOp.MIN)
        return bool(self._ready.item())


class AgreedBackend(AttentionBackend):
    """An attention backend whose plans are made on all ranks or on none.

    A graph would be captured without asking the others, so it makes no plans for graphs.
    """

    def __init__(self, backend: AttentionBackend, barrier: Barrier) -> None:
        self.name = backend.name
        self.reads_tables = backend.reads_tables
        self._backend = backend
        self._barrier = barrier

    def plan(self, inputs: StepInputs) -> AttentionPlan:
        """Prepare a step, and wait until all ranks have: the last thing before the first layer."""
        plan = self._backend.plan(inputs)
        self._barrier.confirm()
        return plan


def make_runner(loaded: LoadedModel, setup: RunnerSetup, barrier: Barrier) -> ModelRunner:
    """A rank's runner, over its own pool: this process's part of every block."""
    specs = kv_cache_specs(loaded.config, setup.needs.cache_dtype, loaded.kv_shards)
    pool = KVPool(specs, setup.num_blocks, setup.block_size, loaded.device, setup.groups)
    needs = replace(setup.needs, device=loaded.device)
    backend = choose_backend(setup.attention_backend, needs).build(pool)
    return ModelRunner(loaded, pool, AgreedBackend(backend, barrier), setup.limits)
