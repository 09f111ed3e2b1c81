"""Counts and logs refused requests."""

import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyengine.server.callers import known_caller_of, path_of
from pyengine.server.traffic import Traffic

CLIENT_HAS_GONE = 499
"""The status of a request whose client has disconnected; not counted as a refusal."""
_LONGEST_ERROR = 1 << 16
_LONGEST_PATH = 100


class RefusalCounter:
    """Counts and logs every response of status 400 or more."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self._app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, body = 0, b""

        async def watched(message: Message) -> None:
            nonlocal status, body
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400 and len(body) < _LONGEST_ERROR:
                body += message.get("body", b"")
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:  # unexpected: an outer middleware of Starlette answers it
            status = 500
            raise
        finally:
            if status >= 400 and status != CLIENT_HAS_GONE:
                self._refuse(scope, status, body)

    def _refuse(self, scope: Scope, status: int, body: bytes) -> None:
        caller = known_caller_of(scope)
        name = "" if caller is None else caller.name
        if caller is not None:
            self._traffic.keys[name].refusals += 1
        client = scope.get("client")
        self._traffic.refuse(
            status,
            _code_of(body),
            method=scope["method"],
            path=path_of(scope)[:_LONGEST_PATH],
            key=name or None,
            client=client[0] if client else None,
        )


def _code_of(body: bytes) -> str | None:
    """The code in an error body; None without one."""
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return code if isinstance(code, str) else None
