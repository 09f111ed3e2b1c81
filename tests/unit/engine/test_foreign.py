"""Work that is interrupted, and what it leaves behind."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from pyengine.core.errors import InvalidRequestError
from pyengine.server.rendering import TokenizerThreads


def endless(_: Any) -> None:
    while True:
        pass


def run(threads: TokenizerThreads, work: Any, limit: float) -> Any:
    return asyncio.run(threads.run(work, limit=limit))


def test_work_without_an_end_is_refused_and_the_thread_goes_on() -> None:
    threads = TokenizerThreads(None)
    for _ in range(4):  # more than there are threads
        with pytest.raises(InvalidRequestError, match=r"still at work after 0\.05 seconds"):
            run(threads, endless, 0.05)
    assert run(threads, lambda _: 7, 10) == 7
    threads.close()


TRACED = """
import asyncio, sys
from pyengine.server.rendering import TokenizerThreads

def called():
    return 1

async def endless():
    try:
        await threads.run(lambda _: [None for _ in iter(int, 1)], limit=0.05)
    except ValueError:
        pass

threads = TokenizerThreads(None)
asyncio.run(threads.run(lambda _: 7, limit=10))
asyncio.run(endless())
sys.settrace(lambda *_: None)
called()
sys.settrace(None)
threads.close()
"""


def test_nothing_is_left_for_the_interpreter_to_raise() -> None:
    """An error that waits for nobody: CPython 3.11 asks for it at every call, under a debugger for
    ever.
    """
    done = subprocess.run([sys.executable, "-c", TRACED], timeout=60, check=False)
    assert done.returncode == 0
