"""Requests that are cheap to send and dear to parse, or that two programs read differently."""

import contextlib
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.server.connection_limits import NUM_RESERVED, ConnectionLimits, network_of
from pyengine.server.http_protocol import MAX_HEADERS, MAX_PARTS
from tests.integration.test_server_sockets import request_of, rest_of
from tests.support.serving import (
    GOOD,
    RunningServer,
    assert_soon,
)

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
KEYED = HEAD + b"authorization: Bearer one\r\ntransfer-encoding: chunked\r\n\r\n"
TINY = b"1\r\n \r\n" * 4096
MOST_READ = 16 << 20
"""Bytes that a client may send before the server resets the connection, with all socket buffers."""


@pytest.fixture(scope="module")
def server(engine: AsyncEngine) -> Iterator[RunningServer]:
    with RunningServer(engine) as server:
        yield server


@pytest.fixture(scope="module")
def keyed(engine: AsyncEngine) -> Iterator[RunningServer]:
    with RunningServer(engine, api_key=("one", "two"), admin_key=("root",)) as server:
        yield server


def flood(server: RunningServer, head: bytes, item: bytes) -> tuple[int, bytes]:
    """Bytes of items that the server takes until it closes the connection, and its answer."""
    count, answer = 0, b""
    with server.connect() as client:
        client.settimeout(20)
        client.sendall(head)
        with contextlib.suppress(OSError):
            while count < MOST_READ:
                client.sendall(item)
                count += len(item)
                client.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    answer += client.recv(65536)
                client.settimeout(20)
    return count, answer


def answers_to(server: RunningServer, *parts: bytes, pause: float = 0.0) -> list[bytes]:
    """The responses on one connection, until the server closes it."""
    with server.connect() as client:
        for part in parts:
            with contextlib.suppress(OSError):
                client.sendall(part)
            time.sleep(pause)
        return re.split(rb"(?=HTTP/1\.1 [0-9]{3} )", rest_of(client))[1:]


def status_of(answers: list[bytes]) -> list[int]:
    return [int(answer[9:12]) for answer in answers]


@pytest.mark.parametrize(
    ("head", "item", "status"),
    [
        (CHUNKED, TINY, b"400 401"),
        (KEYED, TINY, b"400"),
        (KEYED, b"ff;" + b"x" * 4000, b"400"),
        (KEYED + b"0\r\n", b"x: y\r\n" * 100, b"431"),
        (KEYED + b"0\r\nx: ", b"y" * 4000, b"400"),
        (KEYED.replace(b"one", b"no"), b"8000\r\n" + b" " * 0x8000 + b"\r\n", b"401"),
        (KEYED, b"8000\r\n" + b" " * 0x8000 + b"\r\n", b"413"),
        (HEAD + b"content-length: 99999999999\r\n\r\n", b" " * 65536, b"401"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n", TINY, b"413"),
        (
            b"GET /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n",
            TINY,
            b"400 200",
        ),
        (
            b"GET /nothing HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n",
            TINY,
            b"400 401",
        ),
        (b"", b"\r\n" * 4096, b"431"),
    ],
    ids=[
        "chunks without a key",
        "chunks",
        "extensions",
        "trailers",
        "a long trailer",
        "a large body without a key",
        "a large body",
        "a declared length",
        "a body for /health",
        "chunks for /health",
        "a body for no route",
        "empty lines",
    ],
)
def test_a_request_that_is_refused_is_not_read_on(
    head: bytes, item: bytes, status: bytes, keyed: RunningServer
) -> None:
    started = time.monotonic()
    count, answer = flood(keyed, head, item)
    assert count < MOST_READ and time.monotonic() - started < 15
    assert answer[9:12] in status.split() and b"connection: close" in answer.lower()
    assert httpx2.get(f"{keyed.address}/health").status_code == 200


def test_the_reason_is_there_to_read_when_the_body_is_not_sent_whole(keyed: RunningServer) -> None:
    """A connection that is closed with unread bytes is reset, and the client loses the answer."""
    whole = HEAD + b"content-length: 3000000\r\n\r\n" + b" " * 3_000_000
    for _ in range(5):
        (answer,) = answers_to(keyed, whole)
        assert status_of([answer]) == [401] and b'"invalid_api_key"' in answer


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 300, 100_000])
def test_chunks_of_ordinary_bodies_are_served(size: int, keyed: RunningServer) -> None:
    long = MAX_PARTS - 200 if size < 256 else 300_000
    body = json.dumps(GOOD | {"user": "x" * long * size if size < 256 else "x" * long}).encode()
    head = KEYED.replace(b"host:", b"connection: close\r\nhost:")
    with keyed.connect() as client:
        client.sendall(head + chunked(body, size))
        assert rest_of(client).startswith(b"HTTP/1.1 200")
    with keyed.connect() as client:  # in packets of their own
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(head)
        for piece in (chunked(body, size)[:9], chunked(body, size)[9:]):
            client.sendall(piece)
            time.sleep(0.05)
        assert rest_of(client).startswith(b"HTTP/1.1 200")


