"""A hundred bodies that are cheap to send and dear to read delay no other client."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, sleep, thread_time
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.integration.test_server_sockets import Process, rest_of
from tests.support.serving import GOOD

SIZE = (4 << 20) - 1024
LONGEST_DELAY = 0.1
"""Seconds that a request may keep /health waiting, on a processor that takes `ORDINARY` seconds."""
ORDINARY = 0.015
"""Seconds for the sum of 300,000 squares. A processor that other machines share takes longer."""
FROZEN = 5.0
"""Seconds after which a test need not go on."""
ROUNDS = 3
"""Other programs of the machine delay answers, too, but not in each round."""


def allowed_delay() -> float:
    """`LONGEST_DELAY` as this processor is now."""

    def seconds() -> float:
        start = thread_time()
        assert sum(number * number for number in range(300_000)) > 0
        return thread_time() - start

    return LONGEST_DELAY * max(1.0, median(seconds() for _ in range(5)) / ORDINARY)


def filled(item: bytes, head: bytes = b'{"prompt":[', tail: bytes = b"]}") -> bytes:
    """A body of about 4 MiB of one item."""
    items = b",".join([item] * ((SIZE - len(head) - len(tail)) // (len(item) + 1)))
    return head + items + tail


def keys(count: int) -> bytes:
    return b",".join([b'"key%d":1' % place for place in range(count)])


HOSTILE: dict[str, Callable[[], bytes]] = {
    "objects": lambda: filled(b"{}"),
    "lists": lambda: filled(b"[]"),
    "lists of one": lambda: filled(b"[1]"),
    "nulls": lambda: filled(b"null"),
    "texts": lambda: filled(b'""'),
    "numbers": lambda: filled(b"1.5"),
    "long numbers": lambda: filled(b"9" * 4000),
    "objects with a field": lambda: filled(b'{"a":[1]}'),
    "messages": lambda: filled(b'{"role":5}', b'{"messages":['),
    "fields": lambda: b"{" + keys(300_000) + b"}",
    "fields of a field": lambda: b'{"stream_options":{' + keys(30_000) + b"}}",
    "few fields": lambda: b'{"stream_options":{' + keys(2_000) + b"}}",
    "biases": lambda: b'{"prompt":"x","logit_bias":{' + keys(2_000) + b"}}",
    "depth": lambda: b'{"prompt":' + b"[" * SIZE,
    "escapes": lambda: b'{"prompt":"' + rb"\"\\" * (SIZE // 4) + b'"}',
    "ids": lambda: filled(b"1234567"),
    "many ids": lambda: filled(b"1"),
    "long text": lambda: b'{"prompt":"' + b"x" * SIZE + b'"}',
    "a schema": lambda: (
        b'{"prompt":"x","response_format":{"type":"json_schema","json_schema":{"schema":{"enum":['
        + b",".join([b"1"] * 60_000)
        + b"]}}}}"
    ),
    "tools": lambda: filled(
        b'{"type":"function","function":{"name":5}}', b'{"messages":[{"role":"user"}],"tools":['
    ),
}


@pytest.fixture(scope="module")
def server(small_model: Path) -> Iterator[str]:
    with Process(
        small_model, "--device", "cpu", "--num-blocks", "512", "--log-format", "none"
    ) as process:
        _process_of[process.address] = process.process.pid
        yield process.address


_process_of: dict[str, int] = {}


def processor_time(address: str) -> float:
    """Seconds that a server has computed, in all of its threads."""
    text = Path(f"/proc/{_process_of[address]}/stat").read_text(encoding="utf-8")
    of_user, of_system = text.rpartition(")")[2].split()[11:13]
    return (int(of_user) + int(of_system)) / os.sysconf("SC_CLK_TCK")


def request_with(body: bytes, path: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        "connection: close",
        f"content-length: {len(body)}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Senders:
    """Threads that send bodies until each was answered with something but "come again"."""

    def __init__(self, address: str, bodies: list[tuple[str, bytes]]) -> None:
        parts = urlsplit(address)
        self._where = (parts.hostname, parts.port)
        self.statuses: list[int] = []
        self._is_over = False
        self._threads = [threading.Thread(target=self._send, args=body) for body in bodies]

    def _send(self, path: str, body: bytes) -> None:
        while not self._is_over:
            with socket.create_connection(self._where) as client:
                with suppress(BrokenPipeError, ConnectionResetError):  # refused before it is read
                    client.sendall(request_with(body, path))
                answer = rest_of(client)
            status = int(answer[9:12] or b"503")
            if status != 503:
                self.statuses.append(status)
                return
            sleep(0.05)

    def __enter__(self) -> "Senders":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True

    @property
    def are_at_work(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)


def longest_delay(address: str, bodies: list[tuple[str, bytes]]) -> tuple[float, list[int]]:
    """The most seconds that /health took while the bodies were sent; what they were answered.

    Of a request that other programs of the machine delay, the seconds that the server computed.
    """
    longest = 0.0
    with httpx2.Client(base_url=address, timeout=FROZEN) as prober, Senders(address, bodies) as all:
        prober.get("/health")
        end = monotonic() + 120
        while all.are_at_work:
            start, computed = perf_counter(), processor_time(address)
            assert prober.get("/health").status_code == 200
            delay = perf_counter() - start
            if delay > longest:
                longest = max(longest, min(delay, processor_time(address) - computed))
            assert monotonic() < end
            sleep(0.002)
    return longest, all.statuses


def shortest_of_rounds(address: str, bodies: list[tuple[str, bytes]]) -> float:
    delays = []
    for _ in range(ROUNDS):
        delay, statuses = longest_delay(address, bodies)
        assert len(statuses) == len(bodies) and set(statuses) <= {400, 413}
        delays.append(delay)
        if delay < allowed_delay():
            break
    return min(delays)


@pytest.mark.slow
def test_a_hundred_hostile_bodies_delay_nobody(server: str) -> None:
    paths = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
    made = [make() for make in HOSTILE.values()]
    bodies = [(paths[place % 4], body) for place, body in enumerate(made * 5)]
    assert len(bodies) == 100
    assert shortest_of_rounds(server, bodies) < allowed_delay()
    assert httpx2.post(f"{server}/v1/completions", json=GOOD).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_nor_does_one(name: str, server: str) -> None:
    body = HOSTILE[name]()
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert shortest_of_rounds(server, [(path, body)]) < allowed_delay()


def statuses(server: str, path: str, body: Any) -> int:
    return int(httpx2.post(f"{server}{path}", json=body, timeout=60).status_code)


@pytest.mark.slow
def test_what_is_long_and_good_is_served(server: str) -> None:
    """Punctuation in a text is no structure, however much of it there is."""
    text = '{"[,]}\\" ' * 100
    many = {"prompt": [[5, 6, 7] * 20] * 256, "max_tokens": 1}
    assert statuses(server, "/v1/completions", {**GOOD, "prompt": text}) == 200
    assert statuses(server, "/v1/completions", many) == 200
    conversation = [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 100
    assert statuses(server, "/tokenize", {"messages": conversation}) in (200, 400)


FLOODS = {
    "chunks": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n",
        b"1\r\n \r\n" * 20_000,
    ),
    "a large body that is refused": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n\r\n",
        b" " * 100_000,
    ),
    "requests": (b"", b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2000),
    "headers": (b"GET / HTTP/1.1\r\nhost: localhost\r\n", b"a:b\r\n" * 10_000),
    "extensions": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1",
        b";a=b" * 10_000,
    ),
}
NUM_FLOODING = {"requests": 8}
"""Connections, else 32. Each of these requests is served, so each takes its time."""


class Flood:
    """Connections that send something without an end, and are opened again if they are closed."""

    def __init__(self, address: str, name: str) -> None:
        parts, (head, item) = urlsplit(address), FLOODS[name]
        count = NUM_FLOODING.get(name, 32)
        self._where, self._head, self._item = (parts.hostname, parts.port), head, item
        self._is_over = False
        self._threads = [threading.Thread(target=self._send) for _ in range(count)]

    def _send(self) -> None:
        while not self._is_over:
            with suppress(OSError), socket.create_connection(self._where, timeout=1) as client:
                client.sendall(self._head)
                while not self._is_over:
                    client.sendall(self._item)
            sleep(0.01)

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()


def delays_of_health(address: str, seconds: float) -> list[float]:
    """Seconds that /health takes on connections of its own; at most those the server computes."""
    delays, end = [], monotonic() + seconds
    while monotonic() < end:
        start, computed = perf_counter(), processor_time(address)
        assert httpx2.get(f"{address}/health", timeout=FROZEN).status_code == 200
        delays.append(min(perf_counter() - start, processor_time(address) - computed))
        sleep(0.02)
    return delays


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_refused_requests_delays_nobody(name: str, server: str) -> None:
    for _ in range(ROUNDS):
        control = max(delays_of_health(server, 1))
        with Flood(server, name):
            longest = max(delays_of_health(server, 2))
        if longest < max(allowed_delay(), 2 * control):
            return
    raise AssertionError(f"/health took {longest:.3f} s, and {control:.3f} s without the flood")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_two_hundred_thousand_log_probabilities_delay_nobody(stream: bool, server: str) -> None:
    prompts = [[5 + (place + shift) % 200 for place in range(1000)] for shift in range(10)]
    body = {"prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": stream}
    answers: list[Any] = []

    def ask() -> None:
        answers.append(httpx2.post(f"{server}/v1/completions", json=body, timeout=120))

    for _ in range(ROUNDS):
        thread = threading.Thread(target=ask)
        thread.start()
        delays = []
        while thread.is_alive():
            delays += delays_of_health(server, 0.2)
        assert answers[-1].status_code == 200 and len(answers[-1].content) > 3_000_000
        if max(delays) < allowed_delay():
            return
    raise AssertionError(f"/health took {max(delays):.3f} s")
