"""Ctrl-C while libraries are imported. Imports the standard library only."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130
"""The exit status that a shell reports for SIGINT."""


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
