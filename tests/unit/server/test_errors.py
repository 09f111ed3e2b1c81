"""Errors have the right status, OpenAI's format and a remedy, and the server keeps working."""

import json
from typing import Any

import pytest

from tests.support.serving import Client, error_of

COMPLETIONS = "/v1/completions"
GOOD = {"prompt": [5, 6], "max_tokens": 2, "temperature": 0}


@pytest.fixture(autouse=True)
def all_is_well_afterwards(client: Client) -> Any:
    before = client.complete(**GOOD)["choices"]
    yield
    assert client.get("/health").status_code == 200
    assert client.complete(**GOOD)["choices"] == before


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("guided_json", "structured_outputs"),
        ("max_new_tokens", "max_tokens"),
        ("temperatur", "temperature"),
        ("messages", "/v1/chat/completions"),
        ("xyzzy", "leave it out"),
        ("chat_template", "the model's template"),
        ("extra_body", "as fields"),
    ],
)
def test_an_unknown_field_is_named(name: str, hint: str, client: Client) -> None:
    error = client.refusal(COMPLETIONS, {**GOOD, name: 1})
    assert repr(name) in error["message"] and hint in error["message"]
    assert error["param"] == name and error["code"] == "unknown_parameter"


def test_an_unknown_field_within_another_is_named(client: Client) -> None:
    body = {**GOOD, "stream": True, "stream_options": {"usage": True}}
    assert client.refusal(COMPLETIONS, body)["param"] == "stream_options.usage"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"temperature": -1}, None, "temperature=-1"),
        ({"temperature": 1e999}, None, "temperature=inf"),
        ({"top_p": 3}, None, "top_p=3"),
        ({"n": 0}, None, "n=0"),
        ({"seed": 2**70}, None, "seed="),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"5": 1e999}}, None, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, None, "logit_bias=999999"),
        ({"stop": [5]}, "stop[0]", "valid string"),
        ({"stop": "x" * 1025}, "stop", "at most 1024 character"),
        ({"stop_token_ids": [-1]}, None, "stop_token_ids=-1"),
        ({"min_tokens": 5}, None, "min_tokens=5"),
        ({"prompt": []}, "prompt", "none may be empty"),
        ({"prompt": [[]]}, "prompt", "none may be empty"),
        ({"prompt": [5, "x"]}, "prompt", "none may be empty"),
        ({"prompt": 7}, "prompt", "none may be empty"),
        ({"prompt": None}, "prompt", "prompt is missing"),
        ({"logit_bias": {"05": 1, "5": 2}}, "logit_bias", "token ids"),
        ({"logit_bias": {"9" * 5000: 2}}, "logit_bias", "token ids"),
        ({"prompt": {"a": 1}}, "prompt", "none may be empty"),
        ({"prompt": ""}, None, "empty"),
        ({"prompt": [999999]}, None, "outside the vocabulary"),
        ({"prompt": [2**80]}, None, "outside of any vocabulary"),
        ({"prompt": [-1]}, None, "outside the vocabulary"),
        ({"prompt": [5] * 2000}, None, "2000 tokens"),
        ({"prompt": "x" * 200_000}, None, "200000 characters"),
        ({"stream_options": {}}, "stream_options", "stream: true"),
        ({"request_id": "a\nb"}, "request_id", "pattern"),
        ({"request_id": ""}, "request_id", "pattern"),
        ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
        ({"model": "gpt-9"}, "model", "unknown model"),
        ({"truncate_prompt_tokens": 0}, None, "truncate_prompt_tokens=0"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else None,
)
def test_a_value_that_cannot_be_served_is_named(
    fields: Any, param: str | None, words: str, client: Client
) -> None:
    content = json.dumps({**GOOD, **fields}).replace("Infinity", "1e999")
    status = 404 if "model" in fields else 400
    error = error_of(client.send(COMPLETIONS, content.encode()), status)
    assert words in error["message"], error
    assert error["param"] == param or (param == "prompt" and error["param"].startswith("prompt"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a JSON object"),
        (b"{", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"7", "not a JSON object"),
        (b'"x"', "not a JSON object"),
        (b'{"prompt": [5], "temperature": NaN}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": ' + b"[" * 5_000 + b"]" * 5_000 + b"}", "recursion limit"),
        (b'{"prompt": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b"{}", "prompt is missing"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_body_that_is_none(content: bytes, words: str, client: Client) -> None:
    assert words in error_of(client.send(COMPLETIONS, content))["message"]


def test_a_form_is_no_json(client: Client) -> None:
    response = client.run(lambda http: http.post(COMPLETIONS, data={"prompt": "x"}))
    assert "content-type: application/json" in error_of(response)["message"]


def test_routes_that_are_not_there(client: Client) -> None:
    assert "/v2" in error_of(client.get("/v2/completions"), 404)["message"]
    response = client.get(COMPLETIONS)
    assert "GET" in error_of(response, 405)["message"]
    assert response.headers["allow"] == "POST"
