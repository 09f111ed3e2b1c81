"""Those who look on at an engine: metrics, the page, the log."""

from collections.abc import Callable

from fastapi import APIRouter

from pyengine.async_engine import AsyncEngine
from pyengine.server.dashboard.page import PoolWatch, page_router
from pyengine.server.metrics import EngineMetrics, metrics_router
from pyengine.server.request_log import RequestLog
from pyengine.server.settings import ServerSettings


class Observation:
    """What a server shows of its engine. `open` begins the log, `close` ends what still runs.

    Pages that look on are let go as soon as `is_over` says so, so that nobody waits for them.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        settings: ServerSettings,
        model_name: str,
        is_over: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._log: RequestLog | None = None
        self.metrics = EngineMetrics(engine, model_name=model_name)
        self.watch = PoolWatch(
            engine, model_name=model_name, show_prompts=settings.show_prompts, is_over=is_over
        )

    @property
    def routers(self) -> tuple[APIRouter, ...]:
        """/metrics and /kv."""
        return metrics_router(self.metrics), page_router(lambda _: self.watch)

    def open(self) -> None:
        """Log requests from now on, if that is wanted."""
        if self._settings.log_format != "none":
            self._log = RequestLog(self._settings.log_format)
            self._engine.observe(self._log)

    async def close(self) -> None:
        """Write the rest of the log; let the pages go."""
        await self.watch.close()
        if self._log is not None:
            self._log.close()