def test_many_packets_are_as_many_parts(server: RunningServer) -> None:
    body = json.dumps(GOOD | {"user": "x" * 20_000}).encode()
    with server.connect() as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body))
        with contextlib.suppress(OSError):
            for byte in body:
                client.sendall(bytes([byte]))
                time.sleep(0.0002)
        assert b"too_many_chunks" in rest_of(client)


@pytest.mark.parametrize(
    ("lines", "body", "status"),
    [
        (b"content-length: 2\r\ntransfer-encoding: chunked", b"0\r\n\r\n", 400),
        (b"transfer-encoding: chunked\r\ncontent-length: 5", b"0\r\n\r\n", 400),
        (b"content-length: 2\r\ncontent-length: 3", b"{}", 400),
        (b"content-length: +2", b"{}", 400),
        (b"content-length : 2", b"{}", 400),
        (b"transfer-encoding: xchunked", b"0\r\n\r\n", 501),
        (b"transfer-encoding: identity", b"", 501),
        (b"transfer-encoding: gzip, chunked", b"0\r\n\r\n", 501),
        (b"transfer-encoding: chunked\r\ntransfer-encoding: chunked", b"0\r\n\r\n", 400),
        (b"transfer-encoding: chunked", b"0x2\r\n{}\r\n0\r\n\r\n", 400),
        (b"transfer-encoding: chunked", b"2\n{}\n0\n\n", 400),
        (b"transfer-encoding: chunked", b"f" * 20 + b"\r\n", 400),
        (b"x: y\r\n z", b"", 400),
        (b"x: a\rb", b"", 400),
        (b"x: a\0b", b"", 400),
        (b"host: other", b"", 400),
    ],
)
def test_what_two_programs_read_differently_is_refused_and_closed(
    lines: bytes, body: bytes, status: int, server: RunningServer
) -> None:
    smuggled = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    answers = answers_to(server, HEAD + lines + b"\r\n\r\n" + body + smuggled)
    assert status_of(answers) == [status]
    assert b"connection: close" in answers[0].lower() and b'"invalid_http"' in answers[0]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.0\r\n\r\n", 200),
        (b"GET /health HTTP/2.0\r\nhost: x\r\n\r\n", 505),
        (b"GET /health\r\n\r\n", 505),
        (b"GET /health HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 501),
        (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET http://\xff/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    ],
)
def test_versions_and_targets(head: bytes, status: int, server: RunningServer) -> None:
    assert status_of(answers_to(server, head)) == [status]


def test_trailers_are_no_headers(keyed: RunningServer) -> None:
    body = chunked(json.dumps(GOOD).encode(), 100).removesuffix(b"\r\n")
    trailer = b"x-request-id: mine\r\nconnection: close\r\n\r\n"
    with keyed.connect() as client:
        client.sendall(KEYED + body)
        time.sleep(0.1)
        client.sendall(trailer)
        client.settimeout(20)
        answer = client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200") and b"x-request-id: mine" not in answer


def test_pipelined_requests_are_answered_in_their_order(server: RunningServer) -> None:
    one = b"GET /v1/models/%d HTTP/1.1\r\nhost: localhost\r\n\r\n"
    requests = b"".join(one % place for place in range(2000))
    last = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    answers = answers_to(server, requests + last + last)
    assert status_of(answers) == [404] * 2000 + [200]
    numbers = [answer.partition(b"unknown model '")[2].partition(b"'")[0] for answer in answers]
    assert numbers[:-1] == [b"%d" % place for place in range(2000)]


def test_what_is_pipelined_behind_a_long_request_is_not_kept_in_memory(
    server: RunningServer,
) -> None:
    long = GOOD | {"max_tokens": 900, "ignore_eos": True, "stream": True}
    with server.connect() as client:
        client.settimeout(1)
        client.sendall(request_of(long))
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 64 << 20:
                sent += client.send(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000)
        assert sent < 64 << 20


@pytest.mark.parametrize("split", [0, 1, 40])
@pytest.mark.parametrize("form", ["length", "chunks", "empty"])
def test_an_upgrade_to_http_2_is_ignored_and_the_body_is_read(
    form: str, split: int, server: RunningServer
) -> None:
    """Java's client sends every first request so."""
    upgrade = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "x"}
    whole = request_of(GOOD, **upgrade)
    head, _, body = whole.partition(b"\r\n\r\n")
    if form == "chunks":
        lines = [line for line in head.split(b"\r\n") if not line.startswith(b"content-length")]
        whole = b"\r\n".join([*lines, b"transfer-encoding: chunked"]) + b"\r\n\r\n"
        whole += chunked(body, 10)
    elif form == "empty":
        whole = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\n"
        whole += b"upgrade: h2c\r\n\r\n"
    last = request_of(GOOD, connection="close")
    at = len(whole) - split
    answers = answers_to(server, whole[:at], whole[at:] + last, pause=0.05)
    assert status_of(answers) == [200, 200]


