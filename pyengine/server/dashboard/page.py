"""`GET /kv`: a page that shows the pool live, and the stream that feeds it.

The page itself is one file without any data; `GET /kv/stream` has the data. Nothing is computed as
long as nobody looks; those who look share what is computed, at most four times a second. The look
itself is taken in the engine's thread, between two steps; what is made of it is made elsewhere.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from copy import deepcopy
from importlib.resources import files
from time import thread_time
from typing import Any, Protocol

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, StreamingResponse

from pyengine.core.errors import PyEngineError
from pyengine.engine import EngineView
from pyengine.server.dashboard.frames import FrameMaker
from pyengine.server.errors import ApiError
from pyengine.server.metrics import bytes_per_block

LOOKS_EVERY = 0.25
"""Seconds between two looks, at least."""
MOST_OF_A_CORE = 0.1
"""Where frames are so large that four a second would take more than this, there are fewer."""
SAYS_NOTHING_FOR = 5.0
"""Seconds after which a stream without news says that it is there."""
MOST_WATCHERS = 32
MOST_REQUESTS = 1000

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Looked(Protocol):
    """What the page asks of an engine: `AsyncEngine` has it."""

    tokenizer: Any

    async def view(self, most_requests: int = ...) -> EngineView:
        """See `AsyncEngine.view`."""
        ...

    def describe(self) -> dict[str, object]:
        """See `Frontend.describe`."""
        ...


class Watch(ABC):
    """Looks as long as somebody wants to know. `look` says at what."""

    def __init__(self, *, is_over: Callable[[], bool] = lambda: False) -> None:
        self._is_over = is_over
        self._watchers: set[_Watcher] = set()
        self._task: asyncio.Task[None] | None = None
        self._newest: str | None = None
        self._is_closed = False
        self.num_looks = 0
        """So far."""

    @abstractmethod
    async def look(self, is_wanted: Callable[[], bool]) -> tuple[str | None, float]:
        """A frame, or None if nothing is new and none is wanted; and the seconds of a processor
        that it took."""

    @property
    def is_full(self) -> bool:
        """Whether nobody more may look."""
        return len(self._watchers) >= MOST_WATCHERS

    async def stream(self) -> AsyncIterator[str]:
        """Server-sent events: what is new, and now and then that nothing is.

        Who reads slowly gets the newest and misses what was before it.
        """
        watcher = _Watcher(self._newest)
        self._watchers.add(watcher)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look_on())
            self._task.add_done_callback(self._wake_all)
        try:
            yield "retry: 2000\n\n"
            while True:
                frame = await watcher.next(SAYS_NOTHING_FOR)
                if self._is_closed:
                    return
                if frame is None and self._task.done():
                    self._task.result()  # a look has failed: who looks comes again
                yield ": nothing new\n\n" if frame is None else f"event: pool\ndata: {frame}\n\n"
        finally:
            self._watchers.discard(watcher)

    async def close(self) -> None:
        """End all streams, so that a server that stops need not wait for them."""
        self._end()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _end(self) -> None:
        self._is_closed = True
        self._wake_all()

    def _wake_all(self, _: object = None) -> None:
        for watcher in self._watchers:
            watcher.wake.set()

    async def _look_on(self) -> None:
        """Look as long as somebody watches; the first one gets a look at once."""
        cost = 0.0
        while self._watchers and not self._is_closed:
            if self._is_over():
                self._end()
                break
            with suppress(PyEngineError):  # the engine has ended: nothing new
                frame, cost = await self.look(lambda: any(one.is_new for one in self._watchers))
                self.num_looks += 1
                if frame is not None:
                    self._newest = frame
                    for watcher in self._watchers:
                        watcher.put(frame)
            await asyncio.sleep(max(LOOKS_EVERY, cost / MOST_OF_A_CORE))
        self._newest = None


class PoolWatch(Watch):
    """Looks at an engine of this process."""

    def __init__(
        self,
        engine: Looked,
        *,
        model_name: str,
        show_prompts: bool = False,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(is_over=is_over)
        self._engine = engine
        decode = _decoder(engine.tokenizer) if show_prompts else None
        self._frames = FrameMaker(_about(engine, model_name), decode)
        self._last: object = None

    async def look(self, is_wanted: Callable[[], bool]) -> tuple[str | None, float]:
        """See `Watch`. Nothing is new where no counter has changed."""
        view = await self._engine.view(MOST_REQUESTS)
        stats = view.stats
        now = (stats.counters, stats.num_running, stats.num_waiting, str(stats.usage))
        if now == self._last and not is_wanted():
            return None, 0.0
        self._last = now
        return await asyncio.to_thread(self._timed_frame, view)

    def _timed_frame(self, view: EngineView) -> tuple[str, float]:
        """A frame, and the seconds of processor time that it took."""
        start = thread_time()
        return self._frames.frame(view), thread_time() - start


class _Watcher:
    """Somebody who looks: the newest frame that was not taken yet."""

    def __init__(self, frame: str | None) -> None:
        self._frame = frame
        self.is_new = frame is None
        self.wake = asyncio.Event()
        if frame is not None:
            self.wake.set()

    def put(self, frame: str) -> None:
        self._frame, self.is_new = frame, False
        self.wake.set()

    async def next(self, timeout: float) -> str | None:
        """The newest frame as soon as there is one; None after `timeout` seconds without."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.wake.wait(), timeout)
        self.wake.clear()
        frame, self._frame = self._frame, None
        return frame


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """From token ids to text, by a tokenizer of its own: one is not for several threads."""
    return str if tokenizer is None else deepcopy(tokenizer).decode


def _about(engine: Looked, model_name: str) -> dict[str, Any]:
    """What does not change."""
    about = engine.describe()
    return {
        "model": model_name,
        "block_size": about.get("block_size"),
        "bytes_per_block": bytes_per_block(about),
        "version": about.get("pyengine"),
    }


def page_router(watch_of: Callable[[str | None], Watch]) -> APIRouter:
    """`GET /kv` and `GET /kv/stream`; of the replica that the address names, where there are."""
    router = APIRouter(include_in_schema=False)
    html = files("pyengine.server.dashboard").joinpath("kv.html").read_text(encoding="utf-8")

    @router.get("/kv")
    async def page() -> HTMLResponse:
        headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
        return HTMLResponse(html, headers=headers)

    @router.get("/kv/stream")
    async def stream(replica: str | None = None) -> StreamingResponse:
        watch = watch_of(replica)
        if watch.is_full:
            message = f"{MOST_WATCHERS} pages look on already: close one of them"
            raise ApiError(503, message, code="too_many_pages", retry_after=60)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(watch.stream(), media_type="text/event-stream", headers=headers)

    return router
