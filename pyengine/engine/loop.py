"""One thread runs the steps: callers put requests into its inbox, sinks get the outputs."""

import concurrent.futures.thread  # noqa: F401 (registers its end before this module does)
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread, get_ident
from typing import TypeAlias, TypeVar
from weakref import WeakSet

from pyengine.cpu.threads import ComputeThreads, StepThreads, compute_threads
from pyengine.engine.core import Engine
from pyengine.engine.output_stream import OutputNotifier
from pyengine.errors import ConfigurationError, EngineClosedError, EngineDeadError, copy_error
from pyengine.request.request import Request
from pyengine.utils.frame_memory import with_frame_room

T = TypeVar("T")

_log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds that `close` and Ctrl-C wait for the step that runs."""

_LOAD_CHECK = 0.1  # seconds after which a load that has not ended is looked at again

SIGNAL_DELAY = 0.5
"""Seconds after which a caller that waits sees a signal at the latest."""


_made_in: list[int] = []
"""The process that made the first engine, here or in a process of which this one is a fork."""


def refuse_engine_in_fork() -> None:
    """Raise `ConfigurationError` in a fork of a process that has made an engine.

    A fork lacks torch's threads: a wait for them would never end.
    """
    if not _made_in:
        _made_in.append(os.getpid())
    if _made_in[0] != os.getpid():
        raise ConfigurationError(
            f"this process ({os.getpid()}) is a fork of process {_made_in[0]}, which has made an "
            "engine, and the threads that compute are not in it: start the process by "
            "multiprocessing's 'spawn', and make the engine in it"
        )


_running: "WeakSet[EngineLoop]" = WeakSet()
_threads: "WeakSet[threading.Thread]" = WeakSet()
"""Of loops that run, and of those that free their engine: it lives in the thread at last."""


Inbox: TypeAlias = SimpleQueue[Callable[[], object]]
"""Calls for the engine's thread between two steps. Its `put` is reentrant."""