def test_a_request_with_many_headers(server: RunningServer) -> None:
    for count, status in ((MAX_HEADERS - 10, 200), (MAX_HEADERS + 1, 431)):
        lines = b"a:b\r\n" * count
        head = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + lines + b"\r\n"
        assert status_of(answers_to(server, head)) == [status]


# Connections


def half_sent(server: RunningServer, ends: ExitStack, count: int) -> list[socket.socket]:
    clients = [ends.enter_context(server.connect()) for _ in range(count)]
    for client in clients:
        client.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\nx: ")
    return clients


def test_health_answers_beyond_the_limit_of_connections(engine: AsyncEngine) -> None:
    with RunningServer(engine, max_connections=8, api_key=("one",)) as server, ExitStack() as ends:
        half_sent(server, ends, 8 + 2 * NUM_RESERVED)
        for _ in range(3):
            health = httpx2.get(f"{server.address}/health", timeout=5)
            assert health.status_code == 200 and health.headers["connection"] == "close"
        headers = {"authorization": "Bearer one"}
        other = httpx2.get(f"{server.address}/version", headers=headers, timeout=5)
        assert other.status_code == 503 and other.headers["connection"] == "close"
        assert other.json()["error"]["code"] == "too_many_connections"
        assert other.headers["retry-after"] == "1"


