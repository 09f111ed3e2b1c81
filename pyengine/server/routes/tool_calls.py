"""Tools offered by a request, and the parser of tool calls in a model's text.

Calls are in the format of Hermes, Qwen and others, `<tool_call>{"name": ..., "arguments": {...}}
</tool_call>`, any number of them between other text. If a call is required, a JSON schema makes the
answer that object alone.
"""

import json
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from pyengine.server.errors import FieldError
from pyengine.server.schemas.requests import ChatCompletionRequest, Function, Tool

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ABOUT_SCHEMAS = frozenset(("$schema", "description", "title", "type"))
"""Keywords that describe no parameter."""
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call; `arguments` is a JSON object as text, as the model wrote it."""

    name: str
    arguments: str


Part: TypeAlias = str | ParsedCall


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """Tools that the model may call. With a `schema` it must call one, in this form."""

    names: frozenset[str] = frozenset()
    schema: Mapping[str, Any] | None = None
    shown: Sequence[Tool] = ()
    """The tools for the chat template: with `allowed_tools` more than the model may call."""
    are_functions: bool = False
    """True if the request has `functions`, the older form of `tools`; answers have that form."""

    def parser(self) -> "ToolParser | None":
        """A parser for one answer; None without tools."""
        if not self.names:
            return None
        return ToolParser(self.names) if self.schema is None else RequiredCall(self.names)

    def unread(self) -> list[str]:
        """The fields without effect if the chat template does not read tools."""
        if not self.shown:
            return []
        if self.schema is None:
            return ["functions" if self.are_functions else "tools"]
        has_description = any(tool.function.description for tool in self.shown)
        name = "functions" if self.are_functions else "tools.function"
        return [f"{name}.description"] if has_description else []


def offered_tools(body: ChatCompletionRequest) -> OfferedTools:
    """The tools of a request, from `tools` or `functions`.

    Raises `ApiError` for an invalid `tool_choice` or `function_call`.
    """
    field, tools, choice = _offer(body)
    functions = {tool.function.name: tool.function for tool in tools}
    are_functions = field == "function_call"
    if len(functions) < len(tools):
        of = "functions" if are_functions else "tools"
        raise FieldError(of, f"{of}: two of them have the same name")
    if choice == "none":
        return OfferedTools()
    if choice in (None, "auto"):
        return OfferedTools(frozenset(functions), None, tools, are_functions)
    if choice == "required" and not tools:
        raise FieldError(field, f"{field} needs tools")
    names, is_required = _chosen(field, choice, functions)
    if not is_required:
        return OfferedTools(frozenset(names), None, tools, are_functions)
    if body.response_format is not None or body.structured_outputs is not None:
        raise FieldError(
            field,
            f"{field} requires a call, which excludes response_format and structured_outputs: "
            "send one of them",
        )
    schema = _schema([functions[name] for name in names])
    return OfferedTools(frozenset(names), schema, tools, are_functions)


def _offer(body: ChatCompletionRequest) -> tuple[str, Sequence[Tool], Any]:
    """The field that chooses a tool, the tools, and the choice in the form of `tool_choice`."""
    choice = body.function_call
    if not body.functions:
        if choice not in (None, "none", "auto"):
            raise FieldError(
                "function_call",
                f"function_call={reprlib.repr(choice)} needs functions; tools have tool_choice",
            )
        return "tool_choice", body.tools or (), body.tool_choice
    if body.tools or body.tool_choice is not None:
        raise FieldError(
            "functions",
            "functions and function_call are the older form of tools and tool_choice: send one of "
            "the two",
        )
    tools = [
        Tool(type="function", function=function, cache_control=None) for function in body.functions
    ]
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    return "function_call", tools, choice


def _chosen(
    field: str, choice: Any, functions: Mapping[str, Function]
) -> tuple[Collection[str], bool]:
    """The names of the functions that may be called, and whether one must be."""
    allowed: Any
    match choice:
        case "required" if field == "tool_choice":
            return functions.keys(), True
        case {"type": "function", **rest} if set(rest) == {"function"}:
            name = _name(rest["function"])
            if name in functions:
                return [name], True
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(allowed)}} if (
            mode in ("auto", "required") and allowed
        ):
            names = [
                _name(item.get("function")) if item.get("type") == "function" else ""
                for item in allowed
                if isinstance(item, dict)
            ]
            if len(names) == len(allowed) and functions.keys() >= set(names):
                return names, mode == "required"
    forms = (
        'auto, none or {"name": ...} with the name of one of functions'
        if field == "function_call"
        else 'auto, none, required, {"type": "function", "function": {"name": ...}} with a '
        'function of tools, or {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or '
        '"required", "tools": [...]}} with functions of tools'
    )
    shown = choice["function"] if field == "function_call" and isinstance(choice, dict) else choice
    raise FieldError(field, f"{field}={reprlib.repr(shown)}: it must be {forms}")


def _name(function: Any) -> str:
    """The name in `{"name": ...}`; empty in another form."""
    match function:
        case {"name": str(name), **rest} if not rest:
            return name
    return ""


def _schema(functions: Sequence[Function]) -> dict[str, Any]:
    """The schema of a call of any of these. Definitions move to the top, where references point."""
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for function in functions:
        parameters = _parameters(function)
        for keyword in ("$defs", "definitions"):
            for name, definition in dict(parameters.pop(keyword, {})).items():
                if definitions.setdefault(keyword, {}).setdefault(name, definition) != definition:
                    raise FieldError(
                        "tools",
                        f"tools: two tools define {name!r} differently in {keyword}: rename one",
                    )
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, "arguments": parameters},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), **definitions}


def _parameters(function: Function) -> dict[str, Any]:
    """The schema of the arguments. A function that describes no parameter has none."""
    parameters = dict(function.parameters or {})
    if not parameters.get("required", True):
        del parameters["required"]
    return parameters if set(parameters) - _ABOUT_SCHEMAS else {**_NO_PARAMETERS}


class ToolParser:
    """Splits streamed text into content and tool calls.

    Anything but a valid call of an offered tool is content, unchanged. White space next to calls is
    dropped. The result does not depend on how the text is chunked.
    """

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = tools
        self._text = ""
        """Text that may still become part of a call."""
        self._is_in_call = False
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """Add text and return the parts that are complete."""
        self._text += text
        parts: list[Part] = []
        while True:
            mark = _CLOSE if self._is_in_call else _OPEN
            before, tag, after = self._text.partition(mark)
            if not tag:
                break
            self._text = after
            if self._is_in_call:
                parts.append(self._call(before) or _OPEN + before + _CLOSE)
            elif before.strip():
                parts.append(before.rstrip())
            self._is_in_call = not self._is_in_call
        if not self._is_in_call:
            certain = self._text[: _end_of_certain(self._text)]
            self._text = self._text[len(certain) :]
            if certain:
                parts.append(certain)
        return parts

    def end(self) -> list[Part]:
        """Return the rest at the end of the text. A complete call may lack its closing tag."""
        rest, self._text = self._text, ""
        if self._is_in_call:
            self._is_in_call = False
            return [self._call(rest) or _OPEN + rest]
        is_beside_calls = self.num_calls > 0 and not rest.strip()
        return [rest] if rest and not is_beside_calls else []

    def _call(self, text: str) -> ParsedCall | None:
        try:
            members = _members(text)
            name = _decoded(members.get("name", "null"))
            arguments = _arguments(members.get("arguments", "null"))
        except (ValueError, RecursionError):
            return None
        if not isinstance(name, str) or name not in self._tools:
            return None
        self.num_calls += 1
        return ParsedCall(name, arguments)


class RequiredCall(ToolParser):
    """Parser of an answer that is one call. An incomplete call is content."""

    def feed(self, text: str) -> list[Part]:
        """See `ToolParser`: the call is complete only at the end."""
        self._text += text
        return []

    def end(self) -> list[Part]:
        """See `ToolParser`."""
        return [self._call(self._text) or self._text]


def _end_of_certain(text: str) -> int:
    """End of the text that is content regardless of what follows."""
    lengths = range(min(len(_OPEN) - 1, len(text)), 0, -1)
    begun = next((length for length in lengths if _OPEN.startswith(text[-length:])), 0)
    return len(text[: len(text) - begun].rstrip())


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_SPACE = re.compile(r"[ \t\n\r]*")


def _decoded(text: str) -> Any:
    """The value of a JSON text. Raises `ValueError`, for NaN and infinity, too."""
    return _DECODER.decode(text)


def _members(text: str) -> dict[str, str]:
    """The members of a JSON object as JSON texts, unchanged. Raises `ValueError`."""
    if not isinstance(_decoded(text), dict):
        raise ValueError("not a JSON object")

    def skip(at: int) -> int:
        match = _SPACE.match(text, at)
        return at if match is None else match.end()

    members: dict[str, str] = {}
    at = skip(skip(0) + 1)  # after the brace
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        begin = skip(skip(at) + 1)  # after the colon
        _, end = _DECODER.raw_decode(text, begin)
        members[name] = text[begin:end]
        at = skip(end)
        if text[at] == ",":
            at = skip(at + 1)
    return members


def _arguments(text: str) -> str:
    """A JSON object as text: `text` itself, or the string that it is. None are `{}`.

    Raises `ValueError` for other values.
    """
    value = _decoded(text)
    if isinstance(value, str):
        text = value.strip() or "{}"
        value = _decoded(text)
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return text
