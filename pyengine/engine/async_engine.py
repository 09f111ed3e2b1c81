"""Many callers on an event loop: one thread owns the engine, each caller reads its own outputs."""

import asyncio
import atexit
import math
from collections.abc import AsyncIterator, Callable
from threading import Event, Lock, Thread
from time import monotonic

from pyengine.core.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
)
from pyengine.core.fields import is_real
from pyengine.core.outputs import RequestOutput
from pyengine.core.sampling_params import SamplingParams
from pyengine.core.settings import EngineSettings, takes_settings
from pyengine.engine.collector import OutputCollector
from pyengine.engine.engine import StepResult
from pyengine.engine.frontend import Frontend
from pyengine.engine.prompts import Prompt, PromptLike, match_params, parse_prompt, salt_namespace
from pyengine.engine.request import RequestState

_ENDING_TIME = 5.0
"""Seconds that `close` waits for the step that runs."""


class AsyncEngine(Frontend):
    """A model, its KV cache, and a thread that runs the steps for callers on event loops.

    The settings are those of `LLM`. `generate` may be called from any number of tasks, on any
    event loop. Requests and aborts reach the engine between steps; after each step every event
    loop is called once, whatever the number of its callers, and a caller that reads slowly finds
    what has come meanwhile merged into one item. Nobody waits for a reader.
    """

    @takes_settings
    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._max_num_waiting = settings.max_num_waiting
        self._lock = Lock()
        """Of what follows; held for moments."""
        self._live: dict[str, RequestState] = {}
        self._is_closing = self._is_draining = False
        self._wake = Event()
        self._mail = _Mail()
        self.observe(self._mail)
        self._thread = Thread(target=self._serve, name="pyengine-engine", daemon=True)
        self._thread.start()
        # A thread in the middle of a step when the interpreter goes would take the process along.
        atexit.register(self.close)

    def _serve(self) -> None:
        self._shared.drive(lambda: self._is_closing, self._wait)
        self._shared.end(self._unfinished())
        self._mail.deliver()

    def _wait(self) -> None:
        self._mail.deliver()
        self._wake.wait()
        self._wake.clear()

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        priority: float = 0,
        deadline: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt, in any form that `LLM.generate` takes; items as `LLM.stream` gives.

        The request joins the steps of all others. `request_id` must not be in use. Smaller
        priorities are served first, then earlier arrivals. `deadline` is a time of
        `time.monotonic`: a request that has not ended by then is ended, with the finish reason
        "abort" and the stop reason "deadline". Closing the iterator, or cancelling the task that
        reads it, ends the request.

        Raises `InvalidRequestError` for a request that cannot be served, `QueueFullError` if
        `max_num_waiting` requests wait already, `EngineClosedError` while the engine is drained
        and after `close`, `RequestFailedError` if the forward pass fails on this request, and
        `EngineDeadError` once the engine has ended.
        """
        self._shared.refuse_fork()
        parsed = parse_prompt(prompt, self.tokenizer)
        (params,) = match_params(sampling_params, 1, self._default_params)
        state = self._checked(parsed, params, request_id, cache_salt, priority)
        state.deadline = _checked_deadline(deadline)
        reader = _Reader(asyncio.get_running_loop(), self._mail)
        collector = OutputCollector(params.output_kind, reader.notify)
        state.sink = collector
        self._submit(state)
        try:
            is_over = False
            while not is_over:
                await reader.item(lambda: collector.has_item)
                item = collector.get()
                if item is not None:
                    yield item
                    is_over = item.finished
        finally:
            if not self._shared.is_elsewhere:
                self._leave(state)

    def _leave(self, state: RequestState) -> None:
        """Its caller reads no more."""
        with self._lock:
            self._live.pop(state.request_id, None)
        if state.finished_time is None:
            self._shared.abort([state])
            self._wake.set()

    def _checked(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        cache_salt: str | None,
        priority: float,
    ) -> RequestState:
        if cache_salt is not None:
            salt = salt_namespace(cache_salt)
            if prompt.namespace not in (b"", salt):
                raise InvalidRequestError(
                    f"cache_salt={cache_salt!r} and another one in the prompt: give it once"
                )
            prompt = Prompt(token_ids=prompt.token_ids, text=prompt.text, namespace=salt)
        return self._request(prompt, params, request_id, priority=priority)

    def _submit(self, state: RequestState) -> None:
        with self._lock:
            self._refuse_new()
            if state.request_id in self._live:
                raise InvalidRequestError(
                    f"request id {state.request_id!r} is in use: give another one, or none"
                )
            most, waiting = self._max_num_waiting, self._shared.num_waiting
            if most is not None and waiting >= most:
                raise QueueFullError(
                    f"{waiting} requests wait and max_num_waiting={most}: try again later"
                )
            self._live[state.request_id] = state
            self._shared.submit([state])
        self._wake.set()

    def _refuse_new(self) -> None:
        if self._engine.death:
            raise EngineDeadError(self._engine.death)
        if self._is_closing:
            raise EngineClosedError("the engine was closed: make a new one")
        if self._is_draining:
            raise EngineClosedError("the engine takes no more requests: it is being drained")

    async def abort(self, request_id: str) -> bool:
        """End a request; its reader gets what there is, with the finish reason "abort".

        Returns whether it was there.
        """
        self._shared.refuse_fork()
        with self._lock:
            state = self._live.get(request_id)
        if state is None or state.finished_time is not None:
            return False
        self._shared.abort([state])
        self._wake.set()
        return True

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests and wait for those that are there; whether all could end.

        After `timeout` seconds the others are ended, with the finish reason "abort".
        """
        self._shared.refuse_fork()
        with self._lock:
            self._is_draining = True
        end = math.inf if timeout is None else monotonic() + timeout
        while (left := self._unfinished()) and not self._engine.death:
            if monotonic() >= end:
                self._shared.abort(left)
                self._wake.set()
                return False
            await asyncio.sleep(min(0.01, max(0.0, end - monotonic())))
        return True

    def _unfinished(self) -> list[RequestState]:
        with self._lock:
            return [one for one in self._live.values() if one.finished_time is None]

    def check_health(self) -> None:
        """Raise `EngineDeadError` if no step can be run any more."""
        self._shared.refuse_fork()
        if self._engine.death:
            raise EngineDeadError(self._engine.death)
        if not self._thread.is_alive() and not self._is_closing:
            raise EngineDeadError("the engine's thread has ended: make a new engine")

    def close(self) -> None:
        """End the engine: what runs is aborted. May be called more than once."""
        if self._shared.is_elsewhere:  # the engine goes on where it was made
            return
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        self._wake.set()
        self._thread.join(_ENDING_TIME)
        self._end_processes()
        atexit.unregister(self.close)

    def __enter__(self) -> "AsyncEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)


