"""A real server on real sockets: slow, half-sent and vanished clients, floods, signals, drain."""

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.errors import ConfigurationError, InvalidRequestError, PyEngineError
from pyengine.server.lifetime import listening
from pyengine.server.settings import ServerSettings
from tests.support.docs import ROOT
from tests.support.processes import run_program
from tests.support.serving import (
    GOOD,
    RunningServer,
    assert_nothing_runs,
    assert_soon,
    open_small_engine,
)

LONG = {"prompt": [5, 6], "max_tokens": 300, "ignore_eos": True}
ENDLESS = {**LONG, "max_tokens": 1000}
"""With `slow_steps`, still runs when a test ends it."""
TIMEOUT = 0.5


@pytest.fixture(scope="module")
def server(engine: AsyncEngine) -> Iterator[RunningServer]:
    with RunningServer(
        engine, header_timeout=TIMEOUT, body_timeout=TIMEOUT, keep_alive=1
    ) as server:
        yield server


def request_of(body: Any, path: str = "/v1/completions", **headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(content)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def rest_of(client: socket.socket) -> bytes:
    """Bytes until the server closes the connection."""
    client.settimeout(20)
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    "first",
    [b"", b"POST", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"],
    ids=["nothing", "a word", "half"],
)
def test_headers_that_do_not_come_in_time(first: bytes, server: RunningServer) -> None:
    with server.connect() as client:
        client.sendall(first)
        started = time.monotonic()
        assert rest_of(client) == b""
        assert time.monotonic() - started < 10
    server.is_well()


def test_headers_a_byte_at_a_time(server: RunningServer) -> None:
    with server.connect() as client, pytest.raises(OSError):
        for _ in range(200):
            client.sendall(b"x")
            time.sleep(0.02)
    server.is_well()


def test_a_second_request_may_not_dawdle_either(server: RunningServer) -> None:
    with server.connect() as client:
        client.sendall(request_of(GOOD) + b"POST /v1/comp")
        assert rest_of(client).startswith(b"HTTP/1.1 200")
    server.is_well()


def test_a_body_that_does_not_come_in_time(server: RunningServer) -> None:
    whole = request_of(GOOD, connection="close")
    with server.connect() as client:
        client.sendall(whole[:-5])
        assert rest_of(client).startswith(b"HTTP/1.1 408")
    server.is_well()


def test_a_body_that_nobody_wants_is_not_read_for_ever(server: RunningServer) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n"
    )
    with server.connect() as client:
        client.sendall(head)
        started = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - started < 20:
                client.sendall(b"x" * 1000)
                time.sleep(0.01)
        assert time.monotonic() - started < 10
    server.is_well()


@pytest.mark.parametrize(
    "flood",
    [
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 100_000,
        b"GET / HTTP/1.1\r\nx: " + b"y" * 1_000_000,
        b"GET /" + b"y" * 1_000_000,
        b"\x16\x03\x01\x02\x00" * 1000,
        b"GET / HTTX/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
    ],
    ids=["many headers", "a long one", "a long path", "TLS", "no HTTP", "a negative length"],
)
def test_a_flood_is_cut_off(flood: bytes, server: RunningServer) -> None:
    with server.connect() as client:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            client.sendall(flood)
        found = rest_of(client)
        assert found == b"" or found.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
    server.is_well()


@pytest.mark.usefixtures("slow_steps")
def test_a_reader_that_never_reads_is_given_up(engine: AsyncEngine) -> None:
    body = {"prompt": [5], "n": 4, "max_tokens": 900, "ignore_eos": True, "stream": True}
    small = 4096
    with RunningServer(engine, body_timeout=TIMEOUT, send_buffer=small) as server:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, small)
            client.connect(server.where)
            client.sendall(request_of(body))
            assert_soon(lambda: server.engine.stats().num_running > 0)
            assert_nothing_runs(server.engine)
            found = rest_of(client)
            assert found.startswith(b"HTTP/1.1 200") and b"[DONE]" not in found
        server.is_well()


