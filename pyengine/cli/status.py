"""Exit statuses, error messages, Ctrl-C. Imports the standard library only."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from pyengine.cli.terminal import note
from pyengine.errors import InvalidRequestError, PyEngineError

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
CLOSED_PIPE = 141
"""Exit statuses; the last two are those that a shell reports for SIGINT and SIGPIPE."""


def report(error: BaseException, worded: Callable[[str], str] = str) -> int:
    """Print an error as `worded` and return the exit status. Unexpected errors are raised again.

    After an error of the system, standard output is redirected: flushing it would fail again.
    """
    if _is_interrupted(error):
        _say("\ninterrupted")
        return INTERRUPTED
    if isinstance(error, PyEngineError):
        _say(f"error: {worded(str(error))}")
        return BAD_INPUT if isinstance(error, InvalidRequestError) else FAILED
    if not isinstance(error, OSError):
        raise error
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return CLOSED_PIPE
    where = f": {error.filename}" if error.filename else ""
    _say(f"error: {error.strerror or error}{where}")
    return FAILED


def _say(text: str) -> None:
    with suppress(OSError):
        note(text)


def _is_interrupted(error: BaseException | None) -> bool:
    """True if Ctrl-C caused the error: interrupted libraries raise other exceptions."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def interruptible_imports() -> Iterator[None]:
    """End the process at once on Ctrl-C within this block.

    An exception would not do: C extensions that are interrupted while they import NumPy silently
    continue without it, and callbacks of the import system print a traceback.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _end(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, b"\ninterrupted\n")
    os._exit(INTERRUPTED)
