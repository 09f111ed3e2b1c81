"""Who may call: keys, compared in constant time."""

import base64
import hmac
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from pyengine.server.errors import ApiError

OPEN_PATH = "/health"
"""The one route with an answer that needs no key."""
_SEEN_IN_BROWSERS = ("/kv", "/kv/stream")
"""The page and what feeds it: their key may come as a password, which browsers ask for."""
_BEARER = "send it as the header Authorization: Bearer KEY"
_PASSWORD = f"{_BEARER}, or as the password that the browser asks for, with any name"


def _authorization(scope: Any, scheme: bytes) -> bytes:
    """What the header Authorization says behind its scheme; empty for another one, or none."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, said = bytes(value).partition(b" ")
            return said.strip() if kind.lower() == scheme else b""
    return b""


def key_of(scope: Any) -> bytes:
    """The key that a request brings; empty where it brings none."""
    return _authorization(scope, b"bearer")


def _password_of(scope: Any) -> bytes:
    """The password of a request that brings one, by RFC 7617; empty where it brings none."""
    try:
        coded = base64.b64decode(_authorization(scope, b"basic"), validate=True)
    except ValueError:
        return b""
    return coded.partition(b":")[2]


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
        if scope["type"] == "http" and self._keys and (path := path_of(scope)) != OPEN_PATH:
            in_browsers = path in _SEEN_IN_BROWSERS
            given = key_of(scope) or (_password_of(scope) if in_browsers else b"")
            # All are compared, so that the time does not tell which one was nearly right.
            if not any([hmac.compare_digest(given, key) for key in self._keys]):
                how = _PASSWORD if in_browsers else _BEARER
                error = ApiError(401, f"this server needs a key: {how}", code="invalid_api_key")
                response = error.response()
                if path == "/kv":
                    response.headers["WWW-Authenticate"] = 'Basic realm="API key as password"'
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
