"""Calls of tools in a model's text, as Hermes, Qwen and others write them.

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, beside other text.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call of a tool; `arguments` are a JSON object, as text."""

    name: str
    arguments: str


Part: TypeAlias = str | ParsedCall


class ToolParser:
    """Parts text that comes in pieces into content and calls.

    What is no call of one of the tools is content, as it was written; white space beside calls is
    left out. Where the text is cut makes no difference.
    """

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = tools
        self._text = ""
        """What has come and was not given yet."""
        self._is_in_call = False
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """What is certain now that `text` has come."""
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
        """What is left once all has come. A call that was not closed is one if it is whole."""
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


def _end_of_certain(text: str) -> int:
    """Where the text ends that is content whatever comes: before the space before a call."""
    lengths = range(min(len(_OPEN) - 1, len(text)), 0, -1)
    begun = next((length for length in lengths if _OPEN.startswith(text[-length:])), 0)
    return len(text[: len(text) - begun].rstrip())
