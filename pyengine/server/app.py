"""The application: routes, guards and errors put together around an engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from pyengine.core.distribution import package_version
from pyengine.core.server_settings import ServerSettings
from pyengine.engine import AsyncEngine
from pyengine.server import chat, completions, health
from pyengine.server.auth import KeyGuard
from pyengine.server.context import ServerContext
from pyengine.server.errors import handle_errors
from pyengine.server.limits import BodyGuard, DrainGuard
from pyengine.server.observation import Observation
from pyengine.server.rendering import TokenizerThreads

_ROUTERS = (health.router, completions.router, chat.router)


def create_app(engine: AsyncEngine, settings: ServerSettings) -> FastAPI:
    """An OpenAI-compatible server around an engine, which stays its maker's to close.

    `app.state.context` is what its routes share, `app.state.observation` who looks on.
    """
    context = ServerContext(
        engine=engine,
        settings=settings,
        names=settings.served_model_name or (str(engine.describe()["model"]),),
        tokenizers=TokenizerThreads(engine.tokenizer),
        longest_text=_longest_text(engine),
    )

    seen = Observation(engine, settings, context.names[0], lambda: context.is_draining)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        seen.open()
        yield
        await seen.close()
        context.tokenizers.close()

    app = FastAPI(
        title="pyengine",
        version=package_version(),
        lifespan=lifespan,
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
        root_path=settings.root_path,
    )
    app.state.context = context
    app.state.observation = seen
    for router in (*_ROUTERS, *seen.routers):
        app.include_router(router)
    handle_errors(app)
    # The last one added is the first to see a request.
    app.add_middleware(BodyGuard, max_bytes=settings.max_body_bytes, timeout=settings.body_timeout)
    app.add_middleware(DrainGuard, context=context)
    app.add_middleware(KeyGuard, keys=settings.api_key)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origin,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app


def _longest_text(engine: AsyncEngine) -> int:
    """Characters that no prompt that fits into the model has more of."""
    if engine.tokenizer is None:
        return 0
    longest_token = max(map(len, engine.tokenizer.get_vocab()))
    return int(str(engine.describe()["max_model_len"])) * longest_token
