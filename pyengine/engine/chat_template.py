"""Renders conversations to token ids by the model's chat template, as transformers does."""

import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias, cast

from pyengine.engine.prompts import refuse_surrogates, shown
from pyengine.engine.untrusted_calls import is_failure, within
from pyengine.errors import ContextLengthError, InvalidRequestError

Message: TypeAlias = Mapping[str, Any]
"""One turn of a conversation: `role`, and `content` or `tool_calls`."""

_MESSAGE_KEYS = frozenset(
    ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")
)
_INERT_KEYS = frozenset(("annotations", "cache_control", "id", "refusal"))
"""Keys of messages from servers, without effect unless the template reads them."""
_PART_KEYS = frozenset(("type", "text"))
_INERT_PART_KEYS = frozenset(("annotations", "cache_control", "id", "prompt_cache_breakpoint"))
"""The same for parts of a content."""
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_RESERVED = {
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
    *("max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict"),
    *("return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
}
"""Parameters of transformers' `apply_chat_template` that are no variables of a template."""
_WALKS_PARTS = re.compile(r"for\s+\w+\s+in\s+(\w+\.content\b|\w+\[['\"]content['\"]\]|content\b)")


def as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """One or several conversations, as a list."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise InvalidRequestError(
            f"{shown(messages)} is no conversation: give a list of messages, each with 'role' "
            "and 'content'"
        )
    several: list[Any] = list(messages)
    if all(isinstance(item, Mapping) for item in several):
        return [several]
    return several


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options of rendering a conversation to a prompt.

    `tools` are JSON schemas of functions, `template` replaces the model's own, and `variables` are
    for it. With `continue_final_message` the model continues the last message. Rendering has
    `seconds`, and its text may have up to `longest` characters.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    template: str | None = None
    variables: Mapping[str, Any] | None = None
    seconds: float = 30.0
    longest: int | None = None

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message=True goes on with the last message, and "
                "add_generation_prompt=True begins a new one: set one of them to False"
            )
        template: Any = self.template
        variables, tools = self.variables, self.tools
        if template is not None and (not isinstance(template, str) or not template):
            raise InvalidRequestError(
                f"chat_template={shown(template)}: it must be a Jinja template as text, or None "
                "for the model's own"
            )
        if variables is not None and not _has_text_keys(variables):
            raise InvalidRequestError(
                f"chat_template_kwargs={shown(variables)}: it must be a mapping from names to "
                "values, or None"
            )
        reserved = sorted(_RESERVED & set(variables or ()))
        if reserved:
            raise InvalidRequestError(
                f"{reserved[0]!r} cannot be set by chat_template_kwargs: "
                "they are variables of the template alone"
            )
        if tools is None:
            return
        for tool in tools if isinstance(tools, list | tuple) else [None]:
            if not _has_text_keys(tool):
                raise InvalidRequestError(
                    f"tools={shown(tools)}: it must be a list of JSON schemas, a mapping for each "
                    "function"
                )
        _refuse_surrogates_within(tools)


def _has_text_keys(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


DEFAULT_CHAT = ChatOptions()


def render_chat(
    messages: Sequence[Message], tokenizer: Any, options: ChatOptions = DEFAULT_CHAT
) -> list[int]:
    """The token ids of a conversation by the model's chat template, as transformers renders it.

    Raises `InvalidRequestError` for invalid messages, and with the template's error for those that
    it refuses.
    """
    template = options.template or getattr(tokenizer, "chat_template", None)
    if tokenizer is None or not template:
        missing = "tokenizer" if tokenizer is None else "chat template"
        raise InvalidRequestError(
            f"this model has no {missing}: use generate with a prompt written out"
        )
    given: Any = messages
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise InvalidRequestError(f"{shown(given)} is no conversation: give a list of messages")
    several = [_message(at, value, str(template)) for at, value in enumerate(given)]
    if not several:
        raise InvalidRequestError("the conversation is empty: it needs at least one message")
    try:
        _refuse_powers(str(template))
        render = partial(_render_somehow, several, tokenizer, options)
        return within(options.seconds, render, "the chat template")
    except InvalidRequestError:
        raise
    except BaseException as error:  # a template is untrusted code: any error may come
        if not is_failure(error):
            raise
        raise InvalidRequestError(
            f"the model's chat template does not take this conversation: {_words(error)}"
        ) from error


@lru_cache(maxsize=16)
def _refuse_powers(template: str) -> None:
    """Raise `ValueError` for a template that raises numbers to powers.

    A single such operation could run for ever, and cannot be interrupted.
    """
    from jinja2 import Environment

    before = ""
    for _, kind, value in Environment(autoescape=True).lex(template):
        if (kind, value) == ("operator", "**") and before not in ("(", ","):
            raise ValueError("it computes powers (**), and none needs to")
        before = before if kind == "whitespace" else value


def _render_somehow(
    messages: list[dict[str, Any]], tokenizer: Any, options: ChatOptions
) -> list[int]:
    try:
        return _render(messages, tokenizer, options)
    except Exception:
        if all("content" in message for message in messages):
            raise
    # Some templates use the content without a check.
    return _render([{"content": "", **message} for message in messages], tokenizer, options)


def _render(messages: list[dict[str, Any]], tokenizer: Any, options: ChatOptions) -> list[int]:
    # The tokenizers library cannot be interrupted, so the text is checked before it gets it.
    has_text = options.longest is not None and hasattr(tokenizer, "backend_tokenizer")
    rendered: Any = tokenizer.apply_chat_template(
        messages,
        tools=None if options.tools is None else [dict(tool) for tool in options.tools],
        chat_template=options.template,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        tokenize=not has_text,
        return_dict=False,
        **(options.variables or {}),
    )
    if not has_text:
        return cast(list[int], rendered)
    if len(rendered) > (options.longest or 0):
        raise ContextLengthError(
            f"the conversation has {len(rendered)} characters as the chat template writes it; no "
            f"text of more than {options.longest} fits into the model's maximum context length: "
            "shorten it"
        )
    return cast(list[int], tokenizer(rendered, add_special_tokens=False)["input_ids"])


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _message(position: int, message: Any, template: str) -> dict[str, Any]:
    """A message for templates: text content, arguments of tool calls as mappings.

    Values of None are left out, as transformers does.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(
            f"message {position} is {shown(message)}: a message has 'role' and 'content'"
        )
    _check_role(position, message["role"], template)
    plain = {}
    for key, value in message.items():
        is_known = key in _MESSAGE_KEYS or (isinstance(key, str) and template_reads(template, key))
        if not is_known and key not in _INERT_KEYS:
            raise InvalidRequestError(
                f"message {position} has the key {reprlib.repr(key)}, which the chat template "
                f"does not read; known are {', '.join(sorted(_MESSAGE_KEYS))}"
            )
        if is_known and value is not None:
            plain[key] = value
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None and not calls:
        content = message.get("refusal")
    if content is not None:
        plain["content"] = _content(position, content, template)
    elif not calls:
        raise InvalidRequestError(
            f"message {position} has neither 'content' nor 'tool_calls': give one of them"
        )
    if calls:
        plain["tool_calls"] = _tool_calls(position, calls)
    _refuse_surrogates_within(plain)
    return plain


def _check_role(position: int, role: str, template: str) -> None:
    """Raise for a role that neither the API nor the template names.

    Many templates write any role, so a misspelt role would change the prompt.
    """
    refuse_surrogates(role)
    if role not in _ROLES and not any(f"{mark}{role}{mark}" in template for mark in "'\""):
        raise InvalidRequestError(
            f"message {position} has the role {shown(role)}: it must be one of "
            f"{', '.join(_ROLES)}, or a role that the chat template names"
        )


def template_reads(template: str, name: str) -> bool:
    """True if the name occurs in the template, not as a part of another one."""
    # The first test avoids a regular expression of a name of some megabytes.
    return name in template and bool(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template))


