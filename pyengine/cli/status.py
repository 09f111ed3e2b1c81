"""Exit statuses, and the sentence for an error. Needs the standard library only."""

import os
import sys
from contextlib import suppress

from pyengine.cli.display import note
from pyengine.errors import InvalidRequestError, PyEngineError

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
CLOSED_PIPE = 141
"""Exit statuses; the last two are what a shell reports of SIGINT and SIGPIPE."""


def report(error: BaseException) -> int:
    """Say what went wrong; the exit status. A defect is raised again.

    After an error of the system standard output is given up: its last flush would fail once more.
    """
    if _is_interrupted(error):
        _say("\ninterrupted")
        return INTERRUPTED
    if isinstance(error, PyEngineError):
        _say(f"error: {error}")
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
    """Whether Ctrl-C is behind it: libraries that are interrupted raise errors of their own."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