class _Mail:
    """Which readers have something new: each event loop is called once after a step."""

    def __init__(self) -> None:
        self._readers: dict[asyncio.AbstractEventLoop, dict[_Reader, None]] = {}

    def add(self, reader: "_Reader") -> None:
        """Note, in the engine's thread, that a reader has something to read."""
        self._readers.setdefault(reader.loop, {})[reader] = None

    def on_arrival(self, request: RequestState) -> None:
        """Nothing."""

    def on_finish(self, request: RequestState) -> None:
        """Nothing."""

    def on_step(self, result: StepResult) -> None:
        """The step is over."""
        self.deliver()

    def deliver(self) -> None:
        """Tell the event loops."""
        readers, self._readers = self._readers, {}
        for loop, several in readers.items():
            try:
                loop.call_soon_threadsafe(_wake_all, list(several))
            except RuntimeError:  # it was closed: nobody reads there any more
                continue


class _Reader:
    """One caller on an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, mail: _Mail) -> None:
        self.loop = loop
        self._mail = mail
        self._future: asyncio.Future[None] | None = None

    def notify(self, _: object) -> None:
        """There is something to read. Called in the engine's thread."""
        self._mail.add(self)

    def wake(self) -> None:
        """Called on the event loop."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def item(self, is_there: Callable[[], bool]) -> None:
        """Wait until there is something to read."""
        while not is_there():
            self._future = self.loop.create_future()
            await self._future


def _wake_all(readers: list[_Reader]) -> None:
    for reader in readers:
        reader.wake()


def _checked_deadline(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    if not is_real(deadline) or math.isnan(deadline):
        raise InvalidRequestError(
            f"deadline={deadline!r}: it must be a time of time.monotonic(), in seconds, or None"
        )
    late = monotonic() - float(deadline)
    if late >= 0:
        raise InvalidRequestError(
            f"deadline={deadline!r} was {late:.3f} seconds ago by time.monotonic(): nothing was run"
        )
    return float(deadline)
