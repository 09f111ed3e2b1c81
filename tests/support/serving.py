"""A server in this process: a small model behind the real application, and clients for it."""

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx2
from fastapi import FastAPI

from pyengine.async_engine import AsyncEngine
from pyengine.outputs import RequestOutput
from pyengine.sampling_params import SamplingParams
from pyengine.server.app import create_app
from pyengine.server.lifetime import address_of, listening, make_server
from pyengine.server.settings import ServerSettings
from tests.support import chat
from tests.support.checkpoints import save_tiny
from tests.support.tokenizers import save_tokenizer

MAX_MODEL_LEN = 1024
GOOD = {"prompt": [5, 6], "max_tokens": 2, "temperature": 0}


def save_small_model(folder: Path, template: str = chat.CHATML, **settings: Any) -> Path:
    """A model of a few kilobytes with a byte-level tokenizer of 300 tokens."""
    given = {"max_position_embeddings": MAX_MODEL_LEN, **settings}
    # 0 is <|end|> of the tokenizer
    save_tiny(folder, vocab_size=chat.VOCAB_SIZE, eos_token_id=0, **given)
    save_tokenizer(folder, chat.chat_tokenizer(template))
    return folder


def open_small_engine(folder: Path, **settings: Any) -> AsyncEngine:
    return AsyncEngine(folder, **{"device": "cpu", "block_size": 16, "num_blocks": 512, **settings})


class Client:
    """Calls an application as clients do, without sockets. Everything is over when a call is."""

    def __init__(self, app: FastAPI, root_path: str = "") -> None:
        self.app = app
        self._root_path = root_path

    @property
    def context(self) -> Any:
        return self.app.state.context

    def open(self) -> httpx2.AsyncClient:
        """A client for calls from an event loop."""
        transport = httpx2.ASGITransport(
            self.app, raise_app_exceptions=False, root_path=self._root_path
        )
        return httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=60)

    def run(self, use: Callable[[httpx2.AsyncClient], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            async with self.open() as client:
                return await use(client)

        return asyncio.run(main())

    def get(self, path: str, **options: Any) -> httpx2.Response:
        response: httpx2.Response = self.run(lambda client: client.get(path, **options))
        return response

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        response: httpx2.Response = self.run(lambda client: client.post(path, json=body, **options))
        return response

    def send(self, path: str, content: bytes, **headers: str) -> httpx2.Response:
        """A body as it is, as JSON."""
        headers = {"content-type": "application/json", **headers}
        response: httpx2.Response = self.run(
            lambda client: client.post(path, content=content, headers=headers)
        )
        return response

    def answer(self, path: str, body: Any) -> Any:
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, prompt: Any, **fields: Any) -> Any:
        return self.answer("/v1/completions", {"prompt": prompt, **fields})

    def chat(self, messages: Any, **fields: Any) -> Any:
        return self.answer("/v1/chat/completions", {"messages": messages, **fields})

    def events(self, path: str, body: Any) -> list[Any]:
        """The items of a stream; the last line has been checked."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response.text)

    def refusal(self, path: str, body: Any, status: int = 400) -> Any:
        """The error of a request that is not served."""
        return error_of(self.post(path, body), status)


def events_of(text: str) -> list[Any]:
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""], parts[-3:]
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def error_of(response: httpx2.Response, status: int = 400) -> Any:
    """The error of an answer, whose shape has been checked."""
    assert response.status_code == status, response.text
    (name,) = response.json()
    error = response.json()[name]
    assert name == "error" and sorted(error) == ["code", "message", "param", "type"]
    assert error["message"] and error["type"]
    return error


def alone(engine: AsyncEngine, prompt: Any, params: SamplingParams) -> RequestOutput:
    """The output of the engine itself."""

    async def main() -> RequestOutput:
        return [item async for item in engine.generate(prompt, params)][-1]

    return asyncio.run(main())


def make_client(engine: AsyncEngine, **settings: Any) -> Client:
    return Client(create_app(engine, ServerSettings(**settings)))


def assert_nothing_runs(engine: AsyncEngine) -> None:
    """Aborted requests are removed between two steps: soon, and completely."""
    end = monotonic() + 60
    while True:
        stats = engine.stats()
        left = (stats.num_running, stats.num_waiting, stats.usage.active, stats.usage.pinned)
        if left == (0, 0, 0, 0):
            return
        assert monotonic() < end, stats
        sleep(0.005)


def assert_soon(holds: Any, seconds: float = 20) -> None:
    end = monotonic() + seconds
    while not holds():
        assert monotonic() < end
        sleep(0.01)


class RunningServer:
    """A server in a thread of this process."""

    def __init__(
        self, engine: AsyncEngine, *, send_buffer: int | None = None, **settings: Any
    ) -> None:
        self.engine = engine
        self._send_buffer = send_buffer
        self.settings = ServerSettings(**{"port": 0, "drain_timeout": 30.0, **settings})
        self._is_up = threading.Event()
        self._server = make_server(engine, self.settings, self._is_up.set)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with listening(self.settings) as bound:
            if self._send_buffer is not None:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer)
            self.address = address_of(self.settings, bound)
            self.where: Any = bound.getsockname()
            self._server.run(sockets=[bound])

    def __enter__(self) -> "RunningServer":
        self._thread.start()
        assert self._is_up.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        """Without a drain, which would be one of the engine, too."""
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def signal(self) -> None:
        self._server.handle_exit(signal.SIGTERM)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.where)

    def is_well(self) -> None:
        """It is healthy, and its answers are right; soon, as the time limits here are short."""

        def answers() -> bool:
            try:
                health = httpx2.get(f"{self.address}/health")
                answer = httpx2.post(f"{self.address}/v1/completions", json=GOOD)
            except httpx2.TransportError:
                return False
            if (health.status_code, answer.status_code) != (200, 200):
                return False
            return bool(answer.json()["usage"]["completion_tokens"] == 2)

        assert_soon(answers)
