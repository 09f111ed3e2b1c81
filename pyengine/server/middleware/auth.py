"""API keys of clients and administrators, compared in constant time."""

import base64
import hmac
import math
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from pyengine.server.callers import ADMIT, CALLER, OPEN_PATH, Caller, path_of
from pyengine.server.errors import ApiError
from pyengine.server.settings import ServerSettings

_BROWSER_PATHS = ("/kv", "/kv/stream")
"""The dashboard. It shows the requests of all keys, so it needs the admin key, also accepted as the
password that a browser asks for."""
_BEARER = "send it as the header Authorization: Bearer KEY, or as x-api-key: KEY"
_PASSWORD = f"{_BEARER}, or as the password that the browser asks for, with any user name"


def callers(settings: ServerSettings) -> list[Caller]:
    """One caller per key."""
    are_several = len(settings.keys) > 1
    is_alone = len(settings.api_key) == 1 and not settings.admin_key
    by_key = []
    for kind, keys in (("", settings.api_key), ("admin-", settings.admin_key)):
        for number, key in enumerate(keys, start=1):
            name, is_admin = f"{kind}{number}", bool(kind) or is_alone
            limit = math.inf if kind else settings.max_priority
            tenant = name.encode() if are_several else b""
            by_key.append(Caller(key.encode(), name, is_admin, limit, tenant))
    return by_key


def _header(scope: Any, name: bytes) -> bytes:
    """The value of the first header of this name; empty without one."""
    return next((bytes(value).strip() for other, value in scope["headers"] if other == name), b"")


def _authorization(scope: Any, scheme: bytes) -> bytes:
    """The credentials of the Authorization header; empty without one or with another scheme."""
    kind, _, credentials = _header(scope, b"authorization").partition(b" ")
    return credentials.strip() if kind.lower() == scheme else b""


def _password_of(scope: Any) -> bytes:
    """The password of HTTP basic authentication (RFC 7617); empty without one."""
    try:
        coded = base64.b64decode(_authorization(scope, b"basic"), validate=True)
    except ValueError:
        return b""
    return coded.partition(b":")[2]


class KeyGuard:
    """Answers 401 to requests without a valid key, if the server has keys."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._callers = callers(settings)
        self._anonymous = Caller(max_priority=settings.max_priority)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and not self._callers:
            scope[CALLER] = self._anonymous
        elif scope["type"] == "http" and (path := path_of(scope)) != OPEN_PATH:
            refusal = self._refusal(scope, path)
            if refusal is not None:
                response = refusal.response()
                if path == "/kv":
                    response.headers["WWW-Authenticate"] = 'Basic realm="API key as password"'
                await response(scope, receive, send)
                return
        if CALLER in scope and ADMIT in scope:
            scope[ADMIT]()
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, path: str) -> ApiError | None:
        """The error for a request without a valid key; else None, with the caller in the scope."""
        in_browsers = path in _BROWSER_PATHS
        sent = (
            _authorization(scope, b"bearer")
            or _header(scope, b"x-api-key")
            or (_password_of(scope) if in_browsers else b"")
        )
        # Every key is compared, so the time does not depend on which one matches.
        matches = [caller for caller in self._callers if hmac.compare_digest(sent, caller.key)]
        if not matches:
            how = _PASSWORD if in_browsers else _BEARER
            return ApiError(401, f"this server needs a key: {how}", code="invalid_api_key")
        scope[CALLER] = matches[-1]
        if in_browsers and not matches[-1].is_admin:
            status = 401 if path == "/kv" else 403  # after 401 the browser asks again
            message = f"{path} needs the admin key (--admin-key), not a client's key"
            return ApiError(status, message, code="admin_key_needed")
        return None
