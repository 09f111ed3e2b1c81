"""Programs that come with models, chat templates and tokenizers: one error, and a time limit."""

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from threading import Lock, Thread, get_ident, local
from typing import Any, Generic, NoReturn, TypeVar

from pyengine.errors import InvalidRequestError

_T = TypeVar("_T")

_INTERRUPTS, _SECONDS_BETWEEN = 4, 0.05
"""How often work is interrupted that does not end, and how long its caller waits after each."""


class TimeIsUpError(BaseException):
    """Raised in a thread whose work takes too long. No `except Exception` stops it."""


def within(seconds: float, work: Callable[[], _T], who: str) -> _T:
    """The result of `work`, or its error, computed in a thread so that it can be abandoned.

    Raises `InvalidRequestError` about `who` after `seconds`. Work in Python is interrupted then,
    other work is left to itself: the thread is a daemon, and `unfinished_work` tells of it.
    """
    task = _Task(work)
    Thread(target=task.run, name="pyengine-timed", daemon=True).start()
    try:
        return task.result.result(seconds)
    except TimeoutError:
        if task.result.done():  # the work's own
            raise
        raise InvalidRequestError(
            f"{who} was still at work after {seconds:g} seconds: send a shorter text"
        ) from None
    finally:
        task.interrupt()
        if not task.result.done() and hasattr(_here, "unfinished"):
            _here.unfinished.append(task.result)


_here = local()


@contextmanager
def unfinished_work() -> Iterator[list[Future[Any]]]:
    """Yields a list of the work that calls of `within` in this block leave to itself."""
    unfinished: list[Future[Any]] = []
    _here.unfinished = unfinished
    try:
        yield unfinished
    finally:
        del _here.unfinished


@contextmanager
def tokenizer_errors() -> Iterator[None]:
    """Errors of a tokenizer become an `InvalidRequestError`."""
    try:
        yield
    except BaseException as error:
        raise_tokenizer_error(error)


def raise_tokenizer_error(error: BaseException) -> NoReturn:
    """Raise a failure of a tokenizer as an `InvalidRequestError`, and other errors as they are."""
    if isinstance(error, InvalidRequestError) or not is_failure(error):
        raise error
    raise InvalidRequestError(f"the model's tokenizer fails on this text: {error}") from error


def is_failure(error: BaseException) -> bool:
    """True unless the process is to end. Libraries in Rust panic, which is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class _Task(Generic[_T]):
    """Work that another thread may interrupt."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self.result: Future[_T] = Future()
        self._work = work
        self._lock = Lock()
        self._thread: int | None = None  # where it runs; None before and after

    def run(self) -> None:
        """Do it."""
        try:
            result = self._run()
        except BaseException as error:
            self.result.set_exception(error)
        else:
            self.result.set_result(result)

    def _run(self) -> _T:
        with self._lock:
            self._thread = get_ident()
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
        """Raise `TimeIsUpError` in its thread, again if the work goes on: the garbage collector's
        callbacks swallow errors.
        """
        for _ in range(_INTERRUPTS):
            with self._lock:
                if self._thread is None:
                    return
                error, thread = ctypes.py_object(TimeIsUpError), ctypes.c_ulong(self._thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)
            wait([self.result], _SECONDS_BETWEEN)
