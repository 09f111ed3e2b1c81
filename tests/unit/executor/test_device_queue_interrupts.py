"""Ctrl-C at any line of the queue comes out as what it is."""

from contextlib import suppress
from typing import Any

import pytest

from pyengine.executor.executor import DoneWork, InlineQueue
from tests.support.moments import interrupt, moments


def _five() -> int:
    return 5


def _fails() -> int:
    raise ValueError("the work")


@pytest.mark.parametrize("work", [_five, _fails])
def test_an_interrupt_is_raised_or_kept_and_nothing_else(work: Any) -> None:
    expected: Any = ValueError if work is _fails else ()
    codes = {InlineQueue.submit.__code__, DoneWork.__init__.__code__, DoneWork.result.__code__}
    for moment in moments(codes, interrupt):
        with suppress(KeyboardInterrupt, expected), moment.watched():
            assert InlineQueue().submit(work).result() == 5
            assert work is _five
