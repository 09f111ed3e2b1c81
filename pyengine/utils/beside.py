"""Work in a thread beside the caller's."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar

_T = TypeVar("_T")

_SWITCH_SECONDS = 1e-4
"""How long a thread may keep the interpreter's lock. With Python's 5 ms, code that releases the
lock for each of several hundred calls waits for seconds in all."""


class _QuickSwitches:
    """Inside, the interpreter switches threads more often."""

    def __init__(self) -> None:
        self._lock, self._users, self._usual = Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual, _SWITCH_SECONDS))
            self._users += 1

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                sys.setswitchinterval(self._usual)


_quick_switches = _QuickSwitches()


@contextmanager
def beside(work: Callable[[], _T]) -> Iterator["Future[_T]"]:
    """Run `work` in a thread beside the body; wait for it at the end.

    Meanwhile all threads of the process take turns more often.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="pyengine-beside") as thread, _quick_switches:
        yield thread.submit(work)
