"""Keys, origins and limits: requests are refused early, and the server keeps working."""

import asyncio
import base64
import hmac
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from fastapi.routing import APIRoute

from pyengine.core import EngineDeadError, RequestFailedError
from pyengine.engine import AsyncEngine
from pyengine.server import app as application
from tests.support.serving import (
    Client,
    error_of,
    make_client,
    open_small_engine,
    save_small_model,
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


@pytest.fixture
def guarded(engine: AsyncEngine) -> Client:
    return make_client(engine, api_key=("one",), admin_key=("two",), cors_origin=("http://page",))


def routes(client: Client) -> list[tuple[str, str]]:
    paths = client.get("/openapi.json", headers=KEY).json()["paths"]
    return [(method, path) for path, methods in paths.items() for method in methods] + [
        ("get", "/openapi.json"),
        ("get", "/kv/stream"),
        ("get", "/not/there"),
    ]


def test_every_route_but_health_needs_a_key(guarded: Client) -> None:
    several = routes(guarded)
    assert len(several) > 10
    for method, path in several:
        response = guarded.run(lambda http, m=method, p=path: http.request(m, p))
        if path == "/health":
            assert response.status_code == 200
            continue
        error = error_of(response, 401)
        assert error["code"] == "invalid_api_key" and error["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path", ["/healthz", "/health/", "/health/x", "/healthmetrics", "/HEALTH", "/health%2F..%2Fkv"]
)
def test_a_path_that_begins_like_health_needs_a_key(path: str, guarded: Client) -> None:
    error_of(guarded.get(path), 401)


@pytest.mark.parametrize("key", ["Bearer one", "Bearer two", "bearer two", "BEARER  one"])
def test_each_key_is_good(key: str, guarded: Client) -> None:
    response = guarded.post(COMPLETIONS, GOOD, headers={"authorization": key})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "key",
    ["", "Bearer", "Bearer ", "Bearer on", "Bearer onetwo", "Basic one", "one", "Bearer \xff"],
)
def test_no_other_is(key: str, guarded: Client) -> None:
    response = guarded.post(COMPLETIONS, GOOD, headers=[("authorization", key.encode("latin-1"))])
    assert response.status_code == 401


def test_every_key_is_compared_whole(guarded: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bytes, bytes]] = []
    plain = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: seen.append((a, b)) or plain(a, b))
    guarded.get("/version", headers=KEY)
    assert seen == [(b"one", b"one"), (b"one", b"two")]


def password(text: bytes, kind: str = "Basic") -> dict[str, str]:
    return {"authorization": f"{kind} {base64.b64encode(text).decode()}"}


def test_browsers_ask_for_the_key_of_the_page(guarded: Client) -> None:
    response = guarded.get("/kv")
    assert "as the password" in error_of(response, 401)["message"]
    assert response.headers["www-authenticate"].startswith("Basic realm=")
    for headers in (password(b"anybody:two"), password(b":two", "basic"), ADMIN):
        assert guarded.get("/kv", headers=headers).text.startswith("<!doctype html>")
    for wrong in (password(b"two:"), password(b"two"), {"authorization": "Basic ~~~"}):
        assert guarded.get("/kv", headers=wrong).status_code == 401


def test_a_password_opens_nothing_but_the_page(guarded: Client) -> None:
    """Browsers send it by themselves, whoever has made them ask."""
    good = password(b":two")
    for path in ("/version", "/metrics", "/kv/", "/v1/models"):
        assert guarded.get(path, headers=good).status_code == 401
    assert guarded.post(COMPLETIONS, GOOD, headers=good).status_code == 401


def test_without_keys_an_empty_one_does_no_harm(client: Client) -> None:
    """As lm-eval sends it."""
    response = client.post(COMPLETIONS, GOOD, headers={"authorization": "Bearer "})
    assert response.status_code == 200


def test_a_browser_may_ask_before_it_has_a_key(guarded: Client) -> None:
    asks = {"origin": "http://page", "access-control-request-method": "POST"}
    response = guarded.run(lambda http: http.options(COMPLETIONS, headers=asks))
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "http://page"
    response = guarded.get("/version", headers={"origin": "http://page"})
    assert response.headers["access-control-allow-origin"] == "http://page"
    response = guarded.get("/version", headers={"origin": "http://elsewhere"})
    assert "access-control-allow-origin" not in response.headers


def test_keys_part_the_cache(engine: AsyncEngine) -> None:
    client = make_client(engine, api_key=("one", "two"))
    body = {"prompt": [31, 32, 33] * 20, "max_tokens": 1}

    def cached(key: str, **fields: Any) -> int:
        headers = {"authorization": f"Bearer {key}"}
        response = client.post(COMPLETIONS, {**body, **fields}, headers=headers)
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("one") == 0
    assert cached("one") == 48
    assert cached("two") == 0
    assert cached("one", cache_salt="x") == 0
    assert cached("two", cache_salt="x") == 0
    assert cached("two", cache_salt="x") == 48


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 1025}, "1025"),
        ({"n": 10**9}, "1000000000"),
        ({"n": 16, "prompt": [[5]] * 65}, "at most 1024 in all"),
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
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    """One runs, one waits, the next is one too many."""
    folder = save_small_model(tmp_path_factory.mktemp("narrow"))
    with open_small_engine(folder, max_num_seqs=1, max_num_waiting=1) as engine:
        yield engine


