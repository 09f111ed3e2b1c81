"""The thread behind an `AsyncEngine`: it runs the steps until the engine is closed or dropped."""

import atexit
from queue import SimpleQueue
from threading import Lock, Thread

from pyengine.engine.loop import EngineLoop
from pyengine.engine.output_stream import OutputNotifier
from pyengine.engine.request import Request

_ENDING_TIME = 5.0
"""Seconds that `close` waits for the step that runs."""


class EngineThread:
    """Runs the steps of an engine loop and calls the event loops of its readers.

    It has no reference to the `AsyncEngine`, so that one can be dropped; `end` may be called from a
    finalizer, wherever the garbage collector runs it.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self.lock = Lock()
        """Guards `live` and `is_ending`; held for moments."""
        self.live: dict[str, Request] = {}
        """Requests whose readers have not read their ends, by id."""
        self.is_ending = False
        self.notifier = OutputNotifier(lambda: loop.engine.is_running)
        self._engine_loop = loop
        self._calls: SimpleQueue[None] = SimpleQueue()  # reentrant, unlike an Event
        self._thread = Thread(target=self._run, name="pyengine-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        # A thread in the middle of a step when the interpreter goes would take the process along.
        atexit.register(self.close)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def unfinished(self) -> list[Request]:
        """Requests that have not ended."""
        with self.lock:
            return [request for request in self.live.values() if request.finished_time is None]

    def wake(self) -> None:
        """See that the thread looks at the inbox of the engine."""
        self._calls.put(None)

    def end(self) -> None:
        """Let the thread end after the step that runs, without waiting for it."""
        if not self._engine_loop.is_elsewhere:  # a fork has no such thread
            self.is_ending = True
            self.wake()

    def close(self) -> None:
        """End the thread and wait for the step that runs."""
        self.end()
        self._thread.join(_ENDING_TIME)

    def _run(self) -> None:
        try:
            self._engine_loop.drive(lambda: self.is_ending, self._wait, self._hand_on)
            self._engine_loop.end(self.unfinished())
            self.notifier.deliver()
        finally:
            atexit.unregister(self.close)

    def _wait(self) -> None:
        self.notifier.deliver()
        self._calls.get()
        self._forget_calls()

    def _hand_on(self) -> None:
        self._forget_calls()
        self.notifier.hand_on()

    def _forget_calls(self) -> None:
        """Take the calls so far: the inbox is read next."""
        while not self._calls.empty():
            self._calls.get()
