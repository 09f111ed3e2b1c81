"""Messages of a conversation in the form that chat templates read."""

import json
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from pyengine.errors import InvalidRequestError
from pyengine.request.prompts import refuse_surrogates, shown

_MESSAGE_KEYS = frozenset(
    ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")
)
_INERT_KEYS = frozenset(("annotations", "cache_control", "function_call", "id", "refusal"))
"""Keys of all messages, without effect unless the template reads them."""
_STRUCTURE = frozenset(("role", "content", "tool_call_id", "type"))
"""Keys that every conversation has, whether the template reads them or not."""
_KEY = re.compile(r"[\w.-]+", re.ASCII)
"""Further keys that messages of the assistant may have, as answers of other servers do."""
_CALL_KEYS = frozenset(("id", "type", "function", "index"))
_PART_KEYS = frozenset(("type", "text"))
_INERT_PART_KEYS = frozenset(("annotations", "cache_control", "id", "prompt_cache_breakpoint"))
"""The same for parts of a content."""
_TEXT_PARTS = {"text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts with text, and the key that has it."""
_THINKING_PARTS = frozenset(("thinking", "redacted_thinking", "reasoning"))
"""Types of parts of the assistant that are left out, as templates leave out earlier thinking."""
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_WALKS_PARTS = re.compile(r"for\s+\w+\s+in\s+(\w+\.content\b|\w+\[['\"]content['\"]\]|content\b)")


class Arguments(dict[str, Any]):
    """The arguments of a tool call as a mapping, which most templates read, and as JSON text."""

    def __init__(self, arguments: Mapping[str, Any], text: str | None = None) -> None:
        super().__init__(arguments)
        self.text = json.dumps(arguments, ensure_ascii=False) if text is None else text


def with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of `message_for` whose tool calls have their arguments as text."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments.text if isinstance(arguments, Arguments) else arguments
    return {**call, "function": {**function, "arguments": text}}


def message_for(template: str, position: int, message: Any) -> dict[str, Any]:
    """A message for a template: text content, arguments of tool calls as mappings.

    Values of None are left out, as transformers does. The assistant's messages may be answers of
    any server: unknown keys of theirs are left out, and no content is empty content.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(
            f"message {position} is {shown(message)}: a message has 'role' and 'content'"
        )
    _check_role(position, message["role"], template)
    is_answer = message["role"] == "assistant"
    plain = {}
    for key, value in message.items():
        is_known = key in _MESSAGE_KEYS or (isinstance(key, str) and template_reads(template, key))
        if not is_known and not _is_inert(key, value, is_answer=is_answer):
            raise InvalidRequestError(
                f"message {position} has the key {reprlib.repr(key)}, which the chat template "
                f"does not read; known are {', '.join(sorted(_MESSAGE_KEYS))}"
            )
        if is_known and value is not None:
            plain[key] = value
    plain["role"] = _role(message["role"], template)
    content, calls = message.get("content"), message.get("tool_calls")
    if not calls and message.get("function_call") is not None:
        calls = [{"type": "function", "function": message["function_call"]}]
        plain.pop("function_call", None)
    if content is None and not calls:
        content = message.get("refusal")
        if content is None and is_answer:
            content = ""
    if content is not None:
        plain["content"] = _content(position, content, template, message["role"])
    elif not calls:
        raise InvalidRequestError(
            f"message {position} has neither 'content' nor 'tool_calls': give one of them"
        )
    if calls:
        plain["tool_calls"] = _tool_calls(position, calls, template)
    else:
        plain.pop("tool_calls", None)
    refuse_surrogates_within(plain)
    return plain


def _check_role(position: int, role: str, template: str) -> None:
    """Raise for a role that neither the API nor the template names.

    Many templates write any role, so a misspelt role would change the prompt.
    """
    refuse_surrogates(role)
    if role not in _ROLES and not _names(template, role):
        raise InvalidRequestError(
            f"message {position} has the role {shown(role)}: it must be one of "
            f"{', '.join(_ROLES)}, or a role that the chat template names"
        )


def _is_inert(key: Any, value: Any, *, is_answer: bool) -> bool:
    """True if a key that the template does not read may be left out."""
    if key in _INERT_KEYS or value is None:
        return True
    return is_answer and bool(_named([key]))


def _role(role: str, template: str) -> str:
    """The role that the template has for a role of the API.

    A developer's message is the system's, and a function's result that of a tool, unless the
    template names these roles itself.
    """
    other = {"developer": "system", "function": "tool"}.get(role)
    if other is None or _names(template, role):
        return role
    return other if other == "system" or _names(template, other) else role


def _names(template: str, role: str) -> bool:
    return any(f"{mark}{role}{mark}" in template for mark in "'\"")


def template_reads(template: str, name: str) -> bool:
    """True if the name occurs in the template, not as a part of another one."""
    # The first test avoids a regular expression of a name of some megabytes.
    return name in template and bool(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template))


def unread_keys(messages: Sequence[Any], template: str) -> list[str]:
    """The accepted keys of messages, their parts and calls that the template does not read.

    Each once: `messages.id`, `messages.content.id`, `messages.tool_calls.extra`. Invalid messages
    are left to `render_chat`.
    """
    keys: dict[str, None] = {}
    within: dict[str, None] = {}
    for message in messages:
        if isinstance(message, Mapping):
            keys.update(dict.fromkeys(_optional_keys(message)))
            within.update(dict.fromkeys(_unread_within(message)))
    unread = [f"messages.{key}" for key in keys if not template_reads(template, key)]
    return [*unread, *(f"messages.{name}" for name in within)]


def _optional_keys(message: Mapping[str, Any]) -> list[str]:
    """The keys of a message that have an effect only if the template reads them."""
    given = {key for key, value in message.items() if value is not None} - _STRUCTURE
    if not (message.get("content") or message.get("tool_calls")):
        given -= {"refusal", "function_call"}  # the content, and the call
    given -= {key for key in ("tool_calls", "function_call") if not message.get(key)}
    return _named(given)


def _unread_within(message: Mapping[str, Any]) -> Iterator[str]:
    """The keys of the parts and calls of a message that are left out."""
    content, calls = message.get("content"), message.get("tool_calls")
    for part in content if isinstance(content, list | tuple) else ():
        if isinstance(part, Mapping) and _is_thinking(message.get("role"), part):
            yield f"content.{part['type']}"
        elif isinstance(part, Mapping):
            keys = {key for key in part if part[key] is not None} & _INERT_PART_KEYS
            yield from [f"content.{key}" for key in sorted(keys)]
    for call in calls if isinstance(calls, list | tuple) else ():
        if isinstance(call, Mapping):
            extra = {key for key in call if call[key] is not None} - _CALL_KEYS
            yield from [f"tool_calls.{key}" for key in _named(extra)]


def _named(keys: Collection[Any]) -> list[str]:
    """The keys that a header may name, sorted."""
    return sorted(
        [key for key in keys if isinstance(key, str) and len(key) <= 64 and _KEY.fullmatch(key)]
    )


def _is_thinking(role: Any, part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    return role == "assistant" and isinstance(kind, str) and kind in _THINKING_PARTS


def _content(position: int, content: Any, template: str, role: str) -> str | list[Any]:
    """The content of a message as text; parts, as in OpenAI's API, become lines.

    A template that iterates over parts gets them, as texts.
    """
    if not isinstance(content, list | tuple):
        return _part(position, {"type": "text", "text": content}, content)
    texts = [
        _part(position, part, content)
        for part in content
        if not (isinstance(part, Mapping) and _is_thinking(role, part))
    ]
    if _WALKS_PARTS.search(template):
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part(position: int, part: Any, content: Any) -> str:
    """The text of a part of a message's content."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    text = None if key is None else part.get(key)
    if not isinstance(text, str):
        given = f"a part of type {kind!r}" if kind not in (None, "text") else shown(content)
        raise InvalidRequestError(
            f"the content of message {position} is {given}: this engine takes text, as a "
            "string or as parts of type 'text'"
        )
    for name, value in part.items():
        if value is not None and name not in _PART_KEYS | _INERT_PART_KEYS | {key}:
            raise InvalidRequestError(
                f"a part of the content of message {position} has the key {reprlib.repr(name)}, "
                "which would change nothing: leave it out; known are "
                f"{', '.join(sorted(_PART_KEYS))}"
            )
    return text


def _tool_calls(position: int, calls: Any, template: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise InvalidRequestError(
            f"'tool_calls' of message {position} is {shown(calls)}: it must be a list"
        )
    return [_tool_call(position, call, template) for call in calls]


def _tool_call(position: int, call: Any, template: str) -> dict[str, Any]:
    """A call for templates, without the keys that only its server knows."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f"a tool call of message {position} is {shown(call)}: it has 'function' with 'name' "
            "and 'arguments'"
        )
    plain = {
        key: value
        for key, value in call.items()
        if value is not None and (key in ("id", "type") or template_reads(template, str(key)))
    }
    arguments = _arguments(function.get("arguments"))
    return {**plain, "function": {**function, "arguments": arguments}}


def _arguments(arguments: Any) -> Any:
    """The arguments of a call: OpenAI's API gives them as JSON, and most templates read a mapping.

    Text that is no JSON, which models write, too, stays text.
    """
    if arguments is None:
        return Arguments({})
    if isinstance(arguments, Mapping):
        return Arguments({**arguments})
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}", parse_constant=_refuse)
    except (ValueError, RecursionError):
        return arguments
    if value is None:
        return Arguments({})
    return Arguments(value, arguments or "{}") if isinstance(value, dict) else arguments


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def refuse_surrogates_within(value: Any) -> None:
    """Raise for invalid text in mappings and lists at any depth."""
    for text in texts_within(value):
        refuse_surrogates(text)


def texts_within(value: Any) -> Iterator[str]:
    """All strings in mappings and lists at any depth, keys too. Each object is read once."""
    todo, seen = [value], set()
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            todo += [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
