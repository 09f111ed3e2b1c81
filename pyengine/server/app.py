"""The application: routes, guards and errors put together around an engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from pyengine.errors import PyEngineError
from pyengine.server.context import ServerContext
from pyengine.server.engine_client import Observe, ServedEngine
from pyengine.server.errors import handle_errors
from pyengine.server.middleware.auth import KeyGuard
from pyengine.server.middleware.limits import BodyGuard, DrainGuard, HeaderGuard
from pyengine.server.middleware.origins import OriginGuard
from pyengine.server.middleware.traffic import RefusalWatch
from pyengine.server.observation import Observation
from pyengine.server.routes import chat, completions, control, health, tokenize
from pyengine.server.schemas.ignored import IGNORED_HEADER
from pyengine.server.schemas.responses import ErrorResponse
from pyengine.server.settings import ServerSettings
from pyengine.server.tokenizer_threads import TokenizerThreads
from pyengine.utils.packaging import package_version

_ROUTERS = (health.router, completions.router, chat.router, tokenize.router, control.router)


def create_app(
    engine: ServedEngine, settings: ServerSettings, observe: Observe = Observation
) -> FastAPI:
    """An OpenAI-compatible server around an engine, which stays its maker's to close.

    `observe` makes those who look on: of an `AsyncEngine`, if nothing else is said.
    `app.state.context` is what its routes share, `app.state.observation` who looks on.
    """
    described = engine.describe()
    max_model_len = int(str(described["max_model_len"]))
    context = ServerContext(
        engine=engine,
        settings=settings,
        names=settings.served_model_name or (str(described["model"]),),
        tokenizers=TokenizerThreads(engine.tokenizer),
        max_model_len=max_model_len,
        longest_text=max_model_len * _longest_token(engine.tokenizer),
        block_size=int(str(described["block_size"])),
    )

    seen = observe(engine, settings, context.names[0], lambda: context.is_draining)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with suppress(PyEngineError):  # who needs it will be told
            await asyncio.to_thread(engine.prepare_structured_outputs)
        seen.open()
        context.traffic.open(settings.log_format)
        yield
        await seen.close()
        context.traffic.close()
        context.tokenizers.close()

    app = FastAPI(
        title="pyengine",
        version=package_version(),
        lifespan=lifespan,
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
        responses={status: {"model": ErrorResponse} for status in ("4XX", 422, "5XX")},
    )
    app.state.context = context
    app.state.observation = seen
    for router in (*_ROUTERS, *seen.routers):
        app.include_router(router)
    handle_errors(app)
    # The last one added is the first to see a request.
    app.add_middleware(BodyGuard, context=context)
    app.add_middleware(DrainGuard, context=context)
    app.add_middleware(KeyGuard, settings=settings)
    app.add_middleware(OriginGuard, settings=settings)
    app.add_middleware(HeaderGuard)
    app.add_middleware(RefusalWatch, traffic=context.traffic)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origin,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", IGNORED_HEADER],
        )
    return app


def _longest_token(tokenizer: Any) -> int:
    """Characters that no token has more of."""
    return 0 if tokenizer is None else max(map(len, tokenizer.get_vocab()))
