"""JSON schemas whose objects have the properties that they list, and no others.

A JSON schema allows further properties unless it has `additionalProperties: false`. Weak models
then add properties without end. So objects that list their properties are closed, as in the strict
mode of xgrammar. An answer that is valid by the closed schema is valid by the original one.
"""

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]

_SINGLE = ("additionalItems", "additionalProperties", "contains", "items")
"""Keywords with a schema for other values. `items` may also have a list of them."""
_SEVERAL = ("items", "prefixItems")
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
_CONDITIONS = ("else", "if", "not", "then")
"""Keywords with a schema for the same value, which are no alternatives."""
_ALTERNATIVES = ("anyOf", "oneOf")
_OTHER_REFERENCES = ("$dynamicRef", "$recursiveRef")
_FURTHER = ("additionalProperties", "minProperties", "propertyNames", "unevaluatedProperties")
"""Keywords that describe further properties, or require some."""
_OF_OBJECTS = frozenset((*_FURTHER, "maxProperties", "patternProperties", "properties", "required"))


def closed_schema(text: str) -> str:
    """The schema with `additionalProperties: false` in objects that list their properties.

    An object stays open if it has a keyword about further properties, or if another part of the
    schema describes the same value, as in `allOf`. `text` is a JSON object; a schema with invalid
    parts, or with references to elsewhere, is returned unchanged.
    """
    root = json.loads(text)
    try:
        schemas = list(_schemas(root))
        shared = _shared(root, schemas)
        closable = [
            schema
            for schema in schemas
            if isinstance(schema.get("properties"), dict)
            and id(schema) not in shared
            and not any(key in schema for key in (*_FURTHER, "$ref"))
            and not _groups(schema)
        ]
        for schema in closable:
            for name in schema.get("required", ()):
                schema["properties"].setdefault(name, {})
            schema["additionalProperties"] = False
        return json.dumps(root, allow_nan=False) if closable else text
    except (AttributeError, LookupError, TypeError, ValueError):
        return text


def _schemas(root: Schema) -> Iterator[Schema]:
    """A schema and all schemas within it."""
    pending: list[Any] = [root]
    while pending:
        schema = pending.pop()
        if not isinstance(schema, dict):  # true and false are schemas, too
            continue
        yield schema
        pending += [schema[key] for key in _SINGLE if key in schema]
        lists = [schema[key] for key in _SEVERAL if isinstance(schema.get(key), list)]
        pending += [item for schemas in lists for item in schemas]
        pending += [item for key in _NAMED for item in schema.get(key, {}).values()]
        pending += [item for group in _groups(schema) for item in group]


def _groups(schema: Schema) -> list[list[Any]]:
    """The schemas for the same value as this one; alternatives are in one group."""
    groups = [[item] for item in schema.get("allOf", ())]
    groups += [[schema[key]] for key in _CONDITIONS if key in schema]
    groups += [[item] for item in schema.get("dependentSchemas", {}).values()]
    groups += [list(schema[key]) for key in _ALTERNATIVES if key in schema]
    return groups


def _shared(root: Schema, schemas: list[Schema]) -> set[int]:
    """Ids of the schemas for a value that another schema describes, too.

    Raises `LookupError` for a reference that is not a path within the schema.
    """
    shared: set[int] = set()
    pending: list[Schema] = []
    applied: dict[int, list[Any]] = {}
    for schema in schemas:
        groups = _groups(schema)
        if any(key in schema for key in _OTHER_REFERENCES):
            raise LookupError("a reference that depends on the schema around it")
        if "$ref" in schema:
            groups.append([_target(root, schema["$ref"])])
        subschemas = applied[id(schema)] = [item for group in groups for item in group]
        is_condition = any(key in schema for key in (*_CONDITIONS, "dependentSchemas"))
        if is_condition or len(groups) > 1 or not _OF_OBJECTS.isdisjoint(schema):
            pending += subschemas
    while pending:
        schema = pending.pop()
        if id(schema) not in shared:
            shared.add(id(schema))
            pending += applied.get(id(schema), ())
    return shared


def _target(root: Schema, reference: str) -> Any:
    """The schema that a reference such as `#/$defs/Name` points to. Raises `LookupError`."""
    first, *names = reference.split("/")
    if first != "#":
        raise LookupError(reference)
    schema: Any = root
    for name in names:
        key = name.replace("~1", "/").replace("~0", "~")
        schema = schema[int(key)] if isinstance(schema, list) else schema[key]
    return schema
