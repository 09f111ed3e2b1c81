"""Ctrl-C, held back while an interrupt would leave the ranks at different places.

While rank 0 waits for another rank in a collective operation it is not in Python, and Python's
signal handlers do not run. A thread learns of the signal all the same, by a wakeup descriptor, and
ends a wait that does not end by itself: a worker may have been stopped.
"""

import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from types import FrameType

PATIENCE = 5.0
"""Seconds from a Ctrl-C in which a step may come to its end."""


@dataclass(slots=True)
class _Block:
    """A block in which interrupts are held: shared by the main thread and the one that watches."""

    outer: int
    """The wakeup descriptor that was there before, or -1: it hears of every signal too."""
    is_over: bool = False
    is_given_up: bool = False


class InterruptWatch:
    """Holds Ctrl-C back, block by block, but not for ever.

    `give_up` is called, in another thread or in a signal handler, to end what the block waits for:
    at a second Ctrl-C, or if the block has not ended `patience` seconds after the first (by default
    `PATIENCE`).
    """

    def __init__(self, give_up: Callable[[], object], patience: float | None = None) -> None:
        self._give_up = give_up
        self._patience = PATIENCE if patience is None else patience
        self._heard, self._wakeup = socket.socketpair()
        for end in (self._heard, self._wakeup):
            end.setblocking(False)
        self._reading = threading.Lock()
        """What was heard is about the block that was there when it was read."""
        self._block: _Block | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the first Ctrl-C waits for the end of the block, where it is raised as ever.

        A second one is raised at once. One for which was given up is raised in place of the error
        that this caused. In threads other than the main one nothing is held, as Python delivers no
        signals there.
        """
        previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(previous):
            yield
            return
        self._start()
        held: list[tuple[int, FrameType | None]] = []

        def hold(number: int, frame: FrameType | None) -> None:
            held.append((number, frame))
            if len(held) > 1:
                self._end(block)
                previous(number, frame)

        block = _Block(signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False))
        self._block = block
        try:
            signal.signal(signal.SIGINT, hold)
            yield
        except BaseException:
            if block.is_given_up and len(held) < 2:
                previous(*(held or [(signal.SIGINT, None)])[0])
            raise
        finally:
            block.is_over = True
            signal.signal(signal.SIGINT, previous)
            signal.set_wakeup_fd(block.outer)
            with suppress(EOFError, OSError):  # it was closed meanwhile
                self._hear()  # what this block has not been told of, the next one must not hear
        if held:
            previous(*held[0])

    def close(self) -> None:
        """End the thread."""
        self._wakeup.close()
        if self._thread is None:
            self._heard.close()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._watch, name="pyengine-interrupts", daemon=True
            )
            self._thread.start()

    def _end(self, block: _Block) -> None:
        """Give up on what the block waits for, once."""
        if not block.is_over and not block.is_given_up:
            block.is_given_up = True
            self._give_up()

    def _watch(self) -> None:
        """Read the numbers of signals, until `close`."""
        interrupted: _Block | None = None
        deadline: float | None = None
        with self._heard:
            while True:
                left = None if deadline is None else max(0.0, deadline - monotonic())
                if not select.select([self._heard], [], [], left)[0]:
                    deadline = None
                    if interrupted is not None:
                        self._end(interrupted)
                    continue
                try:
                    block, interrupts = self._hear()
                except EOFError:
                    return
                for _ in range(interrupts):
                    if interrupted is block and block is not None:
                        self._end(block)
                    interrupted, deadline = block, monotonic() + self._patience

    def _hear(self) -> tuple[_Block | None, int]:
        """The block that runs or ends, and how many interrupts there were since the last look.

        Raises `EOFError` after `close`.
        """
        with self._reading:
            block = self._block
            try:
                numbers = self._heard.recv(64)
            except BlockingIOError:  # the other thread was faster
                return block, 0
        if not numbers:
            raise EOFError
        if block is not None and block.outer >= 0:
            with suppress(OSError):
                os.write(block.outer, numbers)
        return block, numbers.count(signal.SIGINT)
