"""Protects the server from web pages of other sites, by the headers that browsers send.

Any page can send simple requests to any address, and with DNS rebinding read the responses.
"""

import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from pyengine.server.callers import OPEN_PATH, path_of
from pyengine.server.errors import ApiError
from pyengine.server.settings import ServerSettings

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_SAME_SITE = ("same-origin", "none")
"""Values of Sec-Fetch-Site: a page of this server, or no page."""


def host_of(address: str) -> str:
    """The name in a Host header or an origin, without its port."""
    try:
        return (urlsplit(f"//{address}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


class OriginGuard:
    """Answers 421 to unknown Host headers, and 403 to unsafe requests of other sites.

    Host headers are checked on servers without keys, which DNS rebinding would expose, and on
    servers with `allowed_host`. IP addresses and localhost are always allowed.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._origins = settings.cors_origin
        self._hosts = {host.lower() for host in settings.allowed_host}
        is_open = not settings.keys and settings.uds is None
        self._checks_host = "*" not in self._hosts and bool(is_open or self._hosts)
        self._hosts |= {settings.host.lower(), socket.gethostname().lower(), "localhost", ""}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and path_of(scope) != OPEN_PATH:
            refusal = self._refusal(scope)
            if refusal is not None:
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = {bytes(name): bytes(value).decode("latin-1") for name, value in scope["headers"]}
        address = headers.get(b"host", "")
        if self._checks_host and not self._is_served(host_of(address), address):
            return ApiError(
                421,
                f"unknown host {address[:200]!r}: use the server's address or localhost, or start "
                "it with --allowed-host NAME",
                code="unknown_host",
            )
        if scope["method"] not in _SAFE_METHODS and self._is_of_another_site(headers):
            return ApiError(
                403,
                "a page of another site sent this request: --cors-origin allows its origin",
                code="cross_site",
            )
        return None

    def _is_served(self, host: str, address: str) -> bool:
        if not host:
            return not address  # browsers always send the header
        return host in self._hosts or host.endswith(".localhost") or _is_address(host)

    def _is_of_another_site(self, headers: dict[bytes, Any]) -> bool:
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if "*" in self._origins or (origin is not None and origin in self._origins):
            return False
        if site is not None:
            return site not in _SAME_SITE
        if origin is None:  # a program, not a browser
            return False
        address = origin.partition("://")[2]
        return not address or address.lower() != str(headers.get(b"host", "")).lower()
