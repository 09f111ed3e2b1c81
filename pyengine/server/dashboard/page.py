"""`GET /kv`: a live page of the block pool, and `GET /kv/stream`: its data.

Frames are computed only while a page is open, at most four times a second, once for all viewers.
The engine's thread takes the snapshot between two steps; other threads turn it into a frame.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from copy import deepcopy
from importlib.resources import files
from time import thread_time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, StreamingResponse

from pyengine.engine.stats import EngineView
from pyengine.errors import PyEngineError
from pyengine.server.dashboard import PAGE_POLICY
from pyengine.server.dashboard.frames import FrameMaker
from pyengine.server.errors import ApiError
from pyengine.server.metrics import bytes_per_block

if TYPE_CHECKING:
    from pyengine.async_engine import AsyncEngine

FRAME_SECONDS = 0.25
"""Shortest time between two frames."""
MAX_CORE_SHARE = 0.1
"""Share of a core that frames may take. Larger frames are sent less often."""
HEARTBEAT_SECONDS = 5.0
"""A stream without a new frame sends a comment after this time."""
MAX_VIEWERS = 32
MAX_REQUESTS = 1000


class FrameBroadcaster(ABC):
    """Polls frames while viewers are connected, and sends each to all of them."""

    def __init__(self, *, is_over: Callable[[], bool] = lambda: False) -> None:
        self._is_over = is_over
        self._viewers: set[_Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._newest: str | None = None
        self._is_closed = False
        self.num_polls = 0

    @abstractmethod
    async def poll(self, is_needed: Callable[[], bool]) -> tuple[str | None, float]:
        """The current frame and the processor seconds it took.

        The frame is None if it has not changed and `is_needed()` is false.
        """

    @property
    def is_full(self) -> bool:
        """True if no further viewer may connect."""
        return len(self._viewers) >= MAX_VIEWERS

    async def stream(self) -> AsyncIterator[str]:
        """Server-sent events: new frames, and heartbeats between them.

        A slow viewer skips frames and gets the newest one.
        """
        viewer = _Viewer(self._newest)
        self._viewers.add(viewer)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._broadcast())
            self._task.add_done_callback(self._wake_all)
        try:
            yield "retry: 2000\n\n"
            while True:
                frame = await viewer.next(HEARTBEAT_SECONDS)
                if self._is_closed:
                    return
                if frame is None and self._task.done():
                    self._task.result()  # polling has failed: raise here, the page reconnects
                yield ": nothing new\n\n" if frame is None else f"event: pool\ndata: {frame}\n\n"
        finally:
            self._viewers.discard(viewer)

    async def close(self) -> None:
        """End all streams, so they do not delay shutdown."""
        self._end()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _end(self) -> None:
        self._is_closed = True
        self._wake_all()

    def _wake_all(self, _: object = None) -> None:
        for viewer in self._viewers:
            viewer.wake.set()

    async def _broadcast(self) -> None:
        """Poll while there are viewers, the first time at once."""
        cost = 0.0
        while self._viewers and not self._is_closed:
            if self._is_over():
                self._end()
                break
            with suppress(PyEngineError):  # the engine has ended: there is no new frame
                frame, cost = await self.poll(
                    lambda: any(viewer.is_new for viewer in self._viewers)
                )
                self.num_polls += 1
                if frame is not None:
                    self._newest = frame
                    for viewer in self._viewers:
                        viewer.put(frame)
            await asyncio.sleep(max(FRAME_SECONDS, cost / MAX_CORE_SHARE))
        self._newest = None


class EngineBroadcaster(FrameBroadcaster):
    """Frames of an engine in this process."""

    def __init__(
        self,
        engine: "AsyncEngine",
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

    async def poll(self, is_needed: Callable[[], bool]) -> tuple[str | None, float]:
        """See `FrameBroadcaster`. A frame changes only if a counter does."""
        view = await self._engine.view(MAX_REQUESTS)
        stats = view.stats
        now = (stats.counters, stats.num_running, stats.num_waiting, str(stats.usage))
        if now == self._last and not is_needed():
            return None, 0.0
        self._last = now
        return await asyncio.to_thread(self._timed_frame, view)

    def _timed_frame(self, view: EngineView) -> tuple[str, float]:
        """A frame and the processor seconds it took."""
        start = thread_time()
        return self._frames.frame(view), thread_time() - start


class _Viewer:
    """A connected page: holds the newest frame that was not sent yet."""

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
        """Wait for a new frame. Returns None after `timeout` seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.wake.wait(), timeout)
        self.wake.clear()
        frame, self._frame = self._frame, None
        return frame


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """Decodes token ids with a private copy of the tokenizer, which is not thread-safe."""
    return str if tokenizer is None else deepcopy(tokenizer).decode


def _about(engine: "AsyncEngine", model_name: str) -> dict[str, Any]:
    """The constant part of each frame."""
    about = engine.describe()
    return {
        "model": model_name,
        "block_size": about.get("block_size"),
        "bytes_per_block": bytes_per_block(about),
        "store_tier": about.get("kv_cache_tier"),
        "store_bytes": about.get("kv_cache_store_bytes"),
        "version": about.get("pyengine"),
    }


def page_router(broadcaster_of: Callable[[str | None], FrameBroadcaster]) -> APIRouter:
    """Router of `GET /kv` and `GET /kv/stream`; `?replica=NAME` names one of several replicas."""
    router = APIRouter(include_in_schema=False)
    html = files("pyengine.server.dashboard").joinpath("kv.html").read_text(encoding="utf-8")

    @router.get("/kv")
    async def page() -> HTMLResponse:
        headers = {"Content-Security-Policy": PAGE_POLICY, "Cache-Control": "no-cache"}
        return HTMLResponse(html, headers=headers)

    @router.get("/kv/stream")
    async def stream(replica: str | None = None) -> StreamingResponse:
        broadcaster = broadcaster_of(replica)
        if broadcaster.is_full:
            message = f"{MAX_VIEWERS} pages are open already: close one of them"
            raise ApiError(503, message, code="too_many_pages", retry_after=60)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            broadcaster.stream(), media_type="text/event-stream", headers=headers
        )

    return router
