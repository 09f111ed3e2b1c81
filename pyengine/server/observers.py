"""Observers of an engine: metrics, dashboard, request log."""

from collections.abc import Callable

from fastapi import APIRouter

from pyengine.async_engine import AsyncEngine
from pyengine.server.dashboard.page import EngineBroadcaster, page_router
from pyengine.server.metrics import EngineMetrics, metrics_router
from pyengine.server.request_log import RequestLog
from pyengine.server.settings import ServerSettings


class EngineObservers:
    """Metrics, dashboard and request log of one engine.

    Dashboard streams end as soon as `is_over()` is true, so they do not delay shutdown.
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
        self.broadcaster = EngineBroadcaster(
            engine, model_name=model_name, show_prompts=settings.show_prompts, is_over=is_over
        )

    @property
    def routers(self) -> tuple[APIRouter, ...]:
        """Routers of /metrics and /kv."""
        return metrics_router(self.metrics), page_router(lambda _: self.broadcaster)

    def open(self) -> None:
        """Start the request log, unless the settings turn it off."""
        if self._settings.log_format != "none":
            self._log = RequestLog(self._settings.log_format)
            self._engine.observe(self._log)

    async def close(self) -> None:
        """End the dashboard streams and flush the request log."""
        await self.broadcaster.close()
        if self._log is not None:
            self._log.close()
