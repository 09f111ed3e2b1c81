"""Tokenizers and chat templates, in threads of their own: one tokenizer each, and a time limit."""

import asyncio
import copy
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from pyengine.core.errors import InvalidRequestError

_T = TypeVar("_T")
_NUM_THREADS = 2


class _TimeIsUpError(BaseException):
    """Raised in a thread whose work takes too long. No `except Exception` stops it."""


class TokenizerThreads:
    """Runs what needs a tokenizer, off the event loop.

    Tokenizers are not re-entrant: each thread has a copy. Work that takes longer than its time
    limit is interrupted where it runs Python, as templates do.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._local = threading.local()
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "pyengine-tokenizer")

    async def run(self, work: Callable[[Any], _T], *, limit: float | None = None) -> _T:
        """What `work` makes of a tokenizer, which may be None.

        Raises `InvalidRequestError` if it takes longer than `limit` seconds.
        """
        loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()

        def begin() -> None:
            if limit is not None:
                timers.append(loop.call_later(limit, task.interrupt))

        task = _Task(lambda: work(self._own()), lambda: loop.call_soon_threadsafe(begin))
        try:
            return cast(_T, await loop.run_in_executor(self._pool, task.run))
        except _TimeIsUpError:
            raise InvalidRequestError(
                f"the chat template was still at work after {limit:g} seconds: send a shorter "
                "conversation"
            ) from None
        finally:
            for timer in timers:
                timer.cancel()

    def _own(self) -> Any:
        """This thread's tokenizer."""
        if not hasattr(self._local, "tokenizer"):
            with self._lock:
                self._local.tokenizer = copy.deepcopy(self._tokenizer)
        return self._local.tokenizer

    def close(self) -> None:
        """End the threads; what they are at comes to its end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Task:
    """Work that another thread may interrupt."""

    def __init__(self, work: Callable[[], Any], begin: Callable[[], object]) -> None:
        """`begin` is called when the work begins, in its thread."""
        self._work = work
        self._begin = begin
        self._lock = threading.Lock()
        self._thread: int | None = None
        """Where it runs; None before and after."""

    def run(self) -> Any:
        """Do it."""
        self._begin()
        with self._lock:
            self._thread = threading.get_ident()
        try:
            return self._work()
        finally:
            with self._lock:
                self._thread = None
            # What was to be raised is raised by now, at a jump back, and nowhere after. (To take it
            # back would leave CPython 3.11 looking for it at every call, in all threads.)
            for _ in range(2):
                pass

    def interrupt(self) -> None:
        """Raise `_TimeIsUpError` in its thread, at its next line of Python."""
        with self._lock:
            if self._thread is not None:
                error, thread = ctypes.py_object(_TimeIsUpError), ctypes.c_ulong(self._thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)
