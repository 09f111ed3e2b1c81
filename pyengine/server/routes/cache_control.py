"""`cache_control` of messages and their parts, as clients of Anthropic's API send it: pins.

`{"type": "ephemeral", "ttl": "5m"}` keeps the prompt up to the end of the marked message or part.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyengine.errors import InvalidRequestError
from pyengine.request.prompts import common_prefix

_TTL = re.compile(r"([1-9][0-9]{0,3})([smh])")
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_DEFAULT = 300.0
_LONGEST = 3600.0
MAX_MARKS = 4
"""The last marks of a conversation that count."""


@dataclass(frozen=True, slots=True)
class CacheMark:
    """A message or part up to whose end the prompt is to be pinned."""

    message: int
    part: int | None
    seconds: float


def seconds_of(control: Any) -> float | None:
    """The seconds of a `cache_control`; None if it has another form."""
    if not isinstance(control, Mapping) or control.get("type") != "ephemeral":
        return None
    if not set(control) <= {"type", "ttl"}:
        return None
    ttl = control.get("ttl")
    if ttl is None:
        return _DEFAULT
    match = _TTL.fullmatch(ttl) if isinstance(ttl, str) else None
    if match is None:
        return None
    return min(float(match[1]) * _SECONDS[match[2]], _LONGEST)


def cache_marks(messages: Sequence[Mapping[str, Any]]) -> list[CacheMark] | None:
    """The marks of a conversation in order; None if one has another form."""
    marks = []
    for at, message in enumerate(messages):
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        controls: list[tuple[Any, int | None]] = [
            (part.get("cache_control"), number)
            for number, part in enumerate(parts)
            if isinstance(part, Mapping)
        ]
        for control, number in [*controls, (message.get("cache_control"), None)]:
            if control is None:
                continue
            seconds = seconds_of(control)
            if seconds is None:
                return None
            marks.append(CacheMark(at, number, seconds))
    return marks


def pinned_prefixes(
    messages: Sequence[Mapping[str, Any]],
    marks: Sequence[CacheMark],
    token_ids: Sequence[int],
    render: Callable[[Sequence[Mapping[str, Any]]], list[int]],
) -> list[tuple[int, float]]:
    """The length in tokens and the seconds of each marked prefix of a prompt.

    `render` returns the token ids of a conversation that ends with its last message. A prefix
    consists of the tokens that the conversation up to a mark and the whole one have in common. A
    mark is left out if the chat template refuses the conversation up to it.
    """
    prefixes = []
    for mark in marks[-MAX_MARKS:]:
        last = messages[mark.message]
        if mark.part is not None:
            last = {**last, "content": last["content"][: mark.part + 1]}
        try:
            begin = render([*messages[: mark.message], last])
        except InvalidRequestError:
            continue
        if length := common_prefix(begin, token_ids):
            prefixes.append((length, mark.seconds))
    return prefixes
