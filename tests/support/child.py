"""Runs functions in a separate process: a crash, a hang or a dead device costs one call.

The process is forked from one that has imported the heavy libraries and done nothing with them, so
a new one is there at once. It goes on to the next call unless it has to be replaced.
"""

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "transformers", "pyengine.engine"]
"""Modules that are imported before a fork; they must not initialise CUDA."""
_CONTEXT.set_forkserver_preload(PRELOADED)


class ChildError(Exception):
    """A call that did not come back; the message says what became of its process."""


class Child:
    """A process, from the first call on."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection

    def run(self, call: Callable[..., Any], *args: Any, seconds: float) -> Any:
        """`call(*args)`, all of which must be picklable; what it raises is raised here.

        Raises `ChildError` if it takes longer than `seconds`, or takes the process down.
        """
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None
        self._pipe.send((call, args))
        answered = False
        try:
            if not self._pipe.poll(seconds):
                raise ChildError(f"ended by force: not done after {seconds:g} s")
            try:
                error, value, is_usable = self._pipe.recv()
            except EOFError:
                process.join()
                raise ChildError(f"the process {_words(process.exitcode)}") from None
            answered = is_usable
        finally:  # also if this process is interrupted meanwhile
            if not answered:
                self.end()
        if error is None:
            return value
        raise error from ChildError(f"in its own process:\n{value}")

    def end(self) -> None:
        """End the process and all that it started; the next call starts a new one.

        From any thread: a call that is under way in another one raises.
        """
        process, self._process = self._process, None
        if process is not None:
            assert process.pid is not None
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
            self._pipe.close()

    def _start(self) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs,), daemon=False)
        self._process.start()
        theirs.close()
        self._pipe.recv()  # it leads a process group now: it can be ended with its children


def _serve(pipe: Connection) -> None:
    """Answers calls with an error or None, the value or the traceback, and whether it can go on."""
    os.setsid()
    Thread(target=_end_with_parent, daemon=True).start()
    pipe.send(None)
    with suppress(EOFError):
        while True:
            call, args = pipe.recv()
            error, value = None, None
            try:
                value = call(*args)
            except Exception as raised:
                value = traceback.format_exc()
                traceback.clear_frames(raised.__traceback__)  # what they hold is not needed
                error = _portable(raised)
            pipe.send((error, value, _device_lives()))


def _portable(error: Exception) -> Exception:
    """The error, or its words if it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error.with_traceback(None)


def _device_lives() -> bool:
    """Give back memory; False where CUDA answers nothing but errors any more."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:
        return False
    return True


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _words(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
