"""Who may call: keys, compared in constant time."""

import hmac
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from pyengine.server.errors import ApiError

OPEN_PATH = "/health"
"""The one route with an answer that needs no key."""
_OPEN_PATHS = (OPEN_PATH, "/kv")
"""The page is a file without any data; what it shows comes from a guarded route."""


def key_of(scope: Any) -> bytes:
    """The key that a request brings; empty where it brings none."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, key = bytes(value).partition(b" ")
            return key.strip() if kind.lower() == b"bearer" else b""
    return b""


def path_of(scope: Any) -> str:
    """The path of a request, without what a proxy in front has taken away."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root) else path


class KeyGuard:
    """Answers 401 to requests without one of the keys; without keys everybody may call."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and self._keys and path_of(scope) not in _OPEN_PATHS:
            given = key_of(scope)
            # All are compared, so that the time does not tell which one was nearly right.
            if not any([hmac.compare_digest(given, key) for key in self._keys]):
                error = ApiError(
                    401,
                    "this server needs a key: send it as the header Authorization: Bearer KEY",
                    code="invalid_api_key",
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