class EngineLoop:
    """Runs the steps of an engine in a separate thread, for callers in any thread.

    Requests and aborts go into an inbox that the thread empties between steps; outputs go to each
    request's sink. A step that fails ends all requests with its error. The thread ends with
    `close`, with the interpreter, once the engine is dead, or after `end`, which a finalizer calls:
    it has no reference to the `LLM` or `AsyncEngine`. No caller waits for a lock here: finalizers
    and signal handlers may call anything but `wait`.
    """

    def __init__(
        self,
        engine: Engine,
        threads: ComputeThreads | None = None,
        kill: Callable[[], object] | None = None,
        inbox: Inbox | None = None,
    ) -> None:
        """`kill` ends what a step waits for that does not end by itself."""
        self._engine = engine
        self._threads = StepThreads(threads or compute_threads(None))
        self._kill = kill
        self._owner = os.getpid()
        self._inbox: Inbox = SimpleQueue() if inbox is None else inbox
        self._error: Exception | None = None
        """The error of all later requests: the engine is closed or dead."""
        self._has_ended = False
        self.notifier = OutputNotifier(lambda: engine.is_running)
        self._thread = Thread(target=self._run, name="pyengine-engine", daemon=True)
        _running.add(self)
        self._thread.start()
        _threads.add(self._thread)

    @property
    def is_elsewhere(self) -> bool:
        """True in a fork of the process that made the engine: the thread is not here."""
        return os.getpid() != self._owner

    @property
    def death(self) -> EngineDeadError | None:
        """The reason why no further step can run."""
        return self._error if isinstance(self._error, EngineDeadError) else None

    def refuse_fork(self) -> None:
        """Raise `EngineDeadError` in a fork of the process that made the engine."""
        if os.getpid() != self._owner:
            raise EngineDeadError(
                f"this engine belongs to process {self._owner}, which goes on, and this process "
                f"({os.getpid()}) is a fork of it: start the process by multiprocessing's "
                "'spawn', and make a new engine in it"
            )

    def check(self) -> None:
        """Raise the error of a new request: the engine is in another process, closed or dead."""
        self.refuse_fork()
        if self._error is not None:
            raise copy_error(self._error)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests before the next step."""
        self.check()
        self.enqueue(partial(self._add, requests))

    def abort(self, requests: Sequence[Request]) -> None:
        """End requests before the next step."""
        self.enqueue(partial(self._engine.abort, requests))

    def interrupt(self, requests: Sequence[Request]) -> None:
        """Abort requests after Ctrl-C, and wait until they have ended.

        At another Ctrl-C, or if the step that runs takes longer than `PATIENCE`, `kill` is called.
        """
        self.abort(requests)
        try:
            self.flush(PATIENCE)
        except (Empty, KeyboardInterrupt):
            if self._kill is not None:
                self._kill()

    def enqueue(self, message: Callable[[], object]) -> None:
        """Have the thread call `message` before the next step. Ignored in a fork."""
        if os.getpid() != self._owner:
            return
        self._inbox.put(message)
        if self._has_ended:
            self._read_inbox()
            self.notifier.deliver()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the thread has emptied the inbox. Raises `Empty` after `timeout` seconds."""
        self.refuse_fork()
        if get_ident() != self._thread.ident:
            flushed: SimpleQueue[None] = SimpleQueue()
            self.enqueue(partial(flushed.put, None))
            flushed.get(timeout=timeout)

    def wait(self, queue: "SimpleQueue[T]") -> T:
        """The next item of a queue that the thread fills. Ctrl-C ends the wait.

        A signal that comes just before `get` begins to wait does not end it (a wait for a lock
        ends only by a signal that comes during it), so the wait begins anew every `SIGNAL_DELAY`.
        """
        self.refuse_fork()
        if get_ident() == self._thread.ident:
            raise RuntimeError(
                "the engine's thread cannot wait for its own steps: call this from another thread, "
                "not from an observer or a finalizer"
            )
        while True:
            with suppress(Empty):
                return queue.get(timeout=SIGNAL_DELAY)

    def end(self) -> None:
        """Let the thread end after the step that runs, without waiting for it."""
        if self._error is None and not self.is_elsewhere:
            self._error = EngineClosedError("the engine was closed: make a new one")
            self.enqueue(lambda: None)

    def close(self) -> None:
        """Abort all requests, and end the thread after the step that runs."""
        self.end()
        if self.is_elsewhere or get_ident() == self._thread.ident:
            return
        self._thread.join(PATIENCE)
        if self._thread.is_alive() and self._kill is not None:
            self._kill()
            self._thread.join(PATIENCE)

    @with_frame_room
    def _run(self) -> None:
        self._threads.begin()
        try:
            while self._error is None:
                if not self._engine.has_work:
                    with suppress(Empty):
                        self._inbox.get(timeout=self._idle())()
                elif self._engine.is_waiting:
                    with suppress(Empty):
                        self._inbox.get(timeout=_LOAD_CHECK)()
                self._read_inbox()
                if self._engine.has_work:
                    self._step()
                self.notifier.hand_on()
            self._read_inbox()
            self._engine.abort(self._engine.unfinished)
        except BaseException as error:
            cause = (
                error
                if isinstance(error, EngineDeadError)
                else EngineDeadError(f"the engine's thread failed: {error!r}")
            )
            _log.error("no step can run any more: %s", cause, exc_info=error)
            self._error = cause
            self._fail_all(cause)
        finally:
            self._has_ended = True
            self._read_inbox()
            self.notifier.deliver()
            self._engine.close(PATIENCE / 2)
            _running.discard(self)

    def _idle(self) -> float | None:
        """Let the engine use idle time; return the seconds to wait for a message."""
        while (seconds := self._engine.idle()) == 0 and self._inbox.empty():
            pass
        return seconds

    def _read_inbox(self) -> None:
        with suppress(Empty):
            while True:
                self._inbox.get_nowait()()

    def _step(self) -> None:
        """Run a step. If it fails for all requests, all get its error."""
        try:
            with self._threads.step():
                self._engine.step()
        except EngineDeadError:
            raise
        except Exception as error:
            traceback = self._engine.recovery.faults.unlogged(error)
            _log.error("a step failed for all requests: %r", error, exc_info=traceback)
            self._fail_all(error)

    def _add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            try:
                if self._has_ended and self._error is not None:
                    raise copy_error(self._error)
                self._engine.add(request)
            except Exception as error:  # of this request alone
                if request.sink is not None:
                    request.sink.fail(error)

    def _fail_all(self, error: Exception) -> None:
        """End all requests with copies of an error."""
        unfinished = self._engine.unfinished
        sinks = [request.sink for request in unfinished if request.sink is not None]
        for request in unfinished:
            request.sink = None
        try:
            self._engine.abort(unfinished)
        finally:
            for sink in sinks:
                sink.fail(copy_error(error))


def _close_all() -> None:
    threads = list(_threads)
    for loop in list(_running):
        loop.close()
    for thread in threads:
        thread.join(PATIENCE)


# A thread in the middle of a step when the interpreter ends would crash the process, and a step may
# need a pool of `concurrent.futures`. These end before `atexit` is called: only what is registered
# as they are comes first.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]