def misbehave(server: RunningServer, choice: random.Random) -> socket.socket | None:
    """A client that does something at random; its socket, if it stays."""
    client = server.connect()
    body = {**LONG, "stream": choice.random() < 0.5}
    whole = request_of(body)
    match choice.randrange(5):
        case 0:  # silent
            return client
        case 1:  # half a request, and gone
            client.sendall(whole[: choice.randrange(1, len(whole))])
        case 2:  # half a request, and there
            client.sendall(whole[: choice.randrange(1, len(whole))])
            return client
        case 3:  # a whole one, and gone
            client.sendall(whole)
        case 4:  # reads a little, and goes, the hard way
            client.sendall(whole)
            client.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                client.recv(100)
            linger = (1).to_bytes(4, sys.byteorder) + (0).to_bytes(4, sys.byteorder)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    client.close()
    return None


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def swarm(server: RunningServer, count: int, at_once: int) -> None:
    server.is_well()
    before = descriptors()
    choice = random.Random(count)
    for _ in range(count // at_once):
        staying = [misbehave(server, choice) for _ in range(at_once)]
        server.is_well()
        for client in staying:
            if client is not None:
                client.close()
    assert_nothing_runs(server.engine)
    server.is_well()
    assert_soon(lambda: descriptors() <= before)


def test_a_swarm_of_bad_clients_leaves_nothing(server: RunningServer) -> None:
    swarm(server, 60, 20)


@pytest.mark.soak
def test_a_thousand_bad_clients_leave_nothing(server: RunningServer) -> None:
    swarm(server, 1000, 100)


async def stream_of(client: httpx2.AsyncClient, address: str, body: Any) -> tuple[int, str]:
    """The status, and the reason why a stream ended."""
    async with client.stream(
        "POST", f"{address}/v1/completions", json={**body, "stream": True}
    ) as response:
        reason = ""
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    reason = choice["finish_reason"] or reason
        return response.status_code, reason


async def streams(address: str, during: Any, body: Any = LONG) -> list[Any]:
    """How 16 streams end; `during` is awaited while all of them run."""
    async with httpx2.AsyncClient(timeout=60) as client:
        tasks = [
            asyncio.create_task(stream_of(client, address, {**body, "seed": at}))
            for at in range(16)
        ]
        while (await client.get(f"{address}/load")).json()["num_running"] < 16:
            await asyncio.sleep(0.005)
        await during(client)
        return await asyncio.gather(*tasks)


async def come_late(client: httpx2.AsyncClient, address: str) -> None:
    """New requests to a draining server are refused with the reason."""
    while (await client.get(f"{address}/health")).status_code == 200:
        await asyncio.sleep(0.005)
    late = await client.post(f"{address}/v1/completions", json=GOOD)
    assert late.status_code == 503 and late.json()["error"]["code"] == "draining"


@pytest.mark.usefixtures("slow_steps")
def test_a_signal_lets_streams_end(small_model: Path) -> None:
    with open_small_engine(small_model) as engine, RunningServer(engine) as server:

        async def end(client: httpx2.AsyncClient) -> None:
            server.signal()
            await come_late(client, server.address)

        assert asyncio.run(streams(server.address, end)) == [(200, "length")] * 16


@pytest.mark.usefixtures("slow_steps")
def test_after_the_drain_time_what_runs_is_aborted(small_model: Path) -> None:
    with (
        open_small_engine(small_model) as engine,
        RunningServer(engine, drain_timeout=0.01) as server,
    ):

        async def end(_: Any) -> None:
            server.signal()

        assert asyncio.run(streams(server.address, end, ENDLESS)) == [(200, "abort")] * 16


@pytest.mark.usefixtures("slow_steps")
def test_a_second_signal_aborts(small_model: Path) -> None:
    with open_small_engine(small_model) as engine, RunningServer(engine) as server:

        async def end(_: Any) -> None:
            server.signal()
            await asyncio.sleep(0.02)
            server.signal()

        assert asyncio.run(streams(server.address, end, ENDLESS)) == [(200, "abort")] * 16


class Process:
    """`pyengine serve` in a separate process, whose steps are slow."""

    def __init__(self, folder: Path, *options: str) -> None:
        code = textwrap.dedent("""
            from pyengine.cli import main
            from tests.support.engines import slow_steps
            with slow_steps():
                main()
        """)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", str(folder), "--port", "0", *options],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stderr is not None
        lines = iter(self.process.stderr.readline, "")
        self.said = [next(lines, "")]
        while not self.said[-1].startswith("  store "):
            self.said.append(next(lines, ""))
            assert self.said[-1], self.said
        start = next(line for line in self.said if line.startswith("serving on "))
        self.address = start.removeprefix("serving on ").strip()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.slow
def test_a_process_ends_with_status_0(small_model: Path) -> None:
    with Process(small_model, "--device", "cpu", "--num-blocks", "2048") as server:
        assert "".join(server.said[-6:]) == (
            f"serving on {server.address}\n"
            f"  model   {small_model.name}: float32 on cpu\n"
            "  fits    32,768 tokens of KV; 256 sequences of up to 1,024 tokens at a time\n"
            "  access  programs of this machine, without a key\n"
            "  pages   /kv (the pool) and /metrics; /openapi.json (the API)\n"
            "  store   none: the KV cache ends with the server (--kv-cache-dir DIR keeps it)\n"
        )

        async def end(client: httpx2.AsyncClient) -> None:
            server.process.send_signal(signal.SIGTERM)
            await come_late(client, server.address)

        assert asyncio.run(streams(server.address, end)) == [(200, "length")] * 16
        assert server.process.wait(30) == 0


def test_forms_of_answers_are_made_ready_before_anybody_is_let_in(small_model: Path) -> None:
    """A tokenizer's tokens are read under the interpreter's lock, and nothing else goes on."""
    with open_small_engine(small_model) as engine, RunningServer(engine) as server:
        grammars = engine._input_processor.grammars
        assert grammars._vocabulary is not None
        assert_soon(lambda: len(grammars._idle) == 1)  # its process takes no lock
        body = {**GOOD, "structured_outputs": {"choice": ["a"]}}
        answer = httpx2.post(f"{server.address}/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == "a"


@pytest.mark.parametrize("error", [PyEngineError, InvalidRequestError])
def test_where_they_cannot_be_made_ready_others_are_served(
    error: type[Exception], engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing() -> None:
        raise error("no")

    monkeypatch.setattr(engine, "prepare_structured_outputs", failing)
    with RunningServer(engine) as server:
        server.is_well()


def test_an_address_that_is_taken() -> None:
    with listening(ServerSettings(port=0)) as listener:
        listener.listen()
        settings = ServerSettings(port=listener.getsockname()[1])
        with pytest.raises(ConfigurationError, match="Address already in use"):
            listening(settings).__enter__()
    with pytest.raises(ConfigurationError, match=r"no\.such\.host"):
        listening(ServerSettings(host="no.such.host.invalid")).__enter__()


def test_a_unix_socket(engine: AsyncEngine, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:  # whoever had it is gone
        stale.bind(str(path))
    with RunningServer(engine, uds=str(path)) as server:
        assert server.address == f"unix:{path}"
        with pytest.raises(ConfigurationError, match="Address already in use"):
            listening(server.settings).__enter__()
        transport = httpx2.HTTPTransport(uds=str(path))
        with httpx2.Client(transport=transport) as client:
            answer = client.post("http://server/v1/completions", json=GOOD)
            assert answer.json()["usage"]["completion_tokens"] == 2
    assert not path.exists()


@pytest.mark.parametrize(
    ("settings", "is_let_in"),
    [
        ({}, False),
        ({"insecure": True}, True),
        ({"api_key": ("one",)}, True),
        ({"admin_key": ("one",)}, True),
        ({"host": "localhost"}, True),
        ({"host": "127.0.0.2"}, True),
    ],
)
def test_other_machines_need_a_key_or_a_word(settings: Any, is_let_in: bool) -> None:
    opening = listening(ServerSettings(**{"host": "0.0.0.0", "port": 0, **settings}))
    if is_let_in:
        with opening:
            return
    with pytest.raises(ConfigurationError, match=r"give --api-key KEY, or --insecure"):
        opening.__enter__()


def test_a_path_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(ConfigurationError, match="Address already in use"):
        listening(ServerSettings(uds=str(path))).__enter__()
    assert path.read_text() == "mine"


def test_a_prefix_that_a_proxy_takes_away(engine: AsyncEngine) -> None:
    with RunningServer(engine, root_path="/llm") as server:
        assert server.address.endswith("/llm")
        host = server.address.removesuffix("/llm")
        assert httpx2.get(f"{host}/health").status_code == 200
        assert httpx2.get(f"{host}/v1/models").status_code == 200


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    asked = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=server"
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    run_program(["openssl", *asked.split(), *more])
    return cert, key


def test_https(engine: AsyncEngine, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    with RunningServer(engine, ssl_certfile=cert, ssl_keyfile=key) as server:
        assert server.address.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(cert))
        answer = httpx2.post(f"{server.address}/v1/completions", json=GOOD, verify=trusting).json()
        assert answer["usage"]["completion_tokens"] == 2
        with socket.create_connection(server.where) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert not rest_of(plain).startswith(b"HTTP/1.1 200")


def test_a_certificate_that_cannot_be_read(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    empty = tmp_path / "empty.pem"
    empty.touch()
    absent = tmp_path / "none.pem"
    for item, other in ((absent, key), (cert, absent), (empty, key), (cert, cert)):
        settings = ServerSettings(ssl_certfile=item, ssl_keyfile=other)
        with pytest.raises(ConfigurationError, match=r"cannot be read: .*give PEM files"):
            listening(settings).__enter__()
