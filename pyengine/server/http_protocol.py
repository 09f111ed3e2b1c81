"""HTTP/1.1 connections under limits: on their number, their times, and the work of parsing.

All of this runs before a key is checked, so the work for a caller is bounded by small numbers.
"""

import asyncio
import logging
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pyengine.server.callers import ADMIT, OPEN_PATH, path_of
from pyengine.server.connection_limits import ConnectionLimits, PacedReads, network_of
from pyengine.server.errors import NOSNIFF, ApiError
from pyengine.server.middleware.limits import MAX_HEADER_BYTES
from pyengine.server.traffic import Traffic

_http_log = logging.getLogger(__name__)
_http_log.setLevel(logging.ERROR)
"""Errors of clients are in the refusal log, which is rate-limited."""

_SLICE = 1 << 12
"""Bytes that are parsed at once. Headers are parsed without what follows them."""
_END_OF_HEAD = b"\r\n\r\n"
_MAX_BACKLOG = 1 << 16
"""Received bytes that wait for an earlier request, above which no more are received."""
MAX_HEADERS = 1000
"""Headers of a request, trailers included."""
MAX_PARTS = 1024
"""Parts in which a body may arrive, beside one for each `_BYTES_PER_PART`."""
_BYTES_PER_PART = 256
_LINGER_SECONDS = 2.0
"""Seconds that a client which still sends has to read why its request is refused."""
_LINGER_BYTES = 4 << 20
"""Bytes of such a client that are received, and dropped."""
_RESERVE_SECONDS = 1.0
"""Seconds that a connection above the limits has to ask for /health."""


class _Stage(Enum):
    """The part of a request that comes next."""

    HEAD = auto()
    BODY = auto()
    NOTHING = auto()


class _RefusedError(Exception):
    """Stops the parser."""


