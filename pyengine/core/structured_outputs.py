"""What form an answer must have: a JSON schema, a regular expression, some texts, a grammar."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from pyengine.core.errors import InvalidRequestError
from pyengine.core.fields import items_of, refuse, refuses_unknown, text_item

FormatKind: TypeAlias = Literal["json", "regex", "choice", "grammar"]

MAX_FORMAT_BYTES = 1 << 16
"""The longest schema, expression or grammar, and all texts of a choice together, in UTF-8."""
MAX_FORMAT_DEPTH = 64
"""The deepest nesting of objects and lists in a schema."""
MAX_CHOICES = 1_024


@refuses_unknown("form of structured outputs")
@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The form that an answer must have; exactly one field is given. By vLLM's names.

    Raises :class:`InvalidRequestError` for none or several of them, for what is none of its kind
    by its type, and for what is too long (64 KiB) or, a schema, nested too deeply (64). Whether
    it can be served is found out when the request comes.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as what `json.loads` makes of it; read back as text."""
    regex: str | None = None
    """A regular expression (Rust's syntax) for the whole of the answer."""
    choice: Iterable[str] | None = None
    """The answer is one of these texts; read back as a tuple."""
    grammar: str | None = None
    """A context-free grammar: Lark with a rule `start`, or GBNF with a rule `root`."""
    json_object: bool | None = None
    """Any JSON object."""

    def __post_init__(self) -> None:
        if self.json_object is not None and self.json_object is not True:
            raise refuse("structured_outputs.json_object", self.json_object, "True, or left out")
        given = [one.name for one in fields(self) if getattr(self, one.name) is not None]
        if len(given) != 1:
            names = ", ".join(one.name for one in fields(self))
            raise InvalidRequestError(
                f"structured_outputs has {' and '.join(given) or 'nothing'}: give exactly one of "
                f"{names}"
            )
        (name,) = given
        if name == "json":
            object.__setattr__(self, name, _schema_text(self.json))
        elif name == "choice":
            object.__setattr__(self, name, _checked_choice(self.choice))
        elif name in ("regex", "grammar"):
            label = f"structured_outputs.{name}"
            object.__setattr__(self, name, _checked_text(label, getattr(self, name)))

    @property
    def field(self) -> str:
        """The name of the field that is given."""
        return next(one.name for one in fields(self) if getattr(self, one.name) is not None)

    @property
    def kind(self) -> FormatKind:
        """What it is compiled as; any object is a schema like others."""
        if self.regex is not None:
            return "regex"
        if self.choice is not None:
            return "choice"
        return "grammar" if self.grammar is not None else "json"

    @property
    def text(self) -> str:
        """The schema, the expression, the grammar, or the choice as a JSON list."""
        if self.choice is not None:
            return json.dumps(self.choice)
        if self.json_object:
            return '{"type": "object"}'
        return str(self.json if self.json is not None else self.regex or self.grammar)


def _checked_text(name: str, text: Any) -> str:
    checked = text_item(name, text)
    size = len(checked.encode())
    if size > MAX_FORMAT_BYTES:
        raise InvalidRequestError(
            f"{name} has {size} bytes: at most {MAX_FORMAT_BYTES} are allowed; make it shorter"
        )
    return checked


def _schema_text(schema: Any) -> str:
    name = "structured_outputs.json"
    allowed = "a JSON schema: an object, or its text"
    if not isinstance(schema, str | Mapping):
        raise refuse(name, schema, allowed)
    try:
        text = schema if isinstance(schema, str) else json.dumps(dict(schema), allow_nan=False)
        checked = _checked_text(name, text)
        parsed = json.loads(checked)
    except InvalidRequestError:
        raise
    except RecursionError:
        raise _too_deep(name) from None
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{name} is no JSON: {error}; it must be {allowed}") from error
    if not isinstance(parsed, dict):
        raise refuse(name, parsed, allowed)
    if _depth(parsed) > MAX_FORMAT_DEPTH:
        raise _too_deep(name)
    return checked


def _depth(value: Any) -> int:
    """How deeply objects and lists are nested; 0 for what is neither."""
    depth, level = 0, [value]
    while True:
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        if not any(isinstance(one, dict | list) for one in level):
            return depth
        depth, level = depth + 1, inner


def _too_deep(name: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} is nested more deeply than {MAX_FORMAT_DEPTH} levels: make it flatter"
    )


def _checked_choice(choice: Any) -> tuple[str, ...]:
    name = "structured_outputs.choice"
    if isinstance(choice, str):
        raise refuse(name, choice, "a list of texts")
    texts = items_of(name, choice, text_item)
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise InvalidRequestError(f"{name} has {len(texts)} texts: give 1 to {MAX_CHOICES}")
    _checked_text(name, "".join(texts))
    return texts
