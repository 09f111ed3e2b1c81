"""Thinking that the next turn of a conversation leaves out: its blocks need not stay cached.

    prompt of this turn | <think> reasons </think> | answer
    prompt of the next  | answer ...

The two agree up to the first token of the thinking, so a later turn cannot reuse a block with any
token from there on.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from pyengine.errors import InvalidRequestError
from pyengine.request.chat_template import ChatOptions, render_chat, template_text
from pyengine.request.prompts import StrippedThinking
from pyengine.request.untrusted_calls import tokenizer_errors
from pyengine.sampling.thinking_budget import ThinkingMarkers

_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""The tokens around the thinking of models."""
_CALL = "<tool_call>"
_REASONS = "zebra"
"""Thinking of a made conversation."""
_MAX_KNOWN = 16
"""Answers that are kept for each tokenizer."""


_known: "WeakKeyDictionary[Any, dict[str, StrippedThinking | None]]" = WeakKeyDictionary()


def stripped_thinking(tokenizer: Any, options: ChatOptions) -> StrippedThinking | None:
    """The thinking that the chat template leaves out of the next turn; None if there is none.

    It renders a small conversation with thinking to learn this.
    """
    has_tools = options.tools is not None
    template = template_text(tokenizer, options.template, has_tools=has_tools)
    mark = next((mark for mark in _MARKS if mark[1] in template), None)
    if mark is None or options.continue_final_message or not options.add_generation_prompt:
        return None
    known = _known.setdefault(tokenizer, {})
    key = repr((template, options.variables, has_tools))
    if key not in known:
        if len(known) == _MAX_KNOWN:
            known.clear()
        try:
            plain = replace(options, template=template, tools=None)
            known[key] = _find(tokenizer, plain, mark, has_tools=has_tools)
        except InvalidRequestError:  # a template that does not take such a conversation
            known[key] = None
    return known[key]


def thinking_markers(tokenizer: Any) -> ThinkingMarkers:
    """The tokens around the thinking of a model: single ones, or those of its chat template.

    Raises `InvalidRequestError` if there are none.
    """
    if tokenizer is not None:
        template = template_text(tokenizer)
        for begin, end in _MARKS:
            ids = _tokens(tokenizer, begin), _tokens(tokenizer, end)
            if all(ids) and (end in template or len(ids[1]) == 1):
                return ThinkingMarkers(*ids)
    known = ", ".join(end for _, end in _MARKS)
    raise InvalidRequestError(
        "thinking_token_budget needs a model that marks the end of its thinking, with one of "
        f"{known}: leave it out, or use max_tokens"
    )


def _tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The tokens of a text; none if they do not spell it."""
    with tokenizer_errors():
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        spelled = tokenizer.decode(token_ids, skip_special_tokens=False)
    return tuple(map(int, token_ids)) if spelled == text else ()


def _find(
    tokenizer: Any, options: ChatOptions, mark: tuple[str, str], *, has_tools: bool
) -> StrippedThinking | None:
    begin, end = (_token(tokenizer, text) for text in mark)
    if begin is None or end is None:
        return None
    user, after = {"role": "user", "content": "Hello"}, {"role": "user", "content": "More"}
    thinking = f"{mark[0]}\n{_REASONS}\n{mark[1]}\n\n"
    turn = {"role": "assistant", "content": "Hi"}
    if _keeps(tokenizer, options, [user, turn, after], thinking):
        return None
    whole = render_chat([user], tokenizer, options)
    bare = render_chat([user], tokenizer, replace(options, add_generation_prompt=False))
    tail = whole[len(bare) :]
    num_tail = len(tail) - tail.index(begin) if begin in tail else 0
    call = None
    if has_tools:
        call = _token(tokenizer, _CALL)
        function = {"name": "look", "arguments": {}}
        calls = {**turn, "tool_calls": [{"type": "function", "function": function}]}
        result = {"role": "tool", "content": "1"}
        if not _keeps(tokenizer, options, [user, calls, result], thinking):
            call = None
        elif call is None:  # a call looks like an answer
            return None
    return StrippedThinking(begin, end, call, num_tail)


def _keeps(
    tokenizer: Any, options: ChatOptions, messages: list[dict[str, Any]], thinking: str
) -> bool:
    """True if the template writes the thinking of the assistant, in whichever way it is sent."""
    user, turn, after = messages
    fields: Mapping[str, str] = dict.fromkeys(("reasoning", "reasoning_content"), _REASONS)
    for sent in ({**turn, "content": thinking + turn["content"]}, {**turn, **fields}):
        rendered = render_chat([user, sent, after], tokenizer, options)
        if _REASONS in tokenizer.decode(rendered):
            return True
    return False


def _token(tokenizer: Any, text: str) -> int | None:
    """The token of a text; None if it takes several."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return int(token_ids[0]) if len(token_ids) == 1 else None
