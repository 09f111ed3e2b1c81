"""Tensor parallelism: a model divided over processes, with the interface of `ModelRunner`.

This process is rank 0. It alone has a block manager, a scheduler and requests; the workers get
the arrays of a step and know nothing else::

    engine -> DistributedRunner -> message -> every worker -> its ModelRunner
                     \\-> ModelRunner of rank 0 -> logits

Each rank computes its part of every layer and keeps its part of the KV heads. The ranks meet in
the collective operations of transformers' tensor-parallel plan. Why messages go over a socket and
not as a broadcast of the process group: a rank that waits in a collective operation is subject to
its timeout, and an engine may be idle for longer.
"""

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from pyengine.errors import ConfigurationError, EngineDeadError, WorkerError
from pyengine.executor.cpu_threads import compute_threads
from pyengine.executor.model_runner import Forward, ModelRunner, MTPStep, Plan, StepLogits
from pyengine.executor.tensor_parallel.ranks import (
    Barrier,
    Failed,
    Loaded,
    RankSetup,
    Report,
    RunnerSetup,
    StepAbandoned,
    join,
    make_runner,
    pack_step,
    rank_environment,
)
from pyengine.executor.tensor_parallel.workers import WORKER, Workers
from pyengine.kv_cache.memory import available_memory
from pyengine.models.config import read_config
from pyengine.models.loader import LoadedModel, load_model
from pyengine.models.placement import check_tensor_parallel, resolve_first_device
from pyengine.models.source import ModelSource, resolve_source

_OTHERS_FAIL_TOO = 4.0
"""Seconds for the workers to report, once rank 0 has failed within the forward pass."""


class WorkerGroup:
    """All ranks of a model: the workers, and this process's part of the model, `loaded`.

    `device` and `dtype` are those of `load_model`. Nothing is started before the model's
    configuration says that it can be divided by `size`. As a context manager it ends the workers
    only if the block fails; otherwise they end with `close`, with this object and its runner, or
    with the interpreter. `module` is what a worker runs.

    Raises `ConfigurationError` for a size or a device that cannot be had, `ModelLoadError` as
    `load_model` does, and `EngineDeadError` if a worker ends meanwhile.
    """

    def __init__(
        self,
        model: str | Path | ModelSource | None,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        size: int,
        num_threads: int | None = None,
        module: str = WORKER,
    ) -> None:
        first = resolve_first_device(device, size)
        source = resolve_source(model)
        check_tensor_parallel(read_config(source.folder), size)
        if not dist.is_available():
            raise ConfigurationError(
                f"tensor_parallel_size={size}: this build of torch {torch.__version__} has no "
                "torch.distributed; use tensor_parallel_size=1"
            )
        if dist.is_initialized():
            raise ConfigurationError(
                f"tensor_parallel_size={size}: this process is in a group of torch.distributed "
                "already, and there can be one; close() the other LLM, or leave the group"
            )
        self._resources = ExitStack()
        self._end = weakref.finalize(self, _release, self._resources, os.getpid())
        try:
            store = Path(tempfile.mkdtemp(prefix="pyengine-"))
            self._resources.callback(shutil.rmtree, store, ignore_errors=True)
            if num_threads is None:
                num_threads = compute_threads(None, size).count
            setups = [
                RankSetup(
                    rank=rank,
                    size=size,
                    store=store / "ranks",
                    model=source,
                    device=str(first),
                    dtype=dtype,
                    num_threads=num_threads,
                )
                for rank in range(size)
            ]
            on_death = _abort if first.type == "cuda" else _nothing
            self._workers = Workers(setups[1:], on_death=on_death, module=module)
            self._resources.callback(self._workers.close)
            self._start(setups[0])
        except BaseException:
            self.close()
            raise

    def _start(self, setup: RankSetup) -> None:
        """Meet the workers and load, all at the same time."""
        self._await()
        try:
            with rank_environment(setup.rank):
                self._resources.callback(_leave)
                join(setup)
                self.loaded: LoadedModel = load_model(
                    setup.model,
                    device=setup.device,
                    dtype=setup.dtype,
                    tensor_parallel_size=setup.size,
                )
        except RuntimeError as error:  # what gloo raises when another rank is gone
            self._workers.check()
            raise error
        memory = [item.available_memory for item in self._await() if isinstance(item, Loaded)]
        memory.append(available_memory(self.loaded.device))
        shared = setup.size if self.loaded.device.type == "cpu" else 1
        self.available_memory = min(memory) // shared
        """Bytes for the pool of each rank: those of one machine share its memory."""

    def _await(self) -> list[Report]:
        """A report of every worker; `EngineDeadError` if one could not do what it was to do."""
        reports = self._workers.reports() or []
        if any(isinstance(report, Failed) for report in reports):
            raise self._workers.death(reports)
        return reports

    def runner(self, setup: RunnerSetup) -> "DistributedRunner":
        """The runner of all ranks; once."""
        self._workers.send(setup)
        barrier = Barrier()
        runner = make_runner(self.loaded, setup, barrier)
        self._await()
        return DistributedRunner(self, self._workers, runner, barrier, setup.block_size)

    def kill(self) -> None:
        """End the workers at once: a step that waits for one of them fails."""
        self._workers.kill("interrupted within a step")

    def close(self) -> None:
        """End the workers and leave the process group. Again it does nothing."""
        self._end()

    def __enter__(self) -> "WorkerGroup":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self.close()


