"""Tensor parallelism: a model divided over processes, with the interface of `ModelRunner`.

This process is rank 0. It alone has a block manager, a scheduler and requests; the workers get
the arrays of a step and know nothing else::

    engine -> DistributedRunner -> message -> every worker -> its ModelRunner
                     \\-> ModelRunner of rank 0 -> logits

Each rank computes its part of every layer and keeps its part of the KV heads. The ranks meet in
the sums over their parts, after attention and after the feed-forward part of each layer.

A worker is a plain process (`worker.py` by `python -m`): no fork, and nothing is asked of the
script that makes an `LLM`. Its socket is inherited, so there is no port that another process could
find. Messages are no broadcast of the process group: a rank that waits in a collective operation is
subject to its timeout, and an engine may be idle for longer.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from pyengine.cpu.threads import compute_threads
from pyengine.errors import ConfigurationError, EngineDeadError, WorkerError
from pyengine.executor.cuda_graphs import DecodeGraphs
from pyengine.executor.input_buffers import Plan
from pyengine.executor.model_runner import Forward, ModelRunner, StepLogits
from pyengine.executor.mtp import MTPStep
from pyengine.executor.states import StateSlots
from pyengine.executor.tensor_parallel.ranks import (
    CARRY_ON,
    Barrier,
    RankSetup,
    Report,
    RunnerSetup,
    StepAbandoned,
    join,
    make_runner,
    pack_step,
    rank_environment,
)
from pyengine.kv_cache.memory import available_memory
from pyengine.models.loaded import LoadedModel
from pyengine.models.loader import check_divisible, load_model
from pyengine.models.placement import resolve_first_device
from pyengine.models.source import ModelSource, resolve_source
from pyengine.utils.device_arrays import device_of

_OTHERS_FAIL_TOO = 4.0
"""Seconds for the workers to report, once rank 0 has failed within the forward pass."""

WORKER = "pyengine.executor.tensor_parallel.worker"
"""The module that a worker runs."""

_ENDING_TIME = 2.0
_DEATH_TIME = 1.0
_CAUSE_TIME = 5.0


@dataclass(frozen=True, slots=True)
class _Worker:
    rank: int
    process: "subprocess.Popen[bytes]"
    connection: Connection


@dataclass(slots=True)
class _Fate:
    """How the workers ended. Written by the thread that watches them, read by rank 0."""

    is_over: threading.Event = field(default_factory=threading.Event)
    cause: str = ""
    first: int | None = None
    """The rank that ended first, if that was not requested."""
    is_wanted: bool = False


class Workers:
    """The ranks from 1 on, running until `close`.

    `on_death` is called, in another thread, when a worker has ended by itself and the others have
    been killed. `module` is what a worker runs.
    """

    def __init__(
        self,
        setups: Sequence[RankSetup],
        *,
        on_death: Callable[[], None] | None,
        module: str = WORKER,
    ) -> None:
        self._fate = _Fate()
        self._workers: list[_Worker] = []
        self._last_words = ""
        try:
            for setup in setups:
                self._workers.append(_start(setup.rank, module))
            running = {
                os.pidfd_open(each_worker.process.pid): each_worker for each_worker in self._workers
            }
            threading.Thread(
                target=_watch,
                args=(running, self._fate, on_death),
                name="pyengine-workers",
                daemon=True,
            ).start()
            for worker, setup in zip(self._workers, setups, strict=True):
                self._tell(worker, setup)
        except BaseException:
            self.close()
            raise

    def check(self, patience: float = 0.0) -> None:
        """Raise `EngineDeadError` if a worker has ended, or all were asked to end.

        Waits up to `patience` seconds for one to end.
        """
        if self._fate.is_over.wait(patience) or self._fate.is_wanted:
            raise self.death()

    def send(self, message: RunnerSetup | bytes) -> None:
        """Tell every worker the same: a setup, or the bytes of a step."""
        for worker in self._workers:
            self._tell(worker, message)

    def carry_on(self, reports: Sequence[Report]) -> None:
        """Let workers go on that failed in the forward pass; `reports` has one of each worker.

        They answer. One may have stopped waiting for the others, which made them fail.
        """
        pairs = zip(self._workers, reports, strict=True)
        waiting = [worker for worker, report in pairs if report.in_forward]
        try:
            for worker in waiting:
                worker.connection.send_bytes(CARRY_ON)
            for worker in waiting:
                worker.connection.recv()
        except (EOFError, OSError) as error:
            raise self.death(reports) from error

    def _tell(self, worker: _Worker, message: RankSetup | RunnerSetup | bytes) -> None:
        try:
            if isinstance(message, bytes):
                worker.connection.send_bytes(message)
            else:
                worker.connection.send(message)
        except OSError as error:  # EPIPE: it is gone
            raise self.death() from error

    def reports(self, timeout: float | None = None) -> list[Report] | None:
        """The next report of every worker, in the order of ranks; None after `timeout` seconds.

        Raises `EngineDeadError` if one of them has ended.
        """
        deadline = None if timeout is None else monotonic() + timeout
        reports: list[Report] = []
        try:
            for worker in self._workers:
                left = None if deadline is None else max(0.0, deadline - monotonic())
                if left is not None and not worker.connection.poll(left):
                    return None
                reports.append(worker.connection.recv())
        except (EOFError, OSError) as error:
            raise self.death(reports) from error
        return reports

    def death(self, reports: Sequence[Report] = ()) -> EngineDeadError:
        """The error of an engine that has lost a worker.

        It has the traceback of the worker that ended first, if that is among `reports`, the last
        words of the first workers, or has not been read yet.
        """
        if self._fate.is_wanted:
            return EngineDeadError("the engine was closed: make a new LLM")
        self._fate.is_over.wait(_CAUSE_TIME)
        if self._fate.first is not None:
            self._last_words = self._last_words or self._read_last_words(self._fate.first, reports)
        cause = self._fate.cause or "a worker process no longer answers"
        return EngineDeadError(f"{cause}; the engine has ended, make a new LLM{self._last_words}")

    def _read_last_words(self, rank: int, reports: Sequence[Report]) -> str:
        said = list(reports[rank - 1 : rank])
        connection = self._workers[rank - 1].connection
        with suppress(EOFError, OSError):
            while connection.poll(0):
                said.append(connection.recv())
        failures = [report.traceback for report in said if report.traceback]
        return "".join(f"\nIts last words:\n{text}" for text in failures[-1:])

    def kill(self, cause: str) -> EngineDeadError:
        """End the workers at once because of `cause`; the error to raise."""
        if not self._fate.cause:
            self._fate.cause = cause
        for worker in self._workers:
            worker.process.kill()
        return self.death()

    def close(self) -> None:
        """Close the connections, which ends the workers; kill who has not ended then."""
        self._fate.is_wanted = True
        for worker in self._workers:
            worker.connection.close()
        deadline = monotonic() + _ENDING_TIME
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, deadline - monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()


def _start(rank: int, module: str) -> _Worker:
    ours, theirs = Pipe()
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)  # as it is here
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,  # Ctrl-C in a terminal goes to rank 0 alone
            env={**os.environ, "PYTHONPATH": path},
        )
    return _Worker(rank, process, ours)


def _watch(running: dict[int, _Worker], fate: _Fate, on_death: Callable[[], None] | None) -> None:
    """Wait for the ends of the workers, by their pidfd; the first not wanted ends them all."""
    poller = select.poll()
    workers = list(running.values())
    for descriptor in running:
        poller.register(descriptor, select.POLLIN)
    while running:
        for descriptor, _ in poller.poll():
            poller.unregister(descriptor)
            os.close(descriptor)
            worker = running.pop(descriptor)
            status = worker.process.wait()
            if fate.is_wanted or fate.is_over.is_set():
                continue
            fate.first = worker.rank
            fate.cause = fate.cause or _cause(worker, status)
            for other in workers:
                other.process.kill()
            fate.is_over.set()
            if on_death is not None:
                on_death()


def _cause(worker: _Worker, status: int) -> str:
    who = f"rank {worker.rank} (process {worker.process.pid})"
    if status < 0:
        return f"{who} was ended by {signal.Signals(-status).name}"
    return f"{who} ended by itself with status {status}"


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
        check_divisible(source, size, first)
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
            # Gloo notices by itself that a connection has closed.
            on_death = _abort if first.type == "cuda" else None
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
        memory = [report.available_memory for report in self._await()]
        memory.append(available_memory(self.loaded.device))
        shared = setup.size if self.loaded.device.type == "cpu" else 1
        self.available_memory = min(memory) // shared
        """Bytes for the pool of each rank: those of one machine share its memory."""

    def _await(self) -> list[Report]:
        """A report of every worker; `EngineDeadError` if one could not do what it was to do."""
        reports = self._workers.reports() or []
        if any(report.traceback for report in reports):
            raise self._workers.death(reports)
        return reports

    def runner(self, setup: RunnerSetup) -> "DistributedRunner":
        """The runner of all ranks; once."""
        self._workers.send(setup)
        barrier = Barrier()
        try:
            runner = make_runner(self.loaded, setup, barrier)
        except RuntimeError as error:  # what gloo raises when another rank is gone
            self._workers.check(_DEATH_TIME)
            raise error
        self._await()
        return DistributedRunner(self, self._workers, runner, barrier)

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
    ) -> None:
        self._worker_group = worker_group  # whose workers end with it
        self._workers = workers
        self._runner = runner
        self._barrier = barrier

    @property
    def graphs(self) -> DecodeGraphs | None:
        """The graphs of rank 0; the others have the same."""
        return self._runner.graphs

    def prepare(
        self,
        plan: Plan,
        *,
        extra_rows: npt.NDArray[np.int64] | None = None,
        hidden_rows: npt.NDArray[np.int64] | None = None,
        mtp: MTPStep | None = None,
        states: StateSlots | None = None,
    ) -> Forward:
        """See `Runner.prepare`. One step at a time: the workers do not learn the sampled tokens.

        Nor do they learn `hidden_rows`: every rank has all hidden states.
        """
        self._workers.check()
        arrays = self._runner.buffers.arrays  # those that the step is written into
        forward = self._runner.prepare(plan, extra_rows=extra_rows, hidden_rows=hidden_rows)
        message = pack_step(plan, arrays, extra_rows, self._runner.pool.block_size)
        return lambda sampled: self._run(forward, sampled, message)

    def _run(self, forward: Forward, sampled: Any, message: bytes) -> StepLogits:
        self._workers.check()
        is_sent = False
        try:
            self._barrier.begin()
            is_sent = True
            self._workers.send(message)
            logits = forward(sampled)
            if (
                device_of(logits.sampling).type == "cuda"
            ):  # a worker's death must not be seen after the sampling
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
            if report.traceback:
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
