"""Limits of fields and bodies, a full queue, and draining."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from pyengine.async_engine import AsyncEngine
from tests.support.serving import (
    Client,
    error_of,
    make_client,
    open_small_engine,
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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 1025}, "1025"),
        ({"n": 10**9}, "1000000000"),
        ({"n": 16, "prompt": [[5]] * 65}, "limit is 1024 in all"),
        ({"n": 300}, "max_num_seqs=256"),
        ({"prompt": ["x"] * 1025}, "at most 1,024"),
        ({"prompt": [[5]] * 1025}, "at most 1,024"),
        ({"stop": ["x"] * 33}, "at most 32"),
        ({"stop": "x" * 1025}, "at most 1024"),
        ({"stop_token_ids": [5] * 1025}, "at most 1024"),
        ({"bad_words": ["x"] * 1025}, "at most 1024"),
        ({"bad_words": ["x" * 1025]}, "at most 1024"),
        ({"allowed_token_ids": [5] * 1025}, "at most 1024"),
        ({"logit_bias": {f"{token}": 1 for token in range(1025)}}, "at most 1024"),
        ({"logprobs": 21}, "less than or equal to 20"),
        ({"logprobs": -1}, "greater than or equal to 0"),
        ({"prompt_logprobs": 21}, "less than or equal to 20"),
        ({"cache_salt": "x" * 1025}, "at most 1024"),
        ({"request_id": "x" * 201}, "pattern"),
        ({"best_of": 10**6}, "'best_of'"),
        ({"prompt_embeds": "gASVCgAAAAAAAACMBHBvc2l4lIwGc3lzdGVtlJOULg=="}, "'prompt_embeds'"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else None,
)
def test_what_is_too_much_is_refused_at_the_door(fields: Any, words: str, client: Client) -> None:
    assert words in client.refusal(COMPLETIONS, {**GOOD, **fields})["message"]
    assert client.get("/health").status_code == 200
    assert client.complete(**GOOD)["choices"]


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 21, "logprobs": True},
        {"messages": [{"role": "user", "content": "x"}] * 1025},
        {"messages": []},
        {"tools": [{"type": "function", "function": {"name": "f"}}] * 129},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"n": 1025},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}
                    ],
                }
            ]
        },
    ],
    ids=lambda value: repr(value)[:40],
)
def test_so_it_is_with_chats(fields: Any, client: Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields}
    assert client.refusal(CHAT, body)["message"]


def asgi(client: Client, path: str, parts: list[Any], **headers: str) -> tuple[list[Any], int]:
    """See `sent_to`."""
    return asyncio.run(sent_to(client, path, parts, **headers))


async def sent_to(
    client: Client, path: str, parts: list[Any], **headers: str
) -> tuple[list[Any], int]:
    """Send the parts of a body, one message each; what was sent back, and how many were taken.

    A part that is None is the client leaving, a number seconds of silence; "runs": silence until
    the engine is at it; ...: that was the whole body.
    """
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "server": ("server", 80),
        "client": ("client", 1),
        "headers": [
            (name.replace("_", "-").encode(), value.encode())
            for name, value in {"content_type": "application/json", **headers}.items()
        ],
    }
    sent: list[Any] = []
    left = list(parts)

    async def receive() -> Any:
        while left:
            part = left.pop(0)
            if part is None:
                left.append(None)
                return {"type": "http.disconnect"}
            if part is ...:
                continue
            if isinstance(part, bytes):
                return {"type": "http.request", "body": part, "more_body": left[:1] != [...]}
            if part == "runs":
                while not client.context.engine.stats().num_running:
                    await asyncio.sleep(0.001)
            else:
                await asyncio.sleep(part)
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    async with asyncio.timeout(30):
        await client.app(scope, receive, send)
    return sent, len(parts) - len(left)


def status_of(sent: list[Any]) -> int:
    return int(sent[0]["status"])


def test_a_body_that_says_it_is_too_large_is_not_read(engine: AsyncEngine) -> None:
    client = make_client(engine, max_body_mib=0.001)
    sent, taken = asgi(client, COMPLETIONS, [b"x"], content_length="1049")
    assert (status_of(sent), taken) == (413, 0)
    assert b"1048 bytes" in sent[1]["body"]
    sent, taken = asgi(client, COMPLETIONS, [b"x"], content_length="9" * 5000)
    assert (status_of(sent), taken) == (413, 0)


def test_a_body_is_read_no_further_than_the_limit(engine: AsyncEngine) -> None:
    client = make_client(engine, max_body_mib=0.001)
    sent, taken = asgi(client, COMPLETIONS, [b"x" * 400] * 1000)
    assert (status_of(sent), taken) == (413, 3)


@pytest.mark.parametrize("parts", [[5.0], [b"{", 5.0], [b"{"] + [0.02, b" "] * 100])
def test_a_body_that_comes_too_slowly(parts: list[Any], engine: AsyncEngine) -> None:
    client = make_client(engine, body_timeout=0.2)
    sent, _ = asgi(client, COMPLETIONS, parts)
    assert status_of(sent) == 408
    assert json.loads(sent[1]["body"])["error"]["code"] == "body_timeout"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("slow_steps")
def test_a_client_that_goes_ends_its_request(stream: bool, client: Client) -> None:
    body = json.dumps({**LONG, "stream": stream}).encode()
    sent, _ = asgi(client, COMPLETIONS, [body, ..., "runs", None])
    if stream:
        assert status_of(sent) == 200
        assert sent[-1].get("more_body", True)  # the response is incomplete
    else:
        assert status_of(sent) == 499
    assert client.context.live == {}


def test_a_client_that_goes_before_its_body_was_read(client: Client) -> None:
    sent, _ = asgi(client, COMPLETIONS, [b"{", None])
    assert not sent or status_of(sent) in (400, 499)


@pytest.fixture(scope="module")
def narrow(small_model: Path) -> Iterator[AsyncEngine]:
    """One runs, one waits, the next is one too many."""
    with open_small_engine(small_model, max_num_seqs=1, max_num_waiting=1) as engine:
        yield engine


@pytest.mark.usefixtures("slow_steps")
async def test_a_full_queue_says_when_to_come_again(narrow: AsyncEngine) -> None:
    client = make_client(narrow)
    async with client.open() as http:

        async def ask(body: Any) -> httpx2.Response:
            return await http.post(COMPLETIONS, json=body)

        first = asyncio.create_task(ask(LONG))
        while narrow.stats().num_running < 1:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(ask(GOOD))
        while narrow.stats().num_waiting < 1:
            await asyncio.sleep(0.001)
        third = await ask(GOOD)
        batch = await ask({**GOOD, "prompt": [[5], [6]]})
        unread, taken = await sent_to(client, COMPLETIONS, [b"{", b"}"])
        await narrow.abort(next(iter(client.context.live)))
        ended = [await first, await second]
        later = await ask({**GOOD, "prompt": [[5], [6]]})
    assert (status_of(unread), taken) == (503, 0)  # before its body was read
    assert [answer.status_code for answer in ended] == [200, 200]
    assert ended[0].json()["choices"][0]["finish_reason"] == "abort"
    assert error_of(third, 503)["code"] == "queue_full"
    assert int(third.headers["retry-after"]) >= 1
    assert error_of(batch, 503)["code"] == "queue_full"
    assert "max_num_waiting=1" in error_of(later, 400)["message"]


def test_while_it_drains_nothing_new_is_taken(client: Client) -> None:
    client.context.is_draining = True
    for path in (COMPLETIONS, CHAT):
        response = client.post(path, GOOD)
        assert error_of(response, 503)["code"] == "draining"
        assert "retry-after" in response.headers
    assert error_of(client.get("/health"), 503)["code"] == "draining"


@pytest.mark.parametrize(
    ("path", "fields", "numbers"),
    [
        (COMPLETIONS, {"prompt": [[5] * 20] * 4, "prompt_logprobs": 20}, "prompt_tokens=80, n=1"),
        (COMPLETIONS, {"prompt": [5] * 51, "echo": True, "logprobs": 20}, "prompt_tokens=51, n=1"),
        (COMPLETIONS, {"prompt": [5] * 51, "n": 20, "prompt_logprobs": 0}, "n=20"),
        (COMPLETIONS, {"prompt": [5] * 51, "n": 20, "echo": True}, "n=20"),
        (COMPLETIONS, {"prompt": [5] * 51, "n": 20, "return_token_ids": True}, "n=20"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 99}], "prompt_logprobs": 20}, "n=1"),
    ],
)
def test_log_probabilities_of_prompts_are_bounded(
    path: str, fields: Any, numbers: str, engine: AsyncEngine
) -> None:
    client = make_client(engine, max_prompt_logprobs=1000)
    error = client.refusal(path, {"max_tokens": 1, **fields})
    assert error["code"] == "too_many_logprobs" and numbers in error["message"]
    assert "limit is 1000 (--max-prompt-logprobs)" in error["message"]


def test_log_probabilities_within_the_bound_are_served(engine: AsyncEngine) -> None:
    client = make_client(engine, max_prompt_logprobs=1000, max_answer_logprobs=1000)
    few = {"prompt": [5] * 50, "echo": True, "logprobs": 20, "max_tokens": 1}
    assert client.complete(**few)["choices"]
    assert client.complete([[5] * 100] * 20, max_tokens=1, return_token_ids=True)["choices"]
    assert client.complete([5] * 500, n=20, max_tokens=1)["choices"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": [[5]] * 3, "n": 2, "max_tokens": 100, "logprobs": 4}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "n": 2}),
    ],
)
def test_log_probabilities_of_answers_are_bounded(
    path: str, fields: Any, engine: AsyncEngine
) -> None:
    error = make_client(engine, max_answer_logprobs=1000).refusal(path, fields)
    assert error["code"] == "too_many_logprobs" and "n=2, answer_tokens=" in error["message"]
    assert "limit is 1000 (--max-answer-logprobs)" in error["message"]
