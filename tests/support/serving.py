"""A server in this process: a small model behind the real application, and a client for it."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI

from pyengine.core.outputs import RequestOutput
from pyengine.core.sampling_params import SamplingParams
from pyengine.core.server_settings import ServerSettings
from pyengine.engine import AsyncEngine
from pyengine.server import create_app
from tests.support import chat
from tests.unit.models.tiny import save_tiny_model

MAX_MODEL_LEN = 1024


def save_small_model(folder: Path, template: str = chat.CHATML) -> Path:
    """A model of a few kilobytes with a byte-level tokenizer of 300 tokens."""
    save_tiny_model(
        folder, vocab_size=chat.VOCAB_SIZE, max_position_embeddings=MAX_MODEL_LEN, dtype="float32"
    )
    chat.chat_tokenizer(template).save_pretrained(folder)
    return folder


def open_small_engine(folder: Path, **settings: Any) -> AsyncEngine:
    return AsyncEngine(folder, **{"device": "cpu", "block_size": 16, "num_blocks": 512, **settings})


class Client:
    """Calls an application as clients do, without sockets. Everything is over when a call is."""

    def __init__(self, app: FastAPI, **options: Any) -> None:
        self.app = app
        self._options = options

    @property
    def context(self) -> Any:
        return self.app.state.context

    def run(self, use: Callable[[httpx2.AsyncClient], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            transport = httpx2.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://server", timeout=60, **self._options
            ) as client:
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
    """What the engine itself says, whole."""

    async def main() -> RequestOutput:
        return [item async for item in engine.generate(prompt, params)][-1]

    return asyncio.run(main())


def make_client(engine: AsyncEngine, **settings: Any) -> Client:
    return Client(create_app(engine, ServerSettings(**settings)))
