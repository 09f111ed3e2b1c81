"""One engine for many threads: requests come in from anywhere, one thread at a time runs steps."""

import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

from pyengine.engine.core import Engine, EngineStats, StepResult
from pyengine.engine.request import Request
from pyengine.errors import ConfigurationError, EngineDeadError, copy_error
from pyengine.executor.cpu_threads import ComputeThreads, StepThreads, compute_threads
from pyengine.utils.frame_memory import with_frame_room

T = TypeVar("T")

_log = logging.getLogger(__name__)

_LOOKS_EVERY = 0.001
"""Seconds between two looks whether the thread that drives has stopped."""


_made_in: list[int] = []
"""The process that made the first engine, here or in a process of which this one is a fork."""


def refuse_engine_in_fork() -> None:
    """Raise `ConfigurationError` in a fork of a process that has made an engine.

    The threads in which torch computes are not in the fork, and whoever waits for them waits for
    ever.
    """
    if not _made_in:
        _made_in.append(os.getpid())
    if _made_in[0] != os.getpid():
        raise ConfigurationError(
            f"this process ({os.getpid()}) is a fork of process {_made_in[0]}, which has made an "
            "engine, and the threads that compute are not in it: start the process by "
            "multiprocessing's 'spawn', and make the engine in it"
        )


class EngineLoop:
    """An engine that any thread may use: whoever waits for an answer runs the steps.

    Requests and aborts go into an inbox that is emptied between steps; outputs go to each
    request's own sink. Of the threads that wait, one *drives*: it runs steps until it has what it
    waits for and then wakes another one. So there is no thread where nobody waits, one caller
    alone runs the engine as if there were no others, and Ctrl-C reaches the one who drives.
    """

    def __init__(self, engine: Engine, threads: ComputeThreads | None = None) -> None:
        self._engine = engine
        self._threads = StepThreads(threads or compute_threads(None))
        self._owner = os.getpid()
        self._turn = _Turn()
        """Of the thread that works on the engine."""
        self._inbox: deque[tuple[Callable[[Request], object], Request]] = deque()
        self._looks: deque[Callable[[], None]] = deque()
        """What is to be read of the engine between two steps."""
        self._waiting: deque[threading.Event] = deque()

    @property
    def engine(self) -> Engine:
        """The engine itself; any thread may use its `input_processor`."""
        return self._engine

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a fork of the process that made the engine.

        Its threads are not here then, and its locks may be closed for ever.
        """
        return os.getpid() != self._owner

    def refuse_fork(self) -> None:
        """Raise `EngineDeadError` in a fork of the process that made the engine."""
        if self.is_elsewhere:
            raise EngineDeadError(
                f"this engine belongs to process {self._owner}, which goes on, and this process "
                f"({os.getpid()}) is a fork of it: start the process by multiprocessing's "
                "'spawn', and make a new engine in it"
            )

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests before the next step."""
        self.refuse_fork()
        self._inbox.extend([(self._add, request) for request in requests])

    def abort(self, requests: Sequence[Request]) -> None:
        """End requests before the next step: now, if no thread drives.

        If a second Ctrl-C comes meanwhile, the rest is done before whatever is next.
        """
        self._inbox.extend([(self._abort, request) for request in requests])
        self.settle()

    def end(self, requests: Sequence[Request]) -> None:
        """End requests now, once no other thread drives."""
        self._inbox.extend([(self._abort, request) for request in requests])
        try:
            self._turn.wait_for(sys._getframe())
            self._read_inbox()
        finally:
            self._turn.give_back(sys._getframe())

    @with_frame_room
    def run_until(self, is_done: Callable[[], bool], wake: threading.Event) -> None:
        """Run steps, or wait for another thread that does, until `is_done`.

        `wake` is set by the caller's sink when there is something new. Raises what a step raises;
        the requests of all threads have failed then.
        """
        self.refuse_fork()
        self._waiting.append(wake)
        try:
            while not is_done():
                if self._turn.take(sys._getframe()):
                    self.step()
                else:
                    wake.wait()
                    wake.clear()
        finally:
            self._turn.give_back(sys._getframe())
            with suppress(ValueError):
                self._waiting.remove(wake)
            self.settle()

    def step(self) -> StepResult:
        """One step by the thread whose turn it is."""
        try:
            self._read_inbox()
            with self._threads.step():
                return self._engine.step()
        except Exception as error:
            self._fail_all(error)
            raise

    @with_frame_room
    def drive(
        self,
        is_over: Callable[[], bool],
        wait: Callable[[], object],
        hand_on: Callable[[], object],
    ) -> None:
        """Run steps in this thread until `is_over`.

        `wait` is called where there is nothing to do, `hand_on` after each step. A step that fails
        ends all requests with its error. Only a dead engine ends this.
        """
        try:
            self._turn.wait_for(sys._getframe())
            while not is_over():
                try:
                    self._read_inbox()
                    if not self._engine.has_work:
                        wait()
                        continue
                    self.step()
                except EngineDeadError as error:
                    _log.error("no step can run any more: %s", error, exc_info=error)
                    return
                except Exception as error:  # every request has been told
                    traceback = self._engine.failures.unlogged(error)
                    _log.error("a step failed for all requests: %r", error, exc_info=traceback)
                hand_on()
        finally:
            self._turn.give_back(sys._getframe())

    def settle(self) -> None:
        """Do what is in the inbox, if no thread drives. One that does looks here when it stops."""
        if self.is_elsewhere:  # what is given up in a fork is given up there
            return
        try:
            while (self._inbox or self._looks) and self._turn.take(sys._getframe()):
                try:
                    self._read_inbox()
                finally:
                    self._turn.give_back(sys._getframe())
        finally:
            self._turn.give_back(sys._getframe())
            self._wake_another()

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        self.refuse_fork()
        self.settle()
        return self._engine.stats()

    def look(self, read: Callable[[Engine], T]) -> "Future[T]":
        """Read something of the engine between two steps: now, if no thread drives.

        `read` is called by the thread that runs the steps, which waits for it, and changes nothing.
        """
        self.refuse_fork()
        future: Future[T] = Future()

        def answer() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(read(self._engine))
                except Exception as error:
                    future.set_exception(error)

        self._looks.append(answer)
        self.settle()
        return future

    def _read_inbox(self) -> None:
        while self._inbox:
            do, request = self._inbox[0]
            do(request)  # may be done twice, if it is interrupted
            self._inbox.popleft()
        while self._looks:
            self._looks.popleft()()

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except Exception as error:  # nobody else is to notice
            if request.sink is None:
                raise
            request.sink.fail(error)

    def _abort(self, request: Request) -> None:
        self._engine.abort([request])

    def _fail_all(self, error: Exception) -> None:
        """Tell each reader that the step has failed for all; nothing stays behind."""
        live = set(self._engine.unfinished)
        while self._inbox:  # what comes from now on is for the next step
            live.add(self._inbox.popleft()[1])
        sinks = dict.fromkeys([request.sink for request in live if request.sink is not None])
        for request in live:
            request.sink = None
        self._engine.abort(live)
        for sink in sinks:
            sink.fail(copy_error(error))

    def _wake_another(self) -> None:
        """Let somebody else drive, if somebody waits."""
        with suppress(IndexError):
            self._waiting[0].set()


