"""The worker processes as rank 0 sees them: started, talked to, watched, ended.

A worker is a plain process (`worker.py` by `python -m`): no fork, and nothing is asked of the
script that makes an `LLM`. Its socket is inherited, so there is no port that another process could
find.
"""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from time import monotonic

from pyengine.errors import EngineDeadError
from pyengine.executor.tensor_parallel.ranks import CARRY_ON, Failed, RankSetup, Report, RunnerSetup

WORKER = "pyengine.executor.tensor_parallel.worker"
"""The module that a worker runs."""

_ENDING_TIME = 2.0
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
        on_death: Callable[[], None],
        module: str = WORKER,
    ) -> None:
        self._owner = os.getpid()
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

    def check(self) -> None:
        """Raise `EngineDeadError` if a worker has ended, or all were asked to end.

        So it is in a fork of rank 0: the workers are not its own, and an answer that it takes is
        one that rank 0 waits for.
        """
        if os.getpid() != self._owner:
            raise EngineDeadError(
                f"this engine belongs to process {self._owner}, of which this one "
                f"({os.getpid()}) is a fork: start the process by multiprocessing's 'spawn', and "
                "make a new LLM in it"
            )
        if self._fate.is_over.is_set() or self._fate.is_wanted:
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
        waiting = [
            item for item, report in pairs if isinstance(report, Failed) and report.in_forward
        ]
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
        failures = [item.traceback for item in said if isinstance(item, Failed)]
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


def _watch(running: dict[int, _Worker], fate: _Fate, on_death: Callable[[], None]) -> None:
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
            on_death()


def _cause(worker: _Worker, status: int) -> str:
    who = f"rank {worker.rank} (process {worker.process.pid})"
    if status < 0:
        return f"{who} was ended by {signal.Signals(-status).name}"
    return f"{who} ended by itself with status {status}"
