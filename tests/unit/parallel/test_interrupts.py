"""Ctrl-C waits for the end of a block, and is not lost."""

import signal
import threading

import pytest

from pyengine.parallel.interrupts import held_interrupts


def nothing():
    raise AssertionError("one interrupt is not two")


@pytest.fixture(autouse=True)
def python_handles_ctrl_c():
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def test_an_interrupt_is_raised_at_the_end():
    reached = []
    with pytest.raises(KeyboardInterrupt), held_interrupts(nothing):
        signal.raise_signal(signal.SIGINT)
        reached.append("the end")
    assert reached == ["the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_one_is_raised_at_once():
    calls, reached = [], []
    with pytest.raises(KeyboardInterrupt), held_interrupts(lambda: calls.append("second")):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        reached.append("the end")
    assert (calls, reached) == (["second"], [])


def test_an_error_goes_before_the_interrupt():
    with pytest.raises(ValueError, match="first"), held_interrupts(nothing):
        signal.raise_signal(signal.SIGINT)
        raise ValueError("first")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_happens():
    with held_interrupts(nothing):
        pass


def test_other_threads_hold_nothing():
    seen = []

    def work():
        with held_interrupts(nothing):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
