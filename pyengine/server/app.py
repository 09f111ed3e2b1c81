"""The ASGI application: routes, middleware and error handlers around an engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import Message, Receive, Scope, Send

from pyengine.errors import PyEngineError
from pyengine.request.lora import LoRARequest
from pyengine.server.context import ServerContext
from pyengine.server.engine_protocol import EngineClient, MakeObservers
from pyengine.server.errors import NOSNIFF, handle_errors
from pyengine.server.middleware.auth import KeyGuard
from pyengine.server.middleware.limits import BodyGuard, DrainGuard, HeaderGuard
from pyengine.server.middleware.origins import OriginGuard
from pyengine.server.middleware.refusals import RefusalCounter
from pyengine.server.observers import EngineObservers
from pyengine.server.routes import (
    chat,
    completions,
    control,
    health,
    pooling,
    tokenize,
    weights,
)
from pyengine.server.routes.ignored import IGNORED_HEADER
from pyengine.server.schemas.responses import ErrorResponse
from pyengine.server.settings import ServerSettings
from pyengine.server.tokenizer_threads import TokenizerThreads
from pyengine.utils.packaging import package_version

_ROUTERS = (
    health.router,
    completions.router,
    chat.router,
    pooling.router,
    tokenize.router,
    control.router,
    weights.router,
)


def create_app(
    engine: EngineClient, settings: ServerSettings, observe: MakeObservers = EngineObservers
) -> FastAPI:
    """Create an OpenAI-compatible server around an engine. The caller closes the engine.

    `observe` creates the observers; the default ones observe an `AsyncEngine`. The state shared by
    the routes is in `app.state.context`, the observers are in `app.state.observers`.
    """
    described = engine.describe()
    max_model_len = int(str(described["max_model_len"]))
    tokens = () if engine.tokenizer is None else engine.tokenizer.get_vocab()
    context = ServerContext(
        engine=engine,
        settings=settings,
        names=settings.served_model_name or (str(described["model"]),),
        tokenizers=TokenizerThreads(engine.tokenizer, has_tenants=len(settings.keys) > 1),
        max_model_len=max_model_len,
        longest_text=max_model_len * max(map(len, tokens), default=0),
        block_size=int(str(described["block_size"])),
    )
    for text in settings.lora_modules:
        name, _, path = text.partition("=")
        context.load_lora(LoRARequest(name, path))

    observers = observe(engine, settings, context.names[0], lambda: context.is_draining)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with suppress(PyEngineError):  # requests that need it get the error
            await asyncio.to_thread(engine.prepare_structured_outputs)
        observers.open()
        context.traffic.open(settings.log_format)
        yield
        await observers.close()
        context.traffic.close()
        context.tokenizers.close()
        context.json_thread.close()

    app = _Application(
        title="pyengine",
        version=package_version(),
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from other sites
        redoc_url=None,
        responses={status: {"model": ErrorResponse} for status in ("4XX", 422, "5XX")},
    )
    app.state.context = context
    app.state.observers = observers
    for router in (*_ROUTERS, *observers.routers):
        app.include_router(router)
    handle_errors(app)
    _add_middleware(app, context)
    return app


class _Application(FastAPI):
    """Adds `NOSNIFF` to every response, those of error handlers included."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), NOSNIFF]
            await send(message)

        await super().__call__(scope, receive, marked)


def _add_middleware(app: FastAPI, context: ServerContext) -> None:
    """Add the middleware in reverse order: the last one runs first."""
    settings = context.settings
    app.add_middleware(BodyGuard, context=context)
    app.add_middleware(DrainGuard, context=context)
    app.add_middleware(KeyGuard, settings=settings)
    app.add_middleware(OriginGuard, settings=settings)
    app.add_middleware(HeaderGuard)
    app.add_middleware(RefusalCounter, traffic=context.traffic)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origin,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", IGNORED_HEADER],
        )
