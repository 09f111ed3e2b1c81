"""Observers of a whole server: /metrics, /kv and the log, and access to them."""

import asyncio
import json
from typing import Any

import httpx2
import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.errors import ConfigurationError
from pyengine.server.app import create_app
from pyengine.server.settings import ServerSettings
from tests.support.serving import Client, assert_soon, error_of, make_client

KEY = {"authorization": "Bearer one"}


def test_metrics_count_what_was_served(client: Client, engine: AsyncEngine) -> None:
    before = client.get("/metrics").text
    client.complete("one two three", max_tokens=5, ignore_eos=True, n=2)
    name = client.get("/v1/models").json()["data"][0]["id"]
    labels = f'{{engine="0",model_name="{name}"}}'

    def value(text: str, metric: str) -> float:
        [line] = [line for line in text.splitlines() if line.startswith(f"{metric}{labels}")]
        return float(line.split()[-1])

    def count(text: str) -> float:
        return value(text, "vllm:generation_tokens_total")

    # A step is counted when its answers have been given.
    assert_soon(lambda: count(client.get("/metrics").text) - count(before) == 10)
    after = client.get("/metrics").text
    assert value(after, "vllm:num_requests_running") == 0
    assert value(after, "pyengine:kv_committed_steps_total") == float(
        engine.stats().counters["committed_steps"]
    )
    [config] = [line for line in after.splitlines() if line.startswith("vllm:cache_config_info")]
    assert 'block_size="16"' in config and 'num_gpu_blocks="512"' in config


def test_whoever_looks_on_needs_a_key(engine: AsyncEngine) -> None:
    guarded = make_client(engine, api_key=("one",))
    for path in ("/kv", "/kv/stream", "/metrics", "/kv/", "/kv/other"):
        error_of(guarded.get(path), 401)
    for path in ("/kv", "/metrics"):
        assert guarded.get(path, headers=KEY).status_code == 200


@pytest.mark.parametrize("shows", [False, True])
async def test_prompts_are_shown_where_they_may_be(engine: AsyncEngine, shows: bool) -> None:
    app = create_app(engine, ServerSettings(show_prompts=shows))
    stream = app.state.observers.broadcaster.stream()
    body = {"prompt": "between you and me", "max_tokens": 900, "ignore_eos": True}
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def answer_again_and_again() -> None:  # one answer may end between two frames
            while True:
                await client.post("/v1/completions", json=body)

        call = asyncio.create_task(answer_again_and_again())
        async for event in stream:
            if '"running":1' in event:
                break
        call.cancel()
        await stream.aclose()
    await app.state.observers.close()
    assert ("BETWEEN" in event.upper()) is shows


async def test_pages_are_let_go_when_the_server_drains(engine: AsyncEngine) -> None:
    app = create_app(engine, ServerSettings())
    stream = app.state.observers.broadcaster.stream()
    for _ in range(2):
        await anext(stream)
    app.state.context.is_draining = True
    async with asyncio.timeout(2):
        async for _ in stream:
            pass


@pytest.mark.parametrize("format", ["json", "text", "none"])
async def test_requests_are_logged_while_the_server_is_up(
    engine: AsyncEngine, format: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    app = create_app(engine, ServerSettings(log_format=format))
    body = {"prompt": "never to be logged", "max_tokens": 3, "ignore_eos": True}
    transport = httpx2.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        await client.post("/v1/completions", json=body)
    lines = [line for line in capsys.readouterr().err.splitlines() if "prompt_tokens" in line]
    assert len(lines) == (format != "none")
    assert not [line for line in lines if "never" in line]
    if format == "json":
        assert json.loads(lines[0])["output_tokens"] == 3


def test_a_format_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="log_format='xml' is not known: use one of text,"):
        ServerSettings(log_format="xml")  # type: ignore[arg-type]
