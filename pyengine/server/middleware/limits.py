"""Limits on headers, bodies and bytes in flight, and 503 while the server drains."""

import asyncio
from collections import Counter
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyengine.errors import PyEngineError
from pyengine.server.callers import OPEN_PATH, Caller, caller_of, path_of
from pyengine.server.context import ServerContext
from pyengine.server.errors import ApiError, as_api_error
from pyengine.server.settings import ServerSettings

MAX_HEADER_BYTES = 1 << 16
_BODY = "pyengine.body"
"""The scope's key for its `_Body`."""
_QUEUED = (
    *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/classify"),
    *("/score", "/v1/score", "/rerank", "/v1/rerank"),
)
"""Routes whose requests the engine queues."""
_OPEN_WHILE_DRAINING = ("/metrics",)
"""Routes that answer while the server drains, beside /health."""


class DrainGuard:
    """Answers 503 while the server drains, and counts the requests in progress."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or path_of(scope) == OPEN_PATH:
            await self._app(scope, receive, send)
        elif self._context.is_draining and path_of(scope) not in _OPEN_WHILE_DRAINING:
            error = ApiError(503, "the server is shutting down", code="draining", retry_after=10)
            await error.response()(scope, receive, send)
        else:
            name = caller_of(scope).name
            self._context.num_open += 1
            self._context.num_open_of[name] += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._context.num_open -= 1
                self._context.num_open_of[name] -= 1


class HeaderGuard:
    """Answers 431 to more than 64 KiB of headers, including the path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http":
            count = len(scope.get("raw_path") or b"") + len(scope["query_string"])
            count += sum([len(name) + len(value) + 4 for name, value in scope["headers"]])
            if count > MAX_HEADER_BYTES:
                message = f"the headers have {count} bytes; the limit is {MAX_HEADER_BYTES}"
                await ApiError(431, message, code="headers_too_large").response()(
                    scope, receive, send
                )
                return
        await self._app(scope, receive, send)


class InflightBytes:
    """Bytes of bodies that were received and are not queued yet, in total and per key.

    With several keys, each may use half of the limit.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._max_total = settings.max_inflight_bytes
        self._max_of_key = self._max_total // 2 if len(settings.keys) > 1 else self._max_total
        self._of_keys: Counter[str] = Counter()

    def have_room(self, key: str, count: int) -> bool:
        """True if `count` further bytes are within the limits."""
        is_fair = self._of_keys[key] + count <= self._max_of_key
        return is_fair and self._of_keys.total() + count <= self._max_total

    def add(self, key: str, count: int) -> None:
        """Count received bytes, or released ones if negative."""
        self._of_keys[key] += count


class _Body:
    """The bytes in flight of one body."""

    def __init__(self, inflight: InflightBytes, key: str) -> None:
        self._inflight = inflight
        self._key = key
        self.count = 0
        self._held = 0
        self._is_released = False

    def add(self, count: int) -> None:
        """Count received bytes. Raises `ApiError` (503) above the limit."""
        self.count += count
        if self._is_released:
            return
        if not self._inflight.have_room(self._key, count):
            raise _busy()
        self._inflight.add(self._key, count)
        self._held += count

    def release(self) -> None:
        """Stop counting them: the request is queued or answered."""
        if not self._is_released:
            self._is_released = True
            self._inflight.add(self._key, -self._held)


def release_body(scope: Any) -> None:
    """Stop counting the body of a request, which is queued now."""
    body = scope.get(_BODY)
    if body is not None:
        body.release()


class BodyGuard:
    """Checks requests before their bodies are read, and limits the bodies.

    Answers 503 if the queue is full or too many bytes are in flight, 413 to a body that is too
    large, 408 to one that arrives too slowly. A declared length is checked before the body is read.
    """

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context
        self._max_bytes = context.settings.max_body_bytes
        self._timeout = context.settings.body_timeout
        self._inflight = InflightBytes(context.settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = caller_of(scope) if path_of(scope) != OPEN_PATH else Caller()
        key = caller.name
        refusal = self._refusal(scope, caller)
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        end = asyncio.get_running_loop().time() + self._timeout
        body = scope[_BODY] = _Body(self._inflight, key)
        is_over = False

        async def guarded() -> Message:
            nonlocal is_over
            if is_over:  # the next message is the client's disconnect
                return await receive()
            message = await self._until(end, receive)
            body.add(len(message.get("body", b"")))
            is_over = not message.get("more_body", False)
            if body.count > self._max_bytes:
                raise self._too_large()
            return message

        try:
            await self._app(scope, guarded, send)
        finally:
            body.release()

    def _refusal(self, scope: Scope, caller: Caller) -> ApiError | None:
        """The error that makes reading the body needless; None if it is to be read."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        count = int(declared[:20]) if declared.isdigit() else 0
        if count > self._max_bytes:
            return self._too_large()
        if scope["method"] == "POST" and path_of(scope) in _QUEUED:
            try:
                self._context.engine.check_room(caller.tenant)
            except PyEngineError as error:
                return as_api_error(error)
        return None if self._inflight.have_room(caller.name, count) else _busy()

    async def _until(self, end: float, receive: Receive) -> Message:
        try:
            async with asyncio.timeout_at(end):
                return await receive()
        except TimeoutError:
            raise ApiError(
                408, f"the body took more than {self._timeout:g} seconds", code="body_timeout"
            ) from None

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self._max_bytes} bytes, the limit of this server: send less "
            "at a time",
            code="body_too_large",
        )


def _busy() -> ApiError:
    return ApiError(503, "too many bodies at once: send this one again", code="busy", retry_after=1)
