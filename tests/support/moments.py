"""Something that happens between any two lines of a piece of code, one at a time."""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any


class Moment:
    """The `number`-th line that is run in `codes`, in this thread: there `act` is called, once."""

    def __init__(self, number: int, codes: Collection[CodeType], act: Callable[[], object]) -> None:
        self.has_come = False
        self._left, self._codes, self._act = number, codes, act

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code not in self._codes:
            return None
        if event == "line" and not self.has_come:
            self._left -= 1
            if self._left < 0:
                self.has_come = True
                self._act()
        return self._trace

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While this is open it may come."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)


def moments(codes: Collection[CodeType], act: Callable[[], object]) -> Iterator[Moment]:
    """One after the other, until one has not come."""
    number = 0
    while True:
        moment = Moment(number, codes, act)
        yield moment
        if not moment.has_come:
            assert number > 0, "none of it was run"
            return
        number += 1


def interrupt() -> None:
    """Ctrl-C."""
    raise KeyboardInterrupt
