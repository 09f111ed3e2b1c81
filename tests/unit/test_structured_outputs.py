"""The form of an answer: one field, of the right type, of bounded size; refused in words."""

import json
from typing import Any

import pytest

from pyengine.errors import InvalidRequestError
from pyengine.sampling_params import (
    MAX_FORMAT_BYTES,
    MAX_FORMAT_DEPTH,
    SamplingParams,
    StructuredOutputs,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ({"json": SCHEMA}, "json", json.dumps(SCHEMA)),
        ({"json": json.dumps(SCHEMA)}, "json", json.dumps(SCHEMA)),
        ({"json_object": True}, "json", '{"type": "object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["yes", "no"]}, "choice", '["yes", "no"]'),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
    ],
)
def test_what_is_compiled(value: dict[str, Any], kind: str, text: str) -> None:
    constraint = StructuredOutputs(**value)
    assert (constraint.field, constraint.kind, constraint.text) == (next(iter(value)), kind, text)
    assert hash(constraint) == hash(StructuredOutputs(**value))
    assert SamplingParams(structured_outputs=constraint).structured_outputs is constraint


def test_a_schema_that_the_caller_changes_later_stays_as_it_was() -> None:
    schema: dict[str, Any] = {"type": "object"}
    constraint = StructuredOutputs(json=schema)
    schema["type"] = "array"
    assert constraint.json == '{"type": "object"}'


def nested(depth: int, kind: str) -> str:
    return {
        "json": '{"items":' * depth + "{}" + "}" * depth,
        "list": '{"enum":' + "[" * depth + "]" * depth + "}",
    }[kind]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "structured_outputs has nothing: give exactly one of json, regex, choice"),
        ({"json": {}, "regex": "a"}, "structured_outputs has json and regex: give exactly one"),
        ({"json_object": False}, "structured_outputs.json_object=False is not allowed"),
        ({"json": "{"}, "structured_outputs.json is not JSON"),
        ({"json": "[]"}, "a JSON schema: an object, or its text"),
        ({"json": 3}, "structured_outputs.json=3 is not allowed"),
        ({"json": {"const": float("nan")}}, "structured_outputs.json is not JSON"),
        ({"json": {"const": {1}}}, "structured_outputs.json is not JSON"),
        ({"json": {"const": "\ud800"}}, None),
        ({"json": '{"const": "\ud800"}'}, "without surrogates"),
        ({"json": nested(MAX_FORMAT_DEPTH, "json")}, "more deeply than 64"),
        ({"json": nested(MAX_FORMAT_DEPTH, "list")}, "more deeply than 64"),
        ({"json": nested(6000, "json")}, "more deeply than 64"),
        ({"regex": ""}, "structured_outputs.regex=''"),
        ({"regex": b"a"}, "structured_outputs.regex=b'a'"),
        ({"regex": "a" * (MAX_FORMAT_BYTES + 1)}, "has 65537 bytes: at most 65536"),
        ({"regex": "a|" * 5_000_000}, "has 10000000 bytes: at most 65536"),
        ({"choice": "yes"}, "structured_outputs.choice='yes' is not allowed"),
        ({"choice": []}, "structured_outputs.choice has 0 texts"),
        ({"choice": ["a"] * 1025}, "structured_outputs.choice has 1025 texts"),
        ({"choice": ["a", ""]}, "structured_outputs.choice=''"),
        ({"choice": ["a" * 40_000, "b" * 40_000]}, "has 80000 bytes"),
    ],
)
def test_refusals_say_what_is_wrong(value: dict[str, Any], words: str | None) -> None:
    if words is None:  # json.dumps writes it as an escape, which is JSON
        StructuredOutputs(**value)
        return
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputs(**value)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


def test_sampling_params_take_nothing_else() -> None:
    with pytest.raises(InvalidRequestError, match="must be a StructuredOutputs"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_a_name_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidRequestError, match="'choices': did you mean choice"):
        StructuredOutputs(choices=["a"])  # type: ignore[call-arg]
