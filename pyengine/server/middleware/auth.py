"""Who may call: keys, compared in constant time, and what only the operator's key may do."""

import base64
import hmac
import math
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from pyengine.server.errors import ApiError
from pyengine.server.settings import ServerSettings

OPEN_PATH = "/health"
"""The one route with an answer that needs no key."""
_SEEN_IN_BROWSERS = ("/kv", "/kv/stream")
"""The page and what feeds it: their key may come as a password, which browsers ask for. They show
everybody's requests, so they need the admin key."""
_BEARER = "send it as the header Authorization: Bearer KEY"
_PASSWORD = f"{_BEARER}, or as the password that the browser asks for, with any name"
_CALLER = "pyengine.caller"
"""Of a scope: its `Caller`."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, by its key.

    `name` stands for the key in metrics and logs: its place in the settings. `is_admin` is true of
    admin keys; of everybody where there are no keys; and of a single key without an admin key.
    `max_priority` is how far from 0 the priority of a request may be.
    """

    key: bytes = b""
    name: str = ""
    is_admin: bool = True
    max_priority: float = 0


def callers(settings: ServerSettings) -> list[Caller]:
    """Everybody who has a key."""
    most = settings.max_priority
    is_alone = len(settings.api_key) == 1 and not settings.admin_key
    clients = [
        Caller(key.encode(), f"{place}", is_alone, most)
        for place, key in enumerate(settings.api_key, start=1)
    ]
    admins = [
        Caller(key.encode(), f"admin-{place}", max_priority=math.inf)
        for place, key in enumerate(settings.admin_key, start=1)
    ]
    return clients + admins


def caller_of(scope: Any) -> Caller:
    """The sender of a request that `KeyGuard` has let in."""
    caller: Caller = scope[_CALLER]
    return caller


def known_caller_of(scope: Any) -> Caller | None:
    """The sender of any request; None where it had no key, or needed none."""
    caller: Caller | None = scope.get(_CALLER)
    return caller


def require_admin(caller: Caller, what: str) -> None:
    """Raise `ApiError` (403) without an admin key."""
    if not caller.is_admin:
        raise ApiError(
            403,
            f"{what} needs the admin key (--admin-key), and this is a client's",
            code="admin_key_needed",
        )


def _authorization(scope: Any, scheme: bytes) -> bytes:
    """What the header Authorization says behind its scheme; empty for another one, or none."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, said = bytes(value).partition(b" ")
            return said.strip() if kind.lower() == scheme else b""
    return b""


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

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._callers = callers(settings)
        self._everybody = Caller(max_priority=settings.max_priority)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and not self._callers:
            scope[_CALLER] = self._everybody
        elif scope["type"] == "http" and (path := path_of(scope)) != OPEN_PATH:
            refusal = self._refusal(scope, path)
            if refusal is not None:
                response = refusal.response()
                if path == "/kv":
                    response.headers["WWW-Authenticate"] = 'Basic realm="API key as password"'
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, path: str) -> ApiError | None:
        """Why a request is refused; None if it may go on, and its caller is in the scope then."""
        in_browsers = path in _SEEN_IN_BROWSERS
        sent = _authorization(scope, b"bearer") or (_password_of(scope) if in_browsers else b"")
        # All are compared, so that the time does not tell which one was nearly right.
        found = [each for each in self._callers if hmac.compare_digest(sent, each.key)]
        if not found:
            how = _PASSWORD if in_browsers else _BEARER
            return ApiError(401, f"this server needs a key: {how}", code="invalid_api_key")
        scope[_CALLER] = found[-1]
        if in_browsers and not found[-1].is_admin:
            status = 401 if path == "/kv" else 403  # 401 has the browser ask again
            message = f"{path} needs the admin key (--admin-key), and this is a client's"
            return ApiError(status, message, code="admin_key_needed")
        return None
