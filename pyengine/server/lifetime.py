"""Listening sockets, signals and draining."""

import asyncio
import ipaddress
import logging
import os
import resource
import signal
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import uvicorn

from pyengine.errors import ConfigurationError
from pyengine.server.app import create_app
from pyengine.server.connection_limits import ConnectionLimits, PacedReads
from pyengine.server.context import ServerContext
from pyengine.server.engine_protocol import EngineClient, MakeObservers
from pyengine.server.http_protocol import LimitedProtocol
from pyengine.server.observers import EngineObservers
from pyengine.server.settings import ServerSettings

_log = logging.getLogger(__name__)

_OTHER_DESCRIPTORS = 128
"""File descriptors of a server besides the connections that it serves."""
_GRACE_SECONDS = 5
"""Seconds for clients to read their responses once all requests have finished."""


@contextmanager
def listening(settings: ServerSettings) -> Iterator[socket.socket]:
    """Bind a server's socket. It accepts connections once the server runs.

    Raises `ConfigurationError` if the address is not available or the certificate not readable.
    """
    _check_certificate(settings)
    if settings.uds is None:
        with _socket(settings) as server:
            yield server
        return
    with _unix_socket(settings.uds) as server:
        try:
            yield server
        finally:
            Path(settings.uds).unlink(missing_ok=True)


def _check_certificate(settings: ServerSettings) -> None:
    """Fail before the model is loaded; uvicorn reads the certificate again."""
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password="")  # do not prompt for a password
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"ssl_certfile={str(certificate)!r} and ssl_keyfile={str(key)!r} cannot be read: "
            f"{reason}; give PEM files, the key without a password"
        ) from error


def _socket(settings: ServerSettings) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[0]
        _check_reach(settings, str(address[0]))
        server = socket.socket(family, kind, protocol)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        raise _not_listening(f"host={settings.host!r}", error) from error
    try:
        server.bind(address)
    except OSError as error:
        server.close()
        raise _not_listening(f"{settings.host}, port {settings.port}", error) from error
    return server


def _check_reach(settings: ServerSettings, address: str) -> None:
    """Raise `ConfigurationError` if other machines could use the server without a key."""
    if not (_is_loopback(address) or settings.keys or settings.insecure):
        raise ConfigurationError(
            f"host={settings.host!r} is reachable from other machines and no key is set: give "
            "--api-key KEY, or --insecure"
        )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_local(server: socket.socket) -> bool:
    """True if only programs of this machine reach the socket."""
    return server.family == socket.AF_UNIX or _is_loopback(str(server.getsockname()[0]))


def _unix_socket(path: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                if other.connect_ex(path) != 0:  # left over from a server that has ended
                    os.unlink(path)
        server.bind(path)
    except OSError as error:
        server.close()
        raise _not_listening(f"uds={path!r}", error) from error
    return server


def _not_listening(where: str, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"cannot listen on {where}: {error.strerror or error}; give another address, or stop the "
        "program that uses it"
    )


def address_of(settings: ServerSettings, server: socket.socket) -> str:
    """The server's URL."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = server.getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{settings.root_path}"


def descriptors_for(count: int) -> int:
    """Raise the limit of open files for `count` connections, and return how many it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = count + _OTHER_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= required:
        return count
    allowed = required if hard == resource.RLIM_INFINITY else min(required, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft < required:
        _log.warning(
            "the limit of open files is %d (ulimit -n): at most %d connections, not %d",
            soft,
            max(1, soft - _OTHER_DESCRIPTORS),
            count,
        )
    return max(1, min(count, soft - _OTHER_DESCRIPTORS))


def make_server(
    engine: EngineClient,
    settings: ServerSettings,
    on_ready: Callable[[], object],
    observe: MakeObservers = EngineObservers,
) -> "SignalledServer":
    """Create a server to `run(sockets=[...])`. It calls `on_ready` once it accepts connections.

    `observe` is that of `create_app`. The caller closes the engine.
    """
    app = create_app(engine, settings, observe)
    of_server = {
        "header_seconds": settings.header_timeout,
        "seconds": settings.body_timeout,
        "limits": ConnectionLimits(
            descriptors_for(settings.max_connections), settings.max_pending_connections
        ),
        "paced_reads": PacedReads(),
        "traffic": app.state.context.traffic,
    }
    config = uvicorn.Config(
        app,
        http=type("Protocol", (LimitedProtocol,), of_server),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        root_path=settings.root_path,
        timeout_keep_alive=settings.keep_alive,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
    )
    return SignalledServer(config, app.state.context, on_ready)


class SignalledServer(uvicorn.Server):
    """A server that drains on SIGTERM and SIGINT: new requests get 503, running ones finish.

    A second signal aborts running requests; a third one does not wait for their clients.
    """

    def __init__(
        self, config: uvicorn.Config, context: ServerContext, on_ready: Callable[[], object]
    ) -> None:
        super().__init__(config)
        self._context = context
        self._on_ready = on_ready
        self._num_signals = 0
        self._ending: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if not self.should_exit:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None = None) -> None:
        """Handle a signal, at any line of the main thread."""
        if self._loop is None:
            raise KeyboardInterrupt
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._end, signal.Signals(sig).name)

    def _end(self, name: str) -> None:
        self._num_signals += 1
        self._context.is_draining = True
        if self._num_signals > 2:
            self.force_exit = self.should_exit = True
            return
        is_first = self._num_signals == 1
        later = "may finish, new ones get 503; a second signal aborts them"
        end = later if is_first else "are aborted"
        _log.warning("%s: %d running requests %s", name, len(self._context.live), end)
        timeout = self._context.settings.drain_timeout if is_first else 0
        task = asyncio.get_running_loop().create_task(self._drain(timeout))
        self._ending.add(task)

    async def _drain(self, timeout: float) -> None:
        if not await self._context.engine.drain(timeout) and timeout:
            _log.warning("requests were aborted after %g seconds", timeout)
        self.should_exit = True