def test_connections_without_a_valid_key_are_bounded_per_address(engine: AsyncEngine) -> None:
    keys = {"api_key": ("one",), "max_connections": 64, "max_pending_connections": 4}
    with RunningServer(engine, **keys) as server, ExitStack() as ends:

        def version(client: httpx2.Client, key: str = "one") -> int:
            headers = {"authorization": f"Bearer {key}"}
            return client.get("/version", headers=headers).status_code

        clients = [ends.enter_context(httpx2.Client(base_url=server.address)) for _ in range(8)]
        assert [version(client) for client in clients] == [200] * 8  # they stay open
        half_sent(server, ends, 4)
        late = ends.enter_context(httpx2.Client(base_url=server.address))
        assert_soon(lambda: version(late) == 503)
        assert version(clients[0]) == 200
        assert httpx2.get(f"{server.address}/health").status_code == 200


def test_a_wrong_key_does_not_make_a_connection_valid(engine: AsyncEngine) -> None:
    keys = {"api_key": ("one",), "max_connections": 64, "max_pending_connections": 2}
    with RunningServer(engine, **keys) as server, ExitStack() as ends:
        for _ in range(2):
            client = ends.enter_context(httpx2.Client(base_url=server.address))
            assert client.get("/version").status_code == 401
            assert client.get("/health").status_code == 200
        late = ends.enter_context(httpx2.Client(base_url=server.address))
        headers = {"authorization": "Bearer one"}
        assert late.get("/version", headers=headers).status_code == 503


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:9::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"),
    ],
)
def test_the_network_of_a_client(host: str, network: str) -> None:
    assert network_of(host) == network


def test_connections_are_counted_down() -> None:
    limits = ConnectionLimits(4)
    assert [limits.open("a") for _ in range(3)] == [True, True, False]
    assert limits.open("b") and limits.open("b") and not limits.open("c")
    limits.admit("a")
    limits.close()
    assert limits.open("a") and not limits.open("a")
    limits.close()
    assert limits.open(None) and not limits.open(None)


# Keys and headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "one"}, 200),
        ({"X-Api-Key": "two"}, 200),
        ({"x-api-key": "no"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "one", "authorization": "Bearer"}, 200),
        ({"x-api-key": "one", "authorization": "Bearer no"}, 401),
        ({"x-api-key": "no", "authorization": "Bearer one"}, 200),
    ],
)
def test_x_api_key_is_a_key(headers: dict[str, str], status: int, keyed: RunningServer) -> None:
    answer = httpx2.get(f"{keyed.address}/version", headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert "x-api-key: KEY" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/metrics", 200),
        ("GET", "/kv", 200),
        ("GET", "/openapi.json", 200),
        ("GET", "/nothing", 404),
        ("PUT", "/version", 405),
        ("POST", "/v1/completions", 400),
    ],
)
def test_every_response_has_nosniff(
    method: str, path: str, status: int, server: RunningServer
) -> None:
    answer = httpx2.request(method, f"{server.address}{path}")
    assert answer.status_code == status
    assert answer.headers.get_list("x-content-type-options") == ["nosniff"]


def test_so_have_responses_outside_of_the_application(
    engine: AsyncEngine, keyed: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = httpx2.get(f"{keyed.address}/version")
    assert refused.status_code == 401 and refused.headers["x-content-type-options"] == "nosniff"
    (answer,) = answers_to(keyed, b"nonsense\r\n\r\n")
    assert b"x-content-type-options: nosniff" in answer.lower()
    stream: Callable[[Any], Any] = lambda body: httpx2.post(  # noqa: E731
        f"{keyed.address}/v1/completions", json=body, headers={"x-api-key": "one"}
    )
    assert stream({**GOOD, "stream": True}).headers["x-content-type-options"] == "nosniff"

    def failing() -> None:
        raise RuntimeError("a defect")

    with RunningServer(engine, max_connections=1, header_timeout=0.2) as small:
        monkeypatch.setattr(engine, "check_health", failing)
        broken = httpx2.get(f"{small.address}/health")
        assert broken.status_code == 500 and broken.headers["x-content-type-options"] == "nosniff"
        with small.connect(), small.connect() as extra:
            assert b"x-content-type-options: nosniff" in rest_of(extra).lower()
