"""Answers of a given form over HTTP: by OpenAI's field and by vLLM's, streamed and not."""

import json
import re
from time import monotonic
from typing import Any

import pytest

from tests.support.serving import Client

USER = {"role": "user", "content": "Say something."}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PATHS = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "Say something."},
}
DRAWN = {"max_tokens": 300, "temperature": 1, "seed": 3}


def follows(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"a", "b"} and value["a"] in (True, False) and value["b"] in ("x", "y")


FORMS: dict[str, tuple[Any, Any]] = {
    "json_schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "it", "schema": SCHEMA, "strict": True},
            }
        },
        follows,
    ),
    "json": ({"structured_outputs": {"json": SCHEMA}}, follows),
    "json as text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, follows),
    "regex": (
        {"structured_outputs": {"regex": "[0-9]{3}-[a-c]"}},
        lambda text: re.fullmatch("[0-9]{3}-[a-c]", text),
    ),
    "choice": (
        {"structured_outputs": {"choice": ["yes", "no"]}},
        lambda text: text in ("yes", "no"),
    ),
    "grammar": (
        {"structured_outputs": {"grammar": 'start: "a" ("b" | "c")'}},
        lambda text: text in ("ab", "ac"),
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "holds"), FORMS.values(), ids=FORMS)
def test_the_answer_has_the_form(fields: Any, holds: Any, path: str, client: Client) -> None:
    answer = client.answer(path, {**PATHS[path], **DRAWN, **fields, "n": 2})
    for choice in answer["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert choice["finish_reason"] == "stop" and holds(text), text


def test_streamed_too(client: Client) -> None:
    fields, holds = FORMS["json_schema"]
    events = client.events("/v1/completions", {"prompt": "Say", **DRAWN, **fields})
    assert holds("".join(event["choices"][0]["text"] for event in events))


def test_plain_text_is_no_form(client: Client) -> None:
    body = {"prompt": "x", "temperature": 0, "max_tokens": 4}
    plain = client.answer("/v1/completions", body)
    text = client.answer("/v1/completions", {**body, "response_format": {"type": "text"}})
    assert text["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"structured_outputs": {}}, "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
        ({"structured_outputs": {"regex": "("}}, "regex"),
        ({"structured_outputs": {"yaml": "a"}}, "'structured_outputs.yaml'"),
        ({"structured_outputs": {"choice": ["x"] * 1025}}, "at most 1024"),
        ({"structured_outputs": {"json": {"type": "nonsense"}}}, "json"),
        ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "send one of them",
        ),
        ({"guided_json": SCHEMA}, "structured_outputs"),
    ],
)
def test_forms_that_cannot_be(fields: Any, words: str, client: Client) -> None:
    error = client.refusal("/v1/completions", {"prompt": "x", "max_tokens": 1, **fields})
    assert words in error["message"]


HOSTILE = {
    "nested repeats": {"regex": "((a{1,1000}b){1,1000}c){1,1000}"},
    "deep grammar": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "deep": {"regex": "(" * 20_000 + ")" * 20_000},
    "long": {"regex": "a" * 70_000},
    "nested": {"json": '{"anyOf": [' * 70 + "{}" + "]}" * 70},
}


@pytest.mark.parametrize("form", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_form_costs_nobody_else_anything(form: Any, client: Client) -> None:
    good = {"prompt": [5, 6], "max_tokens": 2, "temperature": 0}
    before = client.complete(**good)["choices"]
    started = monotonic()
    response = client.post("/v1/completions", {**good, "structured_outputs": form})
    assert response.status_code in (200, 400), response.text
    assert monotonic() - started < 20  # 2 seconds, on a machine that has nothing else to do
    assert client.get("/health").status_code == 200
    assert client.complete(**good)["choices"] == before
