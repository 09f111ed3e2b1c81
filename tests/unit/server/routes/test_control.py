"""Aborts, cache resets and the load."""

import asyncio
from typing import Any

import pytest
from fastapi.routing import APIRoute

from pyengine.async_engine import AsyncEngine
from pyengine.server import app as application
from tests.support.serving import (
    Client,
    make_client,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GOOD = {"prompt": [5, 6], "max_tokens": 2, "temperature": 0}
LONG = {"prompt": [5, 6], "max_tokens": 1000, "ignore_eos": True}
CHATTING = {
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 900,
    "ignore_eos": True,
}
KEY = {"authorization": "Bearer one"}
ADMIN = {"authorization": "Bearer two"}


async def until_live(client: Client, count: int) -> list[str]:
    """Wait for calls; their names."""
    while len(client.context.live) < count:
        await asyncio.sleep(0.001)
    return list(client.context.live)


@pytest.mark.parametrize("prompt", [[5, 6], [[5, 6], [7, 8]]])
@pytest.mark.usefixtures("slow_steps")
async def test_calls_of_one_trace_have_one_id(prompt: Any, client: Client) -> None:
    async with client.open() as http:
        headers = {"x-request-id": "trace"}
        body = {**LONG, "prompt": prompt}
        calls = [http.post(COMPLETIONS, json=body, headers=headers) for _ in range(4)]
        calls.append(http.post(CHAT, json={**CHATTING, "request_id": "trace"}, headers=headers))
        tasks = [asyncio.create_task(call) for call in calls]
        await until_live(client, 5)
        aborted = await http.post("/abort_requests", json={"request_ids": ["trace", "yours"]})
        assert aborted.json() == {"aborted": ["trace"]}
        answers = await asyncio.gather(*tasks)
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-request-id"] for answer in answers} == {"trace"}
    assert len({answer.json()["id"] for answer in answers}) == 5
    ends = {choice["finish_reason"] for answer in answers for choice in answer.json()["choices"]}
    assert ends == {"abort"}


@pytest.mark.parametrize(("path", "prefix"), [(COMPLETIONS, "cmpl-"), (CHAT, "chatcmpl-")])
@pytest.mark.usefixtures("slow_steps")
async def test_a_call_is_aborted_by_the_id_of_its_answer(
    path: str, prefix: str, client: Client
) -> None:
    body = LONG if path == COMPLETIONS else CHATTING
    async with client.open() as http:
        several = [asyncio.create_task(http.post(path, json=body)) for _ in range(2)]
        first, second = await until_live(client, 2)
        for name in (first, second):
            ids = {"request_ids": [f"{prefix}{name}"]}
            assert (await http.post("/abort_requests", json=ids)).json()["aborted"]
        for answer in await asyncio.gather(*several):
            assert answer.json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.usefixtures("slow_steps")
async def test_nobody_aborts_what_came_with_another_key(engine: AsyncEngine) -> None:
    client = make_client(engine, api_key=("one", "two"))
    async with client.open() as http:
        body = {**LONG, "request_id": "mine"}
        first = asyncio.create_task(http.post(COMPLETIONS, json=body, headers=KEY))
        await until_live(client, 1)
        answers = []
        for key in ("two", "one"):
            headers = {"authorization": f"Bearer {key}"}
            body = {"request_ids": ["mine"]}
            answers.append((await http.post("/abort_requests", json=body, headers=headers)).json())
        await first
    assert answers == [{"aborted": []}, {"aborted": ["mine"]}]


def test_all_routes_are_of_the_kind_that_reads_strict_json(client: Client) -> None:
    taking = [
        route
        for router in application._ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and route.body_field is not None
    ]
    assert len(taking) >= 5
    assert {type(route).__name__ for route in taking} == {"JsonRoute"}


def test_a_reset_has_the_cache_forgotten(engine: AsyncEngine) -> None:
    client = make_client(engine)
    prompt = [41, 42, 43] * 20

    def cached() -> int:
        usage = client.complete(prompt, max_tokens=1)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert (cached(), cached()) == (0, 48)
    assert client.post("/reset_prefix_cache", None).status_code == 200
    assert (cached(), cached()) == (0, 48)


def test_a_reset_leads_to_no_other_prompts(engine: AsyncEngine) -> None:
    """A client's salt may look like what a reset adds."""
    client = make_client(engine)
    prompt = [43, 44, 45] * 20

    def cached(salt: str | None) -> int:
        usage = client.complete(prompt, max_tokens=1, cache_salt=salt)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert (cached("1"), cached("1")) == (0, 48)
    assert client.post("/reset_prefix_cache", None).status_code == 200
    assert (cached(None), cached("1"), cached(None)) == (0, 0, 48)


def test_the_load_is_told(client: Client) -> None:
    assert client.get("/load").json() == {"server_load": 0, "num_running": 0, "num_waiting": 0}
