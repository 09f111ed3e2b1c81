"""What a request may cost before it is read, and whether any are taken."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyengine.server.auth import OPEN_PATH, path_of
from pyengine.server.context import ServerContext
from pyengine.server.errors import ApiError

_WHILE_IT_DRAINS = ("/metrics",)
"""Routes that are answered until the end, beside /health."""


class DrainGuard:
    """Answers 503 while the server drains; counts the requests that are being answered."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or path_of(scope) == OPEN_PATH:
            await self._app(scope, receive, send)
        elif self._context.is_draining and path_of(scope) not in _WHILE_IT_DRAINS:
            error = ApiError(
                503, "the server takes no more requests: it ends", code="draining", retry_after=10
            )
            await error.response()(scope, receive, send)
        else:
            self._context.num_open += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._context.num_open -= 1


class BodyGuard:
    """Answers 413 to bodies that are too large, 408 to those that take too long to come.

    A body whose length is told is refused before any of it is read.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = dict(scope["headers"]).get(b"content-length", b"0")
        if told.isdigit() and int(told[:20]) > self._max_bytes:
            await self._too_large().response()(scope, receive, send)
            return
        end = asyncio.get_running_loop().time() + self._timeout
        count, is_over = 0, False

        async def guarded() -> Message:
            nonlocal count, is_over
            if is_over:  # what comes now is that the client goes
                return await receive()
            message = await self._until(end, receive)
            count += len(message.get("body", b""))
            is_over = not message.get("more_body", False)
            if count > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, guarded, send)

    async def _until(self, end: float, receive: Receive) -> Message:
        try:
            async with asyncio.timeout_at(end):
                return await receive()
        except TimeoutError:
            raise ApiError(
                408, f"the body had not come after {self._timeout:g} seconds", code="body_timeout"
            ) from None

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self._max_bytes} bytes, the most that this server takes: "
            "send less at a time",
            code="body_too_large",
        )
