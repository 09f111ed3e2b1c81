"""Ctrl-C, held back while an interrupt would leave the ranks at different places."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts(at_second: Callable[[], object]) -> Iterator[None]:
    """Inside, the first Ctrl-C waits for the end of the block, where it is raised as ever.

    A second one calls `at_second` and is raised at once. In threads other than the main one
    nothing is held, as Python delivers no signals there.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))
        if len(held) > 1:
            at_second()
            previous(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if held:
        previous(*held[0])
