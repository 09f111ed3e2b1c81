"""Objects that list their properties get no others, unless the schema says so."""

import json
from random import Random
from typing import Any

import jsonschema
import pytest

from pyengine.errors import InvalidRequestError
from pyengine.sampling.closed_schema import closed_schema
from pyengine.sampling.grammar import Grammars
from pyengine.sampling_params import StructuredOutputs
from tests.support.engines import EOS
from tests.support.fake_runner import VOCAB_SIZE
from tests.support.schemas import drawn_schema
from tests.unit.engine.test_structured import tokenizer

INT = {"type": "integer"}
A: dict[str, Any] = {"type": "object", "properties": {"a": INT}}
B: dict[str, Any] = {"type": "object", "properties": {"b": INT}}
SHUT = {"additionalProperties": False}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(tokenizer(), VOCAB_SIZE, frozenset({EOS}))


def allows(grammars: Grammars, schema: Any, value: Any) -> bool:
    """Whether this answer can come, and then end."""
    matcher = grammars.matcher(StructuredOutputs(json=schema))
    for token in tokenizer().encode(json.dumps(value, separators=(",", ":"))):
        if not matcher.may_come(token):
            return False
        matcher.append(token)
    return matcher.is_finished


CLOSED: dict[str, tuple[Any, Any, Any]] = {
    "listed": (A, {"a": 1}, {"a": 1, "z": 1}),
    "none listed": ({"type": "object", "properties": {}}, {}, {"z": 1}),
    "within": ({**A, "properties": {"a": B}}, {"a": {"b": 1}}, {"a": {"z": 1}}),
    "in a list": ({"type": "array", "items": A}, [{"a": 1}], [{"z": 1}]),
    "in a tuple": ({"type": "array", "prefixItems": [A]}, [{"a": 1}], [{"z": 1}]),
    "in a map": ({"type": "object", "additionalProperties": A}, {"x": {}}, {"x": {"z": 1}}),
    "an alternative": ({"anyOf": [A, {"type": "null"}], "title": "t"}, {"a": 1}, {"z": 1}),
    "one of": (
        {"oneOf": [{**A, "required": ["a"]}, {**B, "required": ["b"]}]},
        {"b": 1},
        {"a": 1, "b": 1},
    ),
    "a definition": (
        {"$ref": "#/$defs/A", "description": "d", "$defs": {"A": A}},
        {"a": 1},
        {"z": 1},
    ),
    "a definition, wrapped": (
        {"allOf": [{"$ref": "#/definitions/A"}], "default": {}, "definitions": {"A": A}},
        {"a": 1},
        {"z": 1},
    ),
    "itself": (
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        {"next": {"next": None}},
        {"next": {"z": 1}},
    ),
    "required beside the listed": (
        {**A, "required": ["r"]},
        {"a": 1, "r": "x"},
        {"a": 1, "r": "x", "z": 1},
    ),
    "patterns": ({**A, "patternProperties": {"^x": INT}}, {"a": 1, "x1": 1}, {"a": 1, "z": 1}),
    "a property named as a keyword": (
        {"type": "object", "properties": {"properties": A, "$ref": INT, "allOf": INT}},
        {"properties": {"a": 1}, "$ref": 1, "allOf": 1},
        {"properties": {"z": 1}},
    ),
}


@pytest.mark.parametrize(("schema", "good", "bad"), CLOSED.values(), ids=CLOSED)
def test_objects_have_the_properties_that_they_list(
    schema: Any, good: Any, bad: Any, grammars: Grammars
) -> None:
    jsonschema.validate(good, schema)
    assert allows(grammars, schema, good)
    assert not allows(grammars, schema, bad)


OPEN: dict[str, tuple[Any, Any]] = {
    "nothing listed": ({"type": "object"}, {"z": {"y": [1]}}),
    "said so": ({**A, "additionalProperties": True}, {"a": 1, "z": 1}),
    "a map": ({**A, "additionalProperties": {"type": "string"}}, {"a": 1, "z": "x"}),
    "all of": ({"allOf": [A, B]}, {"a": 1, "b": 1}),
    "beside its own": ({**A, "anyOf": [B, {"required": ["c"]}]}, {"a": 1, "b": 1}),
    "a definition beside others": (
        {**A, "allOf": [{"$ref": "#/$defs/B"}], "$defs": {"B": B}},
        {"a": 1, "b": 1},
    ),
    "a definition of a definition": (
        {
            "allOf": [{"$ref": "#/$defs/B"}, A],
            "$defs": {"B": {"$ref": "#/$defs/C"}, "C": B},
        },
        {"b": 1, "a": 1},
    ),
    "at least some": ({**A, "required": ["a"], "minProperties": 2}, {"a": 1, "z": 1}),
}


@pytest.mark.parametrize(("schema", "value"), OPEN.values(), ids=OPEN)
def test_objects_stay_open(schema: Any, value: Any, grammars: Grammars) -> None:
    jsonschema.validate(value, schema)
    assert allows(grammars, schema, value)


@pytest.mark.parametrize(
    "schema",
    [
        {"not": A},
        {"if": A, "then": B},
        {**A, "$ref": "https://example.com/x"},
        {**A, "$ref": "#/$defs/nowhere"},
        {**A, "$dynamicRef": "#x"},
        {**A, "required": True},
        {**A, "required": [[]]},
        {**A, "allOf": 5},
        {**A, "$defs": []},
        {"properties": {"a": {"const": {"properties": {"b": INT}}}}, **SHUT},
        {"enum": [{"properties": {}}]},
        {"x-other": A},
    ],
    ids=repr,
)
def test_other_schemas_are_unchanged(schema: Any) -> None:
    text = json.dumps(schema)
    assert closed_schema(text) == text


def test_numbers_without_a_json_form_are_left_to_the_compiler() -> None:
    text = '{"type": "object", "properties": {"a": {"maximum": 1e999}}}'
    assert closed_schema(text) == text


@pytest.mark.parametrize("seed", range(3))
def test_what_a_closed_schema_allows_the_original_does_too(seed: int) -> None:
    """By instances of each of them, some of which both allow."""
    random, num_valid = Random(seed), 0
    for _ in range(60):
        schema = drawn_schema(random)
        closed = json.loads(closed_schema(json.dumps(schema)))
        for value in ({}, {"a": 1}, {"b": "x", "c": 2}, {"z": None}, [], [{"a": 1}], 3, "x", None):
            try:
                jsonschema.validate(value, closed)
            except (jsonschema.ValidationError, RecursionError):
                continue
            jsonschema.validate(value, schema)
            num_valid += 1
    assert num_valid > 8


def test_a_schema_that_cannot_be_is_refused_as_before(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be served"):
        grammars.matcher(StructuredOutputs(json={**A, "required": True}))
