"""`cache_control` on messages and parts: the prompt up to the mark is pinned, within the quota."""

from typing import Any

import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.errors import InvalidRequestError
from pyengine.server.routes.cache_control import (
    CacheMark,
    cache_marks,
    pinned_prefixes,
    seconds_of,
)
from tests.support.serving import Client, assert_soon, make_client

CHAT = "/v1/chat/completions"
HEADER = "x-pyengine-ignored"
MARK = {"type": "ephemeral", "ttl": "2s"}
SYSTEM = "You answer briefly. " * 4


def body(mark: Any, *, part: bool = True) -> dict[str, Any]:
    system: dict[str, Any] = {"role": "system", "content": [{"type": "text", "text": SYSTEM}]}
    (system["content"][0] if part else system)["cache_control"] = mark
    messages = [system, {"role": "user", "content": "Hello"}]
    return {"messages": messages, "max_tokens": 1, "temperature": 0}


def chat(client: Client, body_fields: Any, **more: Any) -> Any:
    return client.post(CHAT, body_fields, **more)


def pinned(engine: AsyncEngine) -> int:
    return engine.stats().usage.pinned


@pytest.mark.parametrize("part", [True, False])
def test_a_marked_prefix_is_pinned_until_its_end(
    part: bool, client: Client, engine: AsyncEngine
) -> None:
    response = chat(client, body(MARK, part=part))
    assert response.status_code == 200, response.text
    assert HEADER not in response.headers
    num_tokens = response.json()["usage"]["prompt_tokens"]
    assert 0 < pinned(engine) <= num_tokens // 16
    text_end = len("<|im_start|>system\n" + SYSTEM) - 20  # at most; a token is a byte
    assert pinned(engine) >= text_end // 16
    assert_soon(lambda: pinned(engine) == 0)


@pytest.mark.parametrize(
    "mark",
    [{}, {"type": "forever"}, {"type": "ephemeral", "ttl": "soon"}, "ephemeral", {**MARK, "x": 1}],
)
def test_a_mark_of_another_form_is_named_as_ignored(
    mark: Any, client: Client, engine: AsyncEngine
) -> None:
    response = chat(client, body(mark))
    assert response.headers[HEADER] == "messages.content.cache_control"
    assert pinned(engine) == 0


def test_keys_have_equal_parts_of_the_quota(engine: AsyncEngine) -> None:
    client = make_client(engine, api_key=("one", "two"))
    limit = engine.max_pinned_blocks // 2
    long = body(MARK)
    for letter in "abcdefghijklmnop":
        long["messages"][0]["content"][0]["text"] = letter * 500
        response = chat(client, long, headers={"authorization": "Bearer one"})
        assert response.status_code == 200, "a refused pin does not fail its request"
        assert pinned(engine) <= limit
    details = response.json()["usage"]["prompt_tokens_details"]
    assert f"of its {limit} blocks: release one, wait for its end" in details["pin_refused"]
    assert pinned(engine) > limit - 500 // 16 - 2
    before = pinned(engine)
    of_two = chat(client, long, headers={"authorization": "Bearer two"}).json()["usage"]
    assert "pin_refused" not in of_two["prompt_tokens_details"]
    assert pinned(engine) > before


def test_a_priority_keeps_a_request(client: Client, engine: AsyncEngine) -> None:
    request_body = {**body(None), "cache_priority": 3}
    del request_body["messages"][0]["content"][0]["cache_control"]
    assert chat(client, request_body).status_code == 200
    assert pinned(engine) > 0
    engine._engine_loop.enqueue(lambda: engine._pins.give_way(512))
    assert_soon(lambda: pinned(engine) == 0)


@pytest.mark.parametrize(
    ("ttl", "seconds"), [("5m", 300), ("1h", 3600), ("30s", 30), ("9h", 3600), (None, 300)]
)
def test_times(ttl: str | None, seconds: float) -> None:
    assert seconds_of({"type": "ephemeral", "ttl": ttl}) == seconds


@pytest.mark.parametrize("ttl", ["0m", "m", "-5m", "5", 5, "5d", "5m ", "99999s", ["5m"]])
def test_times_of_another_form(ttl: Any) -> None:
    assert seconds_of({"type": "ephemeral", "ttl": ttl}) is None


def test_marks_are_found_in_order() -> None:
    part = {"type": "text", "text": "x"}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [part, {**part, "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "y", "cache_control": MARK},
        {"role": "user", "content": None, "cache_control": None},
    ]
    assert cache_marks(messages) == [CacheMark(0, 1, 300), CacheMark(1, None, 2)]


def test_a_prefix_is_what_both_conversations_begin_with() -> None:
    def render(messages: Any) -> list[int]:
        if len(messages) == 1:
            raise InvalidRequestError("the template wants two")
        return [ord(letter) for message in messages for letter in message["content"]] + [-1]

    messages = [{"content": "ab"}, {"content": "cd"}, {"content": "ef"}]
    marks = [CacheMark(0, None, 1), CacheMark(1, None, 2), CacheMark(2, None, 3)]
    whole = [*map(ord, "abcdef"), -2]
    assert pinned_prefixes(messages, marks, whole, render) == [(4, 2), (6, 3)]


def test_the_last_four_marks_count() -> None:
    marks = [CacheMark(0, None, at) for at in range(9)]
    prefixes = pinned_prefixes([{"content": "a"}], marks, [1], lambda _: [1])
    assert [seconds for _, seconds in prefixes] == [5, 6, 7, 8]
