"""Connections, headers and bodies that are too many at once, on a real server."""

import contextlib
import json
import resource
import socket
import time
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.server import lifetime
from pyengine.server.lifetime import descriptors_for
from pyengine.server.settings import ServerSettings
from tests.integration.test_server_sockets import request_of, rest_of
from tests.support.serving import (
    GOOD,
    RunningServer,
    assert_soon,
)


def error_in(answer: bytes) -> tuple[int, str, bytes]:
    """Status, code and head of an answer that was refused."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head[9:12]), json.loads(body)["error"]["code"], head.lower()


def test_headers_must_come_in_ten_seconds_and_bodies_in_sixty() -> None:
    settings = ServerSettings()
    assert (settings.header_timeout, settings.body_timeout) == (10, 60)


def test_half_sent_headers_end_soon_and_a_body_may_take_longer(engine: AsyncEngine) -> None:
    with RunningServer(engine, header_timeout=0.5, body_timeout=30) as server:
        whole = request_of(GOOD, connection="close")
        with server.connect() as slow, server.connect() as half:
            slow.sendall(whole[:-5])
            half.sendall(whole[:40])
            begin = time.monotonic()
            assert rest_of(half) == b""
            assert 0.4 < time.monotonic() - begin < 5
            time.sleep(0.5)
            slow.sendall(whole[-5:])
            assert rest_of(slow).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("size", [60_000, 70_000, 200_000])
def test_more_than_64_kib_of_headers_are_refused_however_they_come(
    size: int, engine: AsyncEngine
) -> None:
    # In several pieces, the parser cuts them off.
    expected = {b"200"} if size < 65_536 else {b"431", b"400", b""}
    with RunningServer(engine) as server:
        lines = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        many = b"".join([b"x%d: %b\r\n" % (place, b"y" * 92) for place in range(size // 100)])
        long = b"x: " + b"y" * size + b"\r\n"
        for headers in (many, long):
            with server.connect() as client:
                with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                    client.sendall(lines + headers + b"\r\n")
                answer = rest_of(client)
            assert answer[9:12] in expected
        server.is_well()


def test_one_connection_too_many(engine: AsyncEngine) -> None:
    limits = {"max_connections": 8, "max_pending_connections": 8, "header_timeout": 5}
    with RunningServer(engine, **limits) as server, ExitStack() as ends:
        for _ in range(8):
            ends.enter_context(server.connect())
        traffic = server._server._context.traffic
        assert_soon(lambda: traffic.num_connections == 8)
        for count in (1, 2):
            with server.connect() as extra:
                status, code, head = error_in(rest_of(extra))
            assert (status, code) == (503, "too_many_connections") and b"retry-after: 1" in head
            assert traffic.num_refused_connections == count
        server.is_well()  # once the idle ones were closed
        text = httpx2.get(f"{server.address}/metrics").text
        assert "pyengine:http_refused_connections_total" in text
        assert "pyengine:http_connections{" in text


def test_the_limit_of_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        assert descriptors_for(200) == 200
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 512
        assert descriptors_for(900) == 900
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 900 + 128
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_where_it_cannot_be_raised_fewer_are_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lifetime.resource, "getrlimit", lambda _: (256, 256))
    monkeypatch.setattr(lifetime.resource, "setrlimit", lambda *_: None)
    assert descriptors_for(1024) == 128
    assert "at most 128 connections, not 1024" in caplog.text


def test_bytes_in_flight_are_bounded_and_one_key_has_half(engine: AsyncEngine) -> None:
    """Bodies of 900 kB that never end, where 2 MiB are let in."""
    keys = {"api_key": ("one", "two"), "max_body_mib": 1.0, "max_inflight_mib": 2.0}
    with RunningServer(engine, **keys, body_timeout=20) as server, ExitStack() as ends:

        def send(key: str, count: int) -> socket.socket:
            client: socket.socket = ends.enter_context(server.connect())
            whole = request_of(GOOD | {"user": "x" * 900_000}, authorization=f"Bearer {key}")
            client.sendall(whole[:count])
            return client

        def is_busy(answer: Any) -> bool:
            code = answer.json().get("error", {}).get("code")
            return bool(
                answer.status_code == 503 and code == "busy" and answer.headers["retry-after"]
            )

        def post(key: str, size: int) -> Any:
            headers = {"authorization": f"Bearer {key}"}
            body = GOOD | {"user": "x" * size}
            return httpx2.post(f"{server.address}/v1/completions", json=body, headers=headers)

        held = send("one", 890_000)
        assert_soon(lambda: is_busy(post("one", 500_000)))
        assert post("one", 1000).status_code == 200
        assert post("two", 500_000).status_code == 200
        send("two", 890_000)
        assert_soon(lambda: is_busy(post("two", 500_000)))
        assert httpx2.get(f"{server.address}/health").status_code == 200
        held.close()
        assert_soon(lambda: post("one", 500_000).status_code == 200)


def test_a_queued_request_is_in_flight_no_more(engine: AsyncEngine) -> None:
    with RunningServer(engine, max_body_mib=1.0, max_inflight_mib=2.0) as server:
        long = {"max_tokens": 900, "ignore_eos": True, "stream": True, "user": "x" * 1_000_000}
        with ExitStack() as ends:
            for _ in range(6):
                client = ends.enter_context(server.connect())
                client.sendall(request_of(GOOD | long))
                client.settimeout(20)
                assert client.recv(100).startswith(b"HTTP/1.1 200")