def unread_keys(messages: Sequence[Any], template: str) -> list[str]:
    """The accepted keys of messages and their parts that the template does not read.

    Each once: `messages.id`, `messages.content.id`. Invalid messages are left to `render_chat`.
    """
    found: dict[str, None] = {}
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        found.update(dict.fromkeys(_unread_of_message(message, template)))
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            keys = _INERT_PART_KEYS & set(part) if isinstance(part, Mapping) else ()
            found.update(dict.fromkeys(f"messages.content.{key}" for key in sorted(keys)))
    return list(found)


def _unread_of_message(message: Message, template: str) -> list[str]:
    given = {key for key, value in message.items() if value is not None}
    if not (message.get("content") or message.get("tool_calls")):
        given.discard("refusal")  # it is the content
    keys = sorted(given & {*_INERT_KEYS, "reasoning", "reasoning_content"})
    return [f"messages.{key}" for key in keys if not template_reads(template, key)]


def _content(position: int, content: Any, template: str) -> str | list[Any]:
    """The content of a message as text; parts, as in OpenAI's API, become lines.

    A template that iterates over parts gets them, as texts.
    """
    if not isinstance(content, list | tuple):
        return _part(position, {"type": "text", "text": content}, content)
    texts = [_part(position, part, content) for part in content]
    if _WALKS_PARTS.search(template):
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part(position: int, part: Any, content: Any) -> str:
    """The text of a part of a message's content."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    key = kind if kind in ("text", "refusal") else None
    text = None if key is None else part.get(key)
    if not isinstance(text, str):
        found = f"a part of type {kind!r}" if kind not in (None, "text") else shown(content)
        raise InvalidRequestError(
            f"the content of message {position} is {found}: this engine takes text, as a "
            "string or as parts of type 'text'"
        )
    for name in part:
        if name not in _PART_KEYS | _INERT_PART_KEYS | {key}:
            raise InvalidRequestError(
                f"a part of the content of message {position} has the key {reprlib.repr(name)}, "
                "which would change nothing: leave it out; known are "
                f"{', '.join(sorted(_PART_KEYS))}"
            )
    return text


def _tool_calls(position: int, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise InvalidRequestError(
            f"'tool_calls' of message {position} is {shown(calls)}: it must be a list"
        )
    return [_tool_call(position, call) for call in calls]


def _tool_call(position: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f"a tool call of message {position} is {shown(call)}: it has 'function' with 'name' "
            "and 'arguments'"
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI's API gives them as JSON, templates read a mapping
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"the arguments of a tool call of message {position} are no JSON: {error}"
            ) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _refuse_surrogates_within(value: Any) -> None:
    """Raise for invalid text in mappings and lists at any depth."""
    todo, seen = [value], set()
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            refuse_surrogates(value)
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            todo += [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
