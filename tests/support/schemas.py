"""Random JSON schemas of the size and with the keywords of JSON Schema's own test suite."""

import string
from random import Random
from typing import Any

Schema = dict[str, Any]

_PATTERNS = ["^[a-c]{1,4}$", "^[0-9]{2}-[0-9]{2}$", "^(red|green)$", "^x*y+z?$"]
_FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email"]
_UNSERVED: list[Schema] = [
    {"uniqueItems": True},
    {"if": {"type": "integer"}, "then": {"minimum": 3}},
    {"not": {"type": "string"}},
    {"contains": {"type": "integer"}},
    {"propertyNames": {"pattern": "^a"}},
    {"minimum": 5, "maximum": 4, "type": "integer"},
]
"""Unsupported schemas, which must be refused with a reason."""


def drawn_schema(random: Random) -> Schema:
    """A schema; now and then one that cannot be served."""
    schema = _any(random, 3)
    if random.random() < 0.1:
        schema = {"allOf": [schema, {"$ref": "#/$defs/shared"}]}
        schema["$defs"] = {"shared": {"description": "whatever"}}
    elif random.random() < 0.1:
        schema = {"type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 3}
        schema["$defs"] = {"one": _any(random, 2)}
    elif random.random() < 0.05:
        leaf = {"anyOf": [{"type": "null"}, {"$ref": "#"}]}
        schema = {"type": "object", "properties": {"next": leaf}, "required": ["next"]}
        schema["additionalProperties"] = False
    if random.random() < 0.05:
        schema |= random.choice(_UNSERVED)
    return schema


def _any(random: Random, depth: int) -> Schema:
    makers = [_string, _number, _constant, _text_by_pattern]
    if depth > 0:
        makers += [_object, _object, _array, _choice]
    return random.choice(makers)(random, depth - 1)


def _string(random: Random, depth: int) -> Schema:
    least = random.choice([0, 0, 1, 3])
    return {"type": "string", "minLength": least, "maxLength": least + random.randint(0, 6)}


def _text_by_pattern(random: Random, depth: int) -> Schema:
    if random.random() < 0.5:
        return {"type": "string", "pattern": random.choice(_PATTERNS)}
    return {"type": "string", "format": random.choice(_FORMATS)}


def _number(random: Random, depth: int) -> Schema:
    kind = random.choice(["integer", "number"])
    least = random.randint(-200, 100)
    schema: Schema = {"type": kind, "minimum": least, "maximum": least + random.randint(20, 500)}
    if kind == "integer" and random.random() < 0.3:
        schema["multipleOf"] = random.choice([2, 5, 7])
    if random.random() < 0.3:
        schema["exclusiveMinimum"] = schema.pop("minimum")
    return schema


def _constant(random: Random, depth: int) -> Schema:
    values = ["red", 'say "hi"', 4, -0.5, True, None, [1, "two"], {"a": []}, ""]
    if random.random() < 0.3:
        return {"const": random.choice(values)}
    if random.random() < 0.3:
        return {"type": ["boolean", "null"]}
    return {"enum": random.sample(values, random.randint(1, 4))}


def _object(random: Random, depth: int) -> Schema:
    names = random.sample([*string.ascii_lowercase[:6], "a b"], random.randint(0, 4))
    schema: Schema = {"type": "object", "properties": {name: _any(random, depth) for name in names}}
    schema["required"] = [name for name in names if random.random() < 0.6]
    if random.random() < 0.7:
        schema["additionalProperties"] = False
    elif random.random() < 0.5:
        schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
    return schema


def _array(random: Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": _any(random, depth)}
    if random.random() < 0.3:
        schema["prefixItems"] = [_any(random, depth) for _ in range(random.randint(1, 2))]
    schema["minItems"] = random.randint(0, 2)
    schema["maxItems"] = schema["minItems"] + random.randint(0, 3)
    return schema


def _choice(random: Random, depth: int) -> Schema:
    several = [_any(random, depth) for _ in range(random.randint(2, 3))]
    kind = random.choices(["anyOf", "oneOf", "allOf"], [6, 2, 1])[0]
    return {kind: several}