def test_a_full_queue_says_when_to_come_again(narrow: AsyncEngine) -> None:
    client = make_client(narrow)

    async def use(http: httpx2.AsyncClient) -> Any:
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
        return [*ended, third, batch, later]

    first, second, third, batch, later = client.run(use)
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.json()["choices"][0]["finish_reason"] == "abort"
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


def test_an_engine_that_is_dead_is_not_healthy(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(*_: Any) -> None:
        raise EngineDeadError("the device failed")

    monkeypatch.setattr(client.context.engine, "check_health", dead)
    monkeypatch.setattr(client.context.engine, "submit", dead)
    for response in (client.get("/health"), client.get("/ping"), client.post(COMPLETIONS, GOOD)):
        assert error_of(response, 503)["code"] == "engine_dead"


def test_a_request_on_which_the_model_fails(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, submit = client.context.engine, client.context.engine.submit

    def failing(requests: Any) -> Any:
        stream = submit(requests)
        requests[0].sink.fail(RequestFailedError("the model failed on it"))
        return stream

    monkeypatch.setattr(engine, "submit", failing)
    error = error_of(client.post(COMPLETIONS, LONG), 500)
    assert (error["message"], error["type"]) == ("the model failed on it", "server_error")
    response = client.post(COMPLETIONS, {**LONG, "stream": True})
    assert response.status_code == 200
    *_, last, done, _ = response.text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the model failed on it"
    assert done == "data: [DONE]"


def test_a_defect_is_told_to_the_log_alone(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(client.context.engine, "submit", broken)
    error = error_of(client.post(COMPLETIONS, GOOD), 500)
    assert "secret" not in error["message"]
    assert "a secret" in caplog.text


async def until_live(client: Client, count: int) -> list[str]:
    """Wait for calls; their names."""
    while len(client.context.live) < count:
        await asyncio.sleep(0.001)
    return list(client.context.live)


@pytest.mark.parametrize("prompt", [[5, 6], [[5, 6], [7, 8]]])
def test_calls_of_one_trace_have_one_id(prompt: Any, client: Client) -> None:
    async def use(http: httpx2.AsyncClient) -> Any:
        headers = {"x-request-id": "trace"}
        body = {**LONG, "prompt": prompt}
        calls = [http.post(COMPLETIONS, json=body, headers=headers) for _ in range(4)]
        calls.append(http.post(CHAT, json={**CHATTING, "request_id": "trace"}, headers=headers))
        tasks = [asyncio.create_task(call) for call in calls]
        await until_live(client, 5)
        aborted = await http.post("/abort_requests", json={"request_ids": ["trace", "yours"]})
        assert aborted.json() == {"aborted": ["trace"]}
        return await asyncio.gather(*tasks)

    answers = client.run(use)
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-request-id"] for answer in answers} == {"trace"}
    assert len({answer.json()["id"] for answer in answers}) == 5
    ends = {choice["finish_reason"] for answer in answers for choice in answer.json()["choices"]}
    assert ends == {"abort"}


@pytest.mark.parametrize(("path", "prefix"), [(COMPLETIONS, "cmpl-"), (CHAT, "chatcmpl-")])
def test_a_call_is_aborted_by_the_id_of_its_answer(path: str, prefix: str, client: Client) -> None:
    body = LONG if path == COMPLETIONS else CHATTING

    async def use(http: httpx2.AsyncClient) -> Any:
        several = [asyncio.create_task(http.post(path, json=body)) for _ in range(2)]
        first, second = await until_live(client, 2)
        for name in (first, second):
            asked = {"request_ids": [f"{prefix}{name}"]}
            assert (await http.post("/abort_requests", json=asked)).json()["aborted"]
        return await asyncio.gather(*several)

    for answer in client.run(use):
        assert answer.json()["choices"][0]["finish_reason"] == "abort"


def test_nobody_aborts_what_came_with_another_key(engine: AsyncEngine) -> None:
    client = make_client(engine, api_key=("one", "two"))

    async def use(http: httpx2.AsyncClient) -> Any:
        body = {**LONG, "request_id": "mine"}
        first = asyncio.create_task(http.post(COMPLETIONS, json=body, headers=KEY))
        await until_live(client, 1)
        answers = []
        for key in ("two", "one"):
            headers = {"authorization": f"Bearer {key}"}
            body = {"request_ids": ["mine"]}
            answers.append((await http.post("/abort_requests", json=body, headers=headers)).json())
        await first
        return answers

    assert client.run(use) == [{"aborted": []}, {"aborted": ["mine"]}]


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


def test_a_proxy_may_take_a_prefix_away(engine: AsyncEngine) -> None:
    app = make_client(engine, api_key=("one",)).app
    client = Client(app, root_path="/llm")
    for path in ("/health", "/llm/health"):
        assert client.get(path).status_code == 200
    for path in ("/version", "/llm/version"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers=KEY).status_code == 200
