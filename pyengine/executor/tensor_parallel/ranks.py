"""What every rank does: meet the others, make its runner, enter a step with them or not at all.

Inside the forward pass the ranks meet in one collective operation after the other, and who waits
there for a rank that does not come waits for ever. So they ask each other before the first of them:
each has its inputs, has copied its blocks and has prepared its attention. A rank that failed at
that says so, and all of them leave the step in the same state.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from pyengine.attention.backend import AttentionBackend, AttentionPlan, GraphPlan, StepInputs
from pyengine.attention.choice import choose_backend
from pyengine.errors import ConfigurationError
from pyengine.executor.model_runner import ModelRunner
from pyengine.executor.tensor_parallel.messages import RankSetup, RunnerSetup
from pyengine.kv_cache.pool import KVPool, kv_cache_specs
from pyengine.models.loader import LoadedModel
from pyengine.utils.cpus import usable_cpus

_MEETING_TIME = timedelta(seconds=60)
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOCAL_RANK = "LOCAL_RANK"
_THREADS_VARIABLE = "OMP_NUM_THREADS"


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


def threads_per_rank(size: int) -> int | None:
    """CPU threads of one of `size` processes; None: the user has said it, `OMP_NUM_THREADS`."""
    if _THREADS_VARIABLE in os.environ:
        return None
    return max(1, usable_cpus().count // size)


class StepAbandoned(Exception):
    """Another rank was not ready, and no rank has entered the forward pass."""


class Readiness:
    """What this rank tells the others in the current step, and whether it did."""

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


class AgreedBackend:
    """An attention backend whose plans are made on all ranks or on none.

    A graph would be captured without asking the others, so it makes no plans for graphs.
    """

    supports_graphs = False
    shared_group = None

    def __init__(self, backend: AttentionBackend, readiness: Readiness) -> None:
        self.name = backend.name
        self.reads_tables = backend.reads_tables
        self._backend = backend
        self._readiness = readiness

    def plan(self, inputs: StepInputs) -> AttentionPlan:
        """Prepare a step, and wait until all ranks have: the last thing before the first layer."""
        plan = self._backend.plan(inputs)
        self._readiness.confirm()
        return plan

    def graph_plan(self, inputs: StepInputs) -> GraphPlan:
        """See `AttentionBackend.graph_plan`."""
        raise ConfigurationError("tensor parallelism runs without CUDA graphs: enforce_eager=True")


def make_runner(loaded: LoadedModel, setup: RunnerSetup, readiness: Readiness) -> ModelRunner:
    """A rank's runner, over its own pool: this process's part of every block."""
    specs = kv_cache_specs(loaded.config, setup.needs.cache_dtype, loaded.kv_shards)
    pool = KVPool(specs, setup.num_blocks, setup.block_size, loaded.device, setup.groups)
    needs = replace(setup.needs, device=loaded.device)
    backend = choose_backend(setup.attention_backend, needs).build(pool)
    return ModelRunner(loaded, pool, AgreedBackend(backend, readiness), setup.limits)
