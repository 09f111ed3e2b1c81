"""Work beside the caller's: its result, its errors, and the setting of the process."""

import sys
import threading

import pytest

from pyengine.utils.beside import beside


def test_work_is_done_in_another_thread_while_the_caller_goes_on() -> None:
    started, goes_on = threading.Event(), threading.Event()

    def work() -> int:
        started.set()
        assert goes_on.wait(10)
        return threading.get_ident()

    with beside(work) as result:
        assert started.wait(10)
        goes_on.set()
        assert result.result() != threading.get_ident()


def test_errors_are_those_of_the_result_and_the_caller_comes_first() -> None:
    def fail() -> None:
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"), beside(fail) as result:
        result.result()
    with pytest.raises(KeyError, match="caller"), beside(fail):
        raise KeyError("caller")


def test_threads_take_turns_as_before_in_the_end() -> None:
    usual = sys.getswitchinterval()
    with beside(lambda: None):
        inner = sys.getswitchinterval()
        with beside(lambda: None):
            assert sys.getswitchinterval() == inner < usual
        assert sys.getswitchinterval() == inner
    assert sys.getswitchinterval() == usual