class _Turn:
    """Whose turn it is: a lock that Ctrl-C cannot leave closed, wherever it falls.

    It is taken by a call, that is, by its frame. A call that has ended and has not given it back,
    because an interrupt came while it was about to, has it no more. (No `finally` and no `with`
    alone can promise that: an interrupt may come at their first line.)
    """

    def __init__(self) -> None:
        self._claims: dict[int, FrameType | None] = {0: None}
        """Claims by number. The largest number counts; None: that call has given the turn back.

        A claim that is over stays over, so whoever finds it so may claim the next number, however
        late: of several calls the dictionary takes one, and a claim under a number that is no
        longer the largest counts for nothing. Each access is one call of C, so that no other
        thread comes between.
        """

    def take(self, call: FrameType) -> bool:
        """Whether it is the turn of `call`, a frame of this thread, now or was already."""
        while True:
            number = max(self._claims)
            holder = self._claims.get(number)
            if holder is call:
                return True
            if holder is not None and _is_running(holder):
                return False
            number += 1
            if self._claims.setdefault(number, call) is not call:
                continue
            if max(self._claims) == number:
                for old in tuple(self._claims):
                    if old < number:
                        self._claims.pop(old, None)
                return True
            self._claims.pop(number, None)  # others have had it since

    def wait_for(self, call: FrameType) -> None:
        """Take it as soon as nobody has it."""
        while not self.take(call):
            time.sleep(_LOOKS_EVERY)

    def give_back(self, call: FrameType) -> None:
        """Let others have it, if it was the turn of `call`."""
        number = max(self._claims)
        if self._claims.get(number) is call:
            self._claims[number] = None


def _is_running(call: FrameType) -> bool:
    """Whether a call has not ended: Python does not clear the frame of one that is under way.

    (To look for it among its thread's frames is no way: these may go while they are walked.)
    """
    try:
        call.clear()
    except RuntimeError:
        return True
    return False


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Inside, a Ctrl-C waits for the end of the block, where it is raised as usual.

    In threads other than the main one nothing is held, as Python delivers no signals there.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    held: list[Any] = []
    signal.signal(signal.SIGINT, lambda *arrived: held.append(arrived))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if held:
        previous(*held[0])