class DistributedRunner:
    """Runs a step on all ranks. Made by `WorkerGroup.runner`.

    If a step fails while all workers live, every rank leaves it and the error is raised here: the
    engine can roll the step back and go on. `WorkerError` has the traceback of a worker. If a
    worker ends, this and every later call raises `EngineDeadError`.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        workers: Workers,
        runner: ModelRunner,
        barrier: Barrier,
        block_size: int,
    ) -> None:
        self._worker_group = worker_group  # whose workers end with it
        self._workers = workers
        self._runner = runner
        self._barrier = barrier
        self._block_size = block_size

    def prepare(
        self,
        plan: Plan,
        *,
        extra_rows: npt.NDArray[np.int64] | None = None,
        mtp: MTPStep | None = None,
    ) -> Forward:
        """See `Runner.prepare`. One step at a time: the workers do not learn the sampled tokens."""
        self._workers.check()
        arrays = self._runner.buffers.arrays  # those that the step is written into
        forward = self._runner.prepare(plan, extra_rows=extra_rows)
        message = pack_step(plan, arrays, extra_rows, self._block_size).tobytes()
        return lambda sampled: self._run(forward, sampled, message)

    def _run(self, forward: Forward, sampled: torch.Tensor | None, message: bytes) -> StepLogits:
        self._workers.check()
        is_sent = False
        try:
            self._barrier.begin()
            is_sent = True
            self._workers.send(message)
            logits = forward(sampled)
            if logits.sampling.is_cuda:  # a worker's death must not be seen after the sampling
                torch.cuda.current_stream().synchronize()
                self._workers.check()
            reports = self._workers.reports() or []
            self._workers.carry_on(reports)
            self._raise_failure(reports)
        except (EngineDeadError, WorkerError):
            raise
        except StepAbandoned:
            self._raise_failure(self._workers.reports() or [])
            raise
        except BaseException as error:
            if is_sent:
                self._leave_step(error)
            raise
        return logits

    def _leave_step(self, error: BaseException) -> None:
        """After a failure of rank 0: bring all ranks out of the step, or end the engine."""
        self._workers.check()
        if self._barrier.is_asked:
            try:
                self._barrier.refuse()
            except RuntimeError as lost:  # what gloo raises when another rank is gone
                raise self._workers.death() from lost
            self._workers.reports()
            return
        # In the forward pass. A rank that leaves it has either met the others in every operation
        # so far or failed before the same one, so if all have left they are at the same place.
        reports = self._workers.reports(_OTHERS_FAIL_TOO)
        if reports is None:
            cause = f"rank 0 failed within a step that the workers are still in: {error!r}"
            raise self._workers.kill(cause) from error
        self._workers.carry_on(reports)

    @staticmethod
    def _raise_failure(reports: Sequence[Report]) -> None:
        for rank, report in enumerate(reports, start=1):
            if isinstance(report, Failed):
                raise WorkerError(
                    f"rank {rank} failed in a step, which is rolled back; its traceback:\n"
                    f"{report.traceback}"
                )


def _release(resources: ExitStack, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork of rank 0, whose workers they are not
        resources.close()


def _leave() -> None:
    """Leave the process group, if this process is in it still."""
    if dist.is_initialized():
        with suppress(RuntimeError):  # the others may be gone
            dist.destroy_process_group()


def _abort() -> None:
    """Wake rank 0 out of an NCCL operation whose other ranks have been killed."""
    abort: Any = dist.distributed_c10d._abort_process_group
    with suppress(RuntimeError, ValueError):
        abort()


def _nothing() -> None:
    """Gloo notices by itself that a connection has closed."""
