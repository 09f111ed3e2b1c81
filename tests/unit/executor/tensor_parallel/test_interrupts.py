"""Ctrl-C waits for the end of a block, and is not lost; a block that does not end is ended."""

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pyengine.executor.tensor_parallel.workers import InterruptWatch

BRIEFLY, LONG = 0.2, 60.0


@pytest.fixture(autouse=True)
def python_handles_ctrl_c() -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1
    signal.signal(signal.SIGINT, previous)


Make = Callable[..., InterruptWatch]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[InterruptWatch] = []

    def make(give_up: Callable[[], object], patience: float = LONG) -> InterruptWatch:
        made.append(InterruptWatch(give_up, patience))
        return made[-1]

    yield make
    for watch in made:
        watch.close()
        if watch._thread is not None:
            watch._thread.join(LONG)
            assert not watch._thread.is_alive()


def nothing() -> None:
    raise AssertionError("one interrupt is not two")


class NativeWait:
    """A wait outside of Python that no signal ends, as in a collective operation: a mutex."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._mutex = ctypes.create_string_buffer(64)
        self._library.pthread_mutex_lock(self._mutex)
        self.ends = 0

    def __call__(self) -> None:
        self._library.pthread_mutex_lock(self._mutex)
        raise RuntimeError("connection closed by peer")

    def end(self) -> None:
        self.ends += 1
        self._library.pthread_mutex_unlock(self._mutex)


def interrupt_after(*delays: float) -> None:
    """Send this process SIGINTs from another one, so that the main thread gets them."""
    sleeps = "; ".join(f"sleep {delay}; kill -INT {os.getpid()}" for delay in delays)
    os.system(f"({sleeps}) &")


def test_an_interrupt_is_raised_at_the_end(make: Make) -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), make(nothing).held():
        signal.raise_signal(signal.SIGINT)
        reached.append("the end")
    assert reached == ["the end"]


def test_the_second_one_is_raised_at_once(make: Make) -> None:
    calls, reached = [], []
    with pytest.raises(KeyboardInterrupt), make(lambda: calls.append("second")).held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        reached.append("the end")
    assert (calls, reached) == (["second"], [])


def test_an_error_goes_before_the_interrupt(make: Make) -> None:
    with pytest.raises(ValueError, match="first"), make(nothing).held():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("first")


def test_without_an_interrupt_nothing_happens(make: Make) -> None:
    watch = make(nothing, patience=0)
    for _ in range(3):
        with watch.held():
            pass
    time.sleep(BRIEFLY)


def test_an_interrupt_counts_in_its_own_block_only(make: Make) -> None:
    watch = make(nothing, patience=BRIEFLY)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), watch.held():
            signal.raise_signal(signal.SIGINT)
    with watch.held():
        time.sleep(2 * BRIEFLY)  # the blocks that were interrupted have ended in time


def test_a_wait_outside_of_python_ends_some_time_after_the_first(make: Make) -> None:
    wait = NativeWait()
    watch = make(wait.end, patience=BRIEFLY)
    interrupt_after(BRIEFLY)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as raised, watch.held():
        wait()
    assert BRIEFLY < time.monotonic() - started < LONG / 4
    assert wait.ends == 1
    assert isinstance(raised.value.__context__, RuntimeError)


def test_a_wait_outside_of_python_ends_at_the_second(make: Make) -> None:
    wait = NativeWait()
    interrupt_after(BRIEFLY, BRIEFLY, BRIEFLY)
    with pytest.raises(KeyboardInterrupt):
        try:
            with make(wait.end).held():
                wait()
        finally:
            time.sleep(4 * BRIEFLY)  # a third one may still come
    assert wait.ends == 1


def test_who_listened_before_hears_of_the_signals_too(make: Make) -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    assert signal.set_wakeup_fd(theirs.fileno()) == -1
    with pytest.raises(KeyboardInterrupt), make(nothing).held():
        signal.raise_signal(signal.SIGINT)
    ours.settimeout(LONG)
    assert ours.recv(8) == bytes([signal.SIGINT])
    assert signal.set_wakeup_fd(-1) == theirs.fileno()
    ours.close()
    theirs.close()


def test_other_threads_hold_nothing(make: Make) -> None:
    seen = []

    def work() -> None:
        with make(nothing).held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
