"""Ctrl-C at any line of the queue comes out as what it is."""

from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest

from pyengine.executor.executor import Executor
from tests.support.fake_runner import FakeRunner
from tests.support.moments import interrupt, moments


def _five() -> int:
    return 5


def _fails() -> int:
    raise ValueError("the work")


@pytest.mark.parametrize("work", [_five, _fails])
def test_an_interrupt_is_raised_or_kept_and_nothing_else(work: Any) -> None:
    expected: Any = ValueError if work is _fails else ()
    methods = (
        Executor.run,
        Executor._enqueue,
        Future.set_result,
        Future.set_exception,
        Future.result,
    )
    codes = {method.__code__ for method in methods}
    executor = Executor(FakeRunner(8, 4))
    for moment in moments(codes, interrupt):
        with suppress(KeyboardInterrupt, expected), moment.watched():
            assert executor.run(work) == 5
            assert work is _five
