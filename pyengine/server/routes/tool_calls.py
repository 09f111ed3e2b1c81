"""Tools offered by a request, and the parser of tool calls in a model's text.

Calls are in the format of Hermes, Qwen and others, `<tool_call>{"name": ..., "arguments": {...}}
</tool_call>`, any number of them between other text. If a call is required, a JSON schema makes the
answer that object alone.
"""

import json
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pyengine.server.errors import ApiError
from pyengine.server.schemas.requests import ChatCompletionRequest, Function

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call; `arguments` is a JSON object as text."""

    name: str
    arguments: str


Part: TypeAlias = str | ParsedCall


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """Tools that the model may call. With a `schema` it must call one, in this form."""

    names: frozenset[str] = frozenset()
    schema: Mapping[str, Any] | None = None

    def parser(self) -> "ToolParser | None":
        """A parser for one answer; None without tools."""
        if not self.names:
            return None
        return ToolParser(self.names) if self.schema is None else RequiredCall(self.names)


def offered_tools(body: ChatCompletionRequest) -> OfferedTools:
    """The tools of a request. Raises `ApiError` for an invalid `tool_choice`."""
    tools = {tool.function.name: tool.function for tool in body.tools or ()}
    if len(tools) < len(body.tools or ()):
        raise ApiError(400, "tools: two tools have the same name", param="tools")
    match body.tool_choice:
        case None | "none":
            return OfferedTools() if body.tool_choice == "none" else OfferedTools(frozenset(tools))
        case "required" if not tools:
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        case "auto":
            return OfferedTools(frozenset(tools))
        case "required":
            chosen = list(tools.values())
        case {"type": "function", "function": {"name": str(name), **rest}, **more} if (
            name in tools and not rest and not more
        ):
            chosen = [tools[name]]
        case _:
            raise ApiError(
                400,
                f"tool_choice={reprlib.repr(body.tool_choice)}: it must be auto, none, required or "
                '{"type": "function", "function": {"name": ...}} with a function of tools',
                param="tool_choice",
            )
    if body.response_format is not None or body.structured_outputs is not None:
        raise ApiError(
            400,
            "tool_choice requires a call, which excludes response_format and structured_outputs: "
            "send one of them",
            param="tool_choice",
        )
    return OfferedTools(frozenset(function.name for function in chosen), _schema(chosen))


def _schema(functions: Sequence[Function]) -> dict[str, Any]:
    """The schema of a call of any of these. Definitions move to the top, where references point."""
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for function in functions:
        parameters = dict(function.parameters or {"type": "object"})
        for place in ("$defs", "definitions"):
            for name, definition in dict(parameters.pop(place, {})).items():
                if definitions.setdefault(place, {}).setdefault(name, definition) != definition:
                    raise ApiError(
                        400,
                        f"tools: two tools define {name!r} differently in {place}: rename one",
                        param="tools",
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
            before, found, after = self._text.partition(mark)
            if not found:
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
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict):
            return None
        name, arguments = found.get("name"), found.get("arguments", {})
        if not isinstance(name, str) or name not in self._tools or not isinstance(arguments, dict):
            return None
        self.num_calls += 1
        return ParsedCall(name, json.dumps(arguments, ensure_ascii=False))


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
