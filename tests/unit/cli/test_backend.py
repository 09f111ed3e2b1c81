"""Ctrl-C while an engine is opened: heard when the imports are through."""

import os
import signal
from collections.abc import Iterator

import pytest

from pyengine.cli.backend import held_interrupt


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """A test run in the background inherits an ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_ctrl_c_waits_for_the_end() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), held_interrupt():
        press_ctrl_c()
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_one_does_not() -> None:
    with pytest.raises(KeyboardInterrupt), held_interrupt():
        press_ctrl_c()
        press_ctrl_c()
        raise AssertionError("not interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_interrupt():
        press_ctrl_c()
        press_ctrl_c()