class _Transport:
    """A transport whose `close` is the protocol's, which may let the client read first."""

    def __init__(self, transport: Any, close: Callable[[], None]) -> None:
        self._transport = transport
        self.write = transport.write
        self.close = close
        self.is_lingering = False

    def is_closing(self) -> bool:
        """See asyncio."""
        return self.is_lingering or bool(self._transport.is_closing())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Flow(FlowControl):
    """Flow control that parses the backlog before it receives more.

    uvicorn resumes reading if the application waits for a body, and after each response.
    """

    def __init__(self, transport: Any, backlog: bytearray, parse: Callable[[], None]) -> None:
        super().__init__(transport)
        self._backlog = backlog
        self._parse = parse

    def resume_reading(self) -> None:
        """See uvicorn."""
        self._parse()
        if len(self._backlog) <= _MAX_BACKLOG:
            super().resume_reading()


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with limits.

    A connection is closed if the headers of a request take more than `header_seconds`, if the
    client does not read its response for `seconds`, or if a request is answered before its body
    has arrived. A connection above the limits of `limits` gets 503, except from /health.
    """

    header_seconds: float = 10.0
    seconds: float = 60.0
    limits = ConnectionLimits()
    paced_reads = PacedReads()
    traffic = Traffic()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = _http_log
        self.parser.set_dangerous_leniencies(lenient_data_after_close=False)
        self._stage = _Stage.HEAD
        self._backlog = bytearray()
        self._network: str | None = None
        self._is_counted = self._is_pending = self._is_refused = False
        self._keeps_alive = True
        self._resuming = self._is_body_awaited = False
        self._error: ApiError | None = None
        self._num_headers = self._num_parts = self._num_body_bytes = self._num_other_bytes = 0
        self._framing = b""
        self._linger_bytes = _LINGER_BYTES
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._end: asyncio.TimerHandle | None = None

    # The connection

    def connection_made(self, transport: Any) -> None:
        """See asyncio."""
        self._raw = transport
        super().connection_made(_Transport(transport, self._close))  # type: ignore[arg-type]
        self.flow = _Flow(self.transport, self._backlog, self._parse_body)
        self.traffic.num_connections = len(self.connections)
        self._network = network_of(self.client[0]) if self.client else None
        self._is_counted = self._is_pending = self.limits.open(self._network)
        if not self._is_counted:
            self.app = _HealthOnly(self.app, self._count_refusal)
            self.limits.reserve(self, self._expire)
        self._set_timer()

    def _admit(self) -> None:
        """Count the connection as one with a valid request."""
        if self._is_pending:
            self._is_pending = False
            self.limits.admit(self._network)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._backlog.clear()
        self._admit()
        if self._is_counted:
            self._is_counted = False
            self.limits.close()
        self.limits.release(self)
        super().connection_lost(exc)
        for timer in (self._timer, self._unread, self._end):
            if timer is not None:
                timer.cancel()
        self.traffic.num_connections = len(self.connections)

    def pause_writing(self) -> None:
        """See asyncio."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.seconds, self._raw.abort)

    def resume_writing(self) -> None:
        """See asyncio."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def shutdown(self) -> None:
        """See uvicorn."""
        self._keeps_alive = False
        super().shutdown()

    def _close(self) -> None:
        """Close the connection once its client has had time to read its response.

        To close it at once while the client sends would reset it, and drop the response.
        """
        if self.transport.is_closing():
            return
        still_sends = self._stage is _Stage.BODY or self._is_refused
        self._backlog.clear()
        if not still_sends:
            self._raw.close()
            self._end = self.loop.call_later(self.seconds, self._raw.abort)
            return
        self.transport.is_lingering = True  # type: ignore[attr-defined]
        if self._raw.can_write_eof():
            self._raw.write_eof()
        self._read_in_turn()
        self._end = self.loop.call_later(_LINGER_SECONDS, self._raw.abort)

    def _read_in_turn(self) -> None:
        """Receive once more when it is the connection's turn; the data is dropped."""
        if not self._raw.is_closing():
            self._raw.pause_reading()
            self.paced_reads.wait(self.loop, self._read_once)

    def _read_once(self) -> None:
        if not self._raw.is_closing():
            self._raw.resume_reading()

    def _set_timer(self) -> None:
        """Start the timer while headers are due, else stop it."""
        is_due = self._stage is _Stage.HEAD and not self._is_running
        if self._timer is not None and not is_due:
            self._timer.cancel()
            self._timer = None
        elif self._timer is None and is_due:
            seconds = self.header_seconds
            if not self._is_counted:
                seconds = min(seconds, _RESERVE_SECONDS)
            self._timer = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        """Close a connection whose headers have not come."""
        if not self._is_counted and not self.transport.is_closing():
            self._count_refusal()
            self.transport.write(_raw_response(_too_many_connections()))
        self._raw.close()

    @property
    def _is_running(self) -> bool:
        """True until the last request that was parsed is answered."""
        cycle: Any = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    # Parsing

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self.transport.is_closing():
            self._linger_bytes -= len(data)
            if self._linger_bytes < 0:
                self._raw.abort()
            else:
                self._read_in_turn()
            return
        self._unset_keepalive_if_required()
        if self._stage is _Stage.NOTHING and not self._is_running:
            self._stage = _Stage.HEAD
        self._backlog += data
        self._parse()
        if len(self._backlog) > _MAX_BACKLOG:
            self.flow.pause_reading()
        self._set_timer()

    def on_response_complete(self) -> None:
        """See uvicorn."""
        super().on_response_complete()
        if self._backlog and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._parse()
            self.flow.resume_reading()
        self._set_timer()

    def _parse_body(self) -> None:
        """Parse the body of the current request, which the application waits for."""
        if self._stage is _Stage.BODY and not self.transport.is_closing():
            self._is_body_awaited = True
            self._parse()

    def _parse(self) -> None:
        """Parse what was received, up to a request that has to wait for its turn.

        A body waits until the application reads it: the key is checked before.
        """
        while self._backlog and not self.pipeline and not self._is_refused:
            size = _SLICE
            if self._stage is not _Stage.BODY:
                end = self._backlog.find(_END_OF_HEAD, 0, _SLICE)
                size = end + len(_END_OF_HEAD) if end >= 0 else _SLICE
            elif not self._is_body_awaited:
                return
            piece = bytes(self._backlog[:size])
            del self._backlog[:size]
            self._num_other_bytes += len(piece)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                rest = piece[upgrade.args[0] :]
                self._num_other_bytes -= len(rest)
                self._backlog[:0] = rest
                self._resume_body()
            except httptools.HttpParserError as error:
                self._refuse(error)
            else:
                if self._num_other_bytes > MAX_HEADER_BYTES + _SLICE + self._num_body_bytes // 8:
                    self._refuse(None)

    def _resume_body(self) -> None:
        """Parse the body of a request for an upgrade, such as Java's client sends it to HTTP/2.

        The server does not upgrade. httptools leaves the body out: a new parser reads it.
        """
        if self._stage is not _Stage.BODY:
            return
        self.parser = httptools.HttpRequestParser(self)
        self._resuming = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + self._framing + b"\r\n\r\n")
        self._resuming = False

    def on_message_begin(self) -> None:
        """See httptools."""
        if self._resuming:
            return
        super().on_message_begin()
        self._stage = _Stage.HEAD
        self._framing = b""
        self._num_headers = self._num_parts = self._num_body_bytes = self._num_other_bytes = 0

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        if not self._resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools. Trailers are dropped: no proxy and no guard has seen them."""
        if self._resuming:
            return
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            raise self._stop(431, f"the request has more than {MAX_HEADERS} headers")
        if self._stage is _Stage.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See httptools."""
        if self._resuming:
            return
        self._check_head()
        self._stage = _Stage.BODY
        self._is_body_awaited = False
        self.scope[ADMIT] = self._admit  # type: ignore[literal-required]
        if not self._is_counted:
            self.limits.release(self)
        super().on_headers_complete()
        self._keeps_alive = self.cycle.keep_alive and self._is_counted
        self.cycle.keep_alive = False  # until the body is here

    def _check_head(self) -> None:
        """Refuse what proxies and servers may understand differently."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise self._stop(505, f"HTTP/{version} is not supported: use HTTP/1.1")
        hosts = 0
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
            elif name == b"content-length":
                self._framing = b"content-length: " + value
            elif name == b"transfer-encoding":
                self._framing = b"transfer-encoding: chunked"
                if value.lower() != b"chunked" or version == "1.0":
                    raise self._stop(
                        501, "the only Transfer-Encoding is chunked, in HTTP/1.1: send that"
                    )
        if hosts > 1 or (not hosts and version == "1.1"):
            raise self._stop(400, f"the request has {hosts} Host headers: send one")

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._num_parts += 1
        self._num_body_bytes += len(body)
        self._num_other_bytes -= len(body)
        if self._num_parts > MAX_PARTS + self._num_body_bytes // _BYTES_PER_PART:
            raise self._stop(
                400,
                f"the body has {self._num_parts} parts in {self._num_body_bytes} bytes: send "
                f"chunks of at least {_BYTES_PER_PART} bytes, or a Content-Length",
                code="too_many_chunks",
            )
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        if self._framing and self._num_parts == 0 and self.parser.should_upgrade():
            return  # its body follows
        self._stage = _Stage.NOTHING
        super().on_message_complete()
        if self._keeps_alive and not self.cycle.response_started:
            self.cycle.keep_alive = True

    # Refusals

    def _stop(self, status: int, message: str, code: str = "invalid_http") -> Exception:
        """An exception that makes the parser stop, with the error for the client."""
        self._error = ApiError(status, message, code=code)
        return _RefusedError(message)

    def _refuse(self, error: Exception | None) -> None:
        """Answer a request that cannot be parsed, unless an earlier one runs; then close."""
        is_in_head = self._stage is _Stage.HEAD
        refusal = self._error
        if refusal is None and error is not None:
            refusal = ApiError(400, f"invalid HTTP request: {error}", code="invalid_http")
        elif refusal is None and is_in_head:
            message = f"the headers have more than {MAX_HEADER_BYTES} bytes, the limit"
            refusal = ApiError(431, message, code="headers_too_large")
        elif refusal is None:
            message = "the body has too many bytes of chunk extensions or trailers"
            refusal = ApiError(400, message, code="invalid_http")
        assert refusal is not None
        self._is_refused = True
        self._backlog.clear()
        if self._is_running and self._stage is not _Stage.BODY:
            self.cycle.keep_alive = False  # the last one is answered, then the connection closes
            return
        is_answered = self._is_running and (self.cycle.response_started or bool(self.pipeline))
        self._count_refusal(refusal)
        if self._is_running:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not is_answered:
            self.transport.write(_raw_response(refusal))
        self.transport.close()

    def _count_refusal(self, error: ApiError | None = None) -> None:
        """Count and log a refusal; without an error, that of a connection above the limits."""
        client = self.client[0] if self.client else None
        if error is None:
            self.traffic.num_refused_connections += 1
            error = _too_many_connections()
        self.traffic.refuse(error.status_code, error.code, client=client)


class _HealthOnly:
    """The application for a connection above the limits: 503, except from /health."""

    def __init__(self, app: Any, count_refusal: Callable[[], None]) -> None:
        self._app = app
        self._count_refusal = count_refusal

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        if path_of(scope) == OPEN_PATH:
            await self._app(scope, receive, send)
            return
        self._count_refusal()
        await _too_many_connections().response()(scope, receive, send)


def _too_many_connections() -> ApiError:
    message = "too many connections: try again"
    return ApiError(503, message, code="too_many_connections", retry_after=1)


def _raw_response(error: ApiError) -> bytes:
    """The bytes of a response outside of the application, which closes the connection."""
    response = error.response()
    headers = [*response.raw_headers, NOSNIFF]
    head = [STATUS_LINE[error.status_code], *(b"%b: %b\r\n" % header for header in headers)]
    return b"".join([*head, b"connection: close\r\n\r\n", response.body])
