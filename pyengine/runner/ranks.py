"""What rank 0 and the workers have in common: how they meet, what they are told, what they say."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pyengine.attention import AttentionNeeds, choose_backend
from pyengine.cache.kv_pool import KVPool, kv_cache_specs
from pyengine.cache.layer_groups import LayerGroups
from pyengine.models import LoadedModel
from pyengine.runner.buffers import RunnerLimits
from pyengine.runner.model_runner import ModelRunner
from pyengine.runner.readiness import AgreedBackend, Readiness

_MEETING_TIME = timedelta(seconds=60)
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_THREADS_VARIABLE = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """The first thing that a worker is told: which rank it is, of which model.

    `store` is a file through which the ranks find each other. `device` is that of rank 0.
    """

    rank: int
    size: int
    store: Path
    model: Path
    device: str
    dtype: torch.dtype | str

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
    """A worker did what it was told."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker did not: its traceback.

    `in_forward`: it had entered the forward pass. Then it goes on only when rank 0 says that all
    ranks have left the pass.
    """

    traceback: str
    in_forward: bool


Report = Started | Loaded | Done | Failed
"""What workers say."""

CARRY_ON = b""
"""What rank 0 says to a worker that failed in the forward pass; a step is never empty."""


@contextmanager
def loopback_only() -> Iterator[None]:
    """Gloo's sockets are bound to this machine's loopback inside, unless the user chose."""
    if _GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[_GLOO_INTERFACE] = "lo"
    try:
        yield
    finally:
        os.environ.pop(_GLOO_INTERFACE, None)


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
    return max(1, len(os.sched_getaffinity(0)) // size)


def make_runner(loaded: LoadedModel, setup: RunnerSetup, readiness: Readiness) -> ModelRunner:
    """A rank's runner, over its own pool: this process's part of every block."""
    specs = kv_cache_specs(loaded.config, setup.needs.cache_dtype, loaded.kv_shards)
    pool = KVPool(specs, setup.num_blocks, setup.block_size, loaded.device, setup.groups)
    needs = replace(setup.needs, device=loaded.device)
    backend = choose_backend(setup.attention_backend, needs).build(pool)
    return ModelRunner(loaded, pool, AgreedBackend(backend, readiness), setup.limits)
