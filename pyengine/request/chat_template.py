"""Renders conversations to token ids by the model's chat template, as transformers does."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from pyengine.errors import ContextLengthError, InvalidRequestError
from pyengine.models.tokenizer.chat import chosen_template
from pyengine.request.chat_messages import (
    message_for,
    refuse_surrogates_within,
    texts_within,
    with_text_arguments,
)
from pyengine.request.prompts import shown, tokens_of
from pyengine.request.template_process import TemplateError, TimedTemplate, refusal

Message: TypeAlias = Mapping[str, Any]
"""One turn of a conversation: `role`, and `content` or `tool_calls`."""

_RESERVED = {
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
    *("max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict"),
    *("return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
}
"""Parameters of transformers' `apply_chat_template` that are no variables of a template."""


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

    `tools` are JSON schemas of functions. `template` replaces the model's own or names one of
    several, and `variables` are for it. With `continue_final_message` the model continues the last
    message. Rendering has `seconds`. The text that it gets and the text that it writes may each
    have up to `longest` characters.
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
        refuse_surrogates_within(tools)


def _has_text_keys(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


DEFAULT_CHAT = ChatOptions()


def template_text(tokenizer: Any, template: str | None = None, *, has_tools: bool = False) -> str:
    """The text of the chat template that is used; empty if there is none.

    `template` is that of a request. Of a model's several templates, it may name one.
    """
    with suppress(InvalidRequestError):
        return _template_of(tokenizer, template, has_tools=has_tools) or ""
    return ""


def _template_of(tokenizer: Any, template: str | None, *, has_tools: bool) -> str | None:
    known = getattr(tokenizer, "chat_template", None)
    try:
        return chosen_template(known, template, has_tools=has_tools)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error


def render_chat(
    messages: Sequence[Message], tokenizer: Any, options: ChatOptions = DEFAULT_CHAT
) -> list[int]:
    """The token ids of a conversation by the model's chat template, as transformers renders it.

    Raises `InvalidRequestError` for invalid messages, and with the template's error for those that
    it refuses.
    """
    template = _template_of(tokenizer, options.template, has_tools=options.tools is not None)
    if tokenizer is None or not template:
        missing = "tokenizer" if tokenizer is None else "chat template"
        raise InvalidRequestError(
            f"this model has no {missing}: use generate with a prompt written out"
        )
    given: Any = messages
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise InvalidRequestError(f"{shown(given)} is no conversation: give a list of messages")
    several = [message_for(template, at, value) for at, value in enumerate(given)]
    if not several:
        raise InvalidRequestError("the conversation is empty: it needs at least one message")
    if options.longest is not None:
        _check_length(several, options, options.longest)
    try:
        timed = TimedTemplate(template, options.seconds)
        text = _render_somehow(several, tokenizer, timed, options)
    except TemplateError as error:
        raise refusal(error) from error
    return tokens_of(text, tokenizer, add_special_tokens=False)


def _check_length(messages: Sequence[Message], options: ChatOptions, longest: int) -> None:
    """Raise `ContextLengthError` if the template gets more text than fits into the context."""
    parts: list[Any] = [list(message.values()) for message in messages]
    parts += [options.tools or [], options.variables or {}]
    length = sum(len(text) for text in texts_within(parts))
    if length > longest:
        raise ContextLengthError(
            f"messages, tools and template variables have {length} characters; no text of more "
            f"than {longest} fits into the model's maximum context length: shorten them"
        )


def _render_somehow(
    messages: list[dict[str, Any]], tokenizer: Any, template: TimedTemplate, options: ChatOptions
) -> str:
    """Render the messages in the first of the forms that the template takes."""
    variants = [messages]
    if any("tool_calls" in message for message in messages):
        variants.append(with_text_arguments(messages))
        if _adds_arguments_as_text(tokenizer, template):
            variants.reverse()
    if not all("content" in message for message in messages):  # some templates do not check it
        variants += [[{"content": "", **message} for message in variant] for variant in variants]
    errors = []
    for variant in variants:
        try:
            return _render(variant, tokenizer, template, options)
        except TemplateError as error:
            errors.append(error)
    raise errors[0]


_adding: "WeakKeyDictionary[Any, dict[str, bool]]" = WeakKeyDictionary()
"""By tokenizer and template: True if it adds the arguments of calls as text."""
_MAX_KNOWN = 16
_ARGUMENTS = {"zebra": 1}


def _adds_arguments_as_text(tokenizer: Any, template: TimedTemplate) -> bool:
    """True if the template writes the arguments of tool calls as they are, so they must be text.

    Found by rendering a small conversation in both forms.
    """
    known = _adding.setdefault(tokenizer, {})
    if template.text not in known:
        if len(known) >= _MAX_KNOWN:
            known.clear()
        as_mapping, as_text = (
            _rendered_call(tokenizer, template, arguments)
            for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS))
        )
        is_lost = "zebra" not in as_mapping or repr(_ARGUMENTS) in as_mapping
        known[template.text] = is_lost and json.dumps(_ARGUMENTS) in as_text
    return known[template.text]


def _rendered_call(tokenizer: Any, template: TimedTemplate, arguments: Any) -> str:
    """A conversation with a tool call as text; empty if the template does not take it."""
    function = {"name": "look", "arguments": arguments}
    call = {"id": "call00000", "type": "function", "function": function}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "name": "look", "content": "1"},
    ]
    options = ChatOptions(add_generation_prompt=False)
    for count in (3, 2):  # some need the result of a call, others do not take one
        with suppress(TemplateError):
            return _render(messages[:count], tokenizer, template, options)
    return ""


def _render(
    messages: list[dict[str, Any]], tokenizer: Any, template: TimedTemplate, options: ChatOptions
) -> str:
    variables = {
        **getattr(tokenizer, "special_tokens_map", {}),
        "add_generation_prompt": options.add_generation_prompt,
        **(options.variables or {}),
    }
    passed = {
        "tools": None if options.tools is None else list(options.tools),
        "continue_final_message": options.continue_final_message,
        "variables": variables,
    }
    return template.render(messages, passed, options.longest)
