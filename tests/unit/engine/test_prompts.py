"""Prompts and conversations become token ids, or are refused by what is wrong with them."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from pyengine.core import SamplingParams
from pyengine.core.errors import InvalidRequestError
from pyengine.engine.prompts import (
    ChatOptions,
    as_conversations,
    as_list,
    match_params,
    parse_prompt,
    render_chat,
    salt_namespace,
)
from tests.support import chat
from tests.support.chat import as_transformers, chat_tokenizer

USER = {"role": "user", "content": "Hello 東京"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
ASKS = [USER, {"role": "assistant", "tool_calls": [CALL]}]
ANSWERED = [*ASKS, {"role": "tool", "content": "3", "tool_call_id": "1"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat_tokenizer(chat.CHATML)


def rendered(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids))


# ---- prompts


@pytest.mark.parametrize(
    "prompt",
    [
        [3, 4, 5],
        (3, 4, 5),
        range(3, 6),
        iter([3, 4, 5]),
        np.array([3, 4, 5], np.uint8),
        torch.tensor([3, 4, 5]),
        [np.int64(3), 4, np.uint16(5)],
        {"prompt_token_ids": [3, 4, 5]},
        MappingProxyType({"prompt_token_ids": (3, 4, 5)}),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_token_ids_in_every_form_are_one_array(prompt: Any) -> None:
    parsed = parse_prompt(prompt, None)
    assert np.asarray(parsed.token_ids).dtype == np.int64
    assert list(parsed.token_ids) == [3, 4, 5]
    assert (parsed.text, parsed.namespace) == (None, b"")


def test_an_array_is_copied() -> None:
    given = np.array([3, 4, 5])
    parsed = parse_prompt(given, None)
    given[0] = 9
    assert list(parsed.token_ids) == [3, 4, 5]


def test_text_is_encoded_and_kept(tokenizer: Any) -> None:
    for prompt in ("Hello 東京", {"prompt": "Hello 東京"}):
        parsed = parse_prompt(prompt, tokenizer)
        assert list(parsed.token_ids) == tokenizer.encode("Hello 東京")
        assert parsed.text == "Hello 東京"


def test_given_ids_are_not_encoded_again(tokenizer: Any) -> None:
    parsed = parse_prompt({"prompt": "Hello", "prompt_token_ids": [7]}, tokenizer)
    assert (list(parsed.token_ids), parsed.text) == ([7], "Hello")


def test_a_salt_is_a_namespace() -> None:
    assert (
        parse_prompt({"prompt_token_ids": [1], "cache_salt": "é"}, None).namespace == "é".encode()
    )
    assert salt_namespace(None) == b""


def test_one_prompt_or_several() -> None:
    assert as_list("text") == ["text"]
    assert as_list({"prompt": "text"}) == [{"prompt": "text"}]
    assert as_list([1, 2]) == [[1, 2]]
    assert as_list([[1, 2], "text"]) == [[1, 2], "text"]
    assert as_list(one for one in ("a", "b")) == ["a", "b"]
    assert [list(row) for row in as_list(np.array([[1, 2], [3, 4]]))] == [[1, 2], [3, 4]]  # type: ignore[arg-type]
    assert as_list([]) == []


class _OnADevice:
    """An array that cannot be had here."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("it is on a device")


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "None": (None, "None .NoneType. is no prompt"),
    "a float": (1.5, "1.5 .float. is no prompt"),
    "bytes": (b"ab", "b'ab' .bytes. is no prompt"),
    "a set": ({1}, "is no prompt"),
    "floats": ([1.0], "found 1.0 .float. at position 0"),
    "a bool": ([1, True], "found True .bool. at position 1"),
    "None among ids": ([1, None], "found None .NoneType. at position 1"),
    "two dimensions": (np.zeros((2, 2), int), r"token ids of shape \(2, 2\): one prompt has one"),
    "no dimension": (np.array(5), r"an array of int64 and shape \(\) is no prompt"),
    "an array of text": (np.array(["a"]), "an array of <U1"),
    "out of reach": (_OnADevice(), "_OnADevice cannot be read as token ids: it is on a device"),
    "above int64": ([0, 2**63], "token id 9223372036854775808 .int. at position 1"),
    "below int64": ([-(2**64)], "at position 0 of the prompt is outside of any vocabulary"),
    "above int64, unsigned": (np.array([2**64 - 1], np.uint64), "18446744073709551615 is outside"),
    "nothing in a mapping": ({}, r"has 'prompt' or 'prompt_token_ids', this one has \[\]"),
    "a salt alone": ({"cache_salt": "x"}, r"this one has \['cache_salt'\]"),
    "unknown": ({"prompt": "x", "multi_modal_data": {}}, "'multi_modal_data' in a prompt is not"),
    "an unknown number": ({"prompt": "x", 5: 1}, "5 in a prompt is not known"),
    "no text": ({"prompt": [1]}, r"'prompt' is \[1\] .list.: it must be text"),
    "text as ids": ({"prompt_token_ids": "text"}, "'text' .str. is no prompt"),
    "an empty salt": ({"prompt": "x", "cache_salt": ""}, "cache_salt='' .str.: it must be text of"),
    "a number as salt": ({"prompt": "x", "cache_salt": 5}, "cache_salt=5 .int."),
    "half a character as salt": ({"prompt": "x", "cache_salt": "\ud800"}, "is no valid Unicode"),
    "half a character": ("ab\ud83d", r"the text has '\\ud83d' at position 2"),
}


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_what_is_no_prompt_is_refused(prompt: Any, message: str, tokenizer: Any) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse_prompt(prompt, tokenizer)


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'Hello' is text and this model has no tokenize"):
        parse_prompt("Hello", None)


def test_parameters_for_all_or_one_each() -> None:
    default, other = SamplingParams(max_tokens=3), SamplingParams(max_tokens=4)
    assert match_params(None, 2, default) == [default] * 2
    assert match_params(other, 2, default) == [other] * 2
    assert match_params((one for one in (other, default)), 2, other) == [other, default]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 0}, "sampling_params holds 'temperature' .str."),
        ([SamplingParams(), None], "sampling_params holds None"),
        (5, "sampling_params holds 5 .int."),
        ([SamplingParams()], "1 sampling_params for 2 prompts"),
        ([SamplingParams()] * 3, "3 sampling_params for 2 prompts"),
    ],
)
def test_other_parameters_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        match_params(given, 2, SamplingParams())


# ---- conversations


def test_one_conversation_or_several() -> None:
    assert as_conversations([USER]) == [[USER]]
    assert as_conversations([[USER], [USER]]) == [[USER], [USER]]
    assert as_conversations(one for one in [USER]) == [[USER]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "template",
    [chat.CHATML, chat.CONCATENATES, chat.LOOKS_FOR_CONTENT, chat.NO_SYSTEM, chat.WALKS_PARTS],
)
def test_plain_messages_are_rendered_as_transformers_renders_them(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    several = [USER, {"role": "assistant", "content": " Hi!\n"}, USER]
    assert render_chat(several, tokenizer) == as_transformers(tokenizer, several)
    plain = render_chat(several, tokenizer, ChatOptions(add_generation_prompt=False))
    assert plain == as_transformers(tokenizer, several, add_generation_prompt=False)


@pytest.mark.parametrize("template", [chat.CHATML, chat.LOOKS_FOR_CONTENT])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_calls_without_content(template: str, content: dict[str, Any]) -> None:
    tokenizer = chat_tokenizer(template)
    conversation = [USER, {**ASKS[1], **content}, ANSWERED[2]]
    assert render_chat(conversation, tokenizer) == as_transformers(tokenizer, conversation)


def test_a_template_that_needs_content_gets_an_empty_one() -> None:
    tokenizer = chat_tokenizer(chat.CONCATENATES)
    expected = as_transformers(tokenizer, [USER, {"role": "assistant", "content": ""}])
    assert render_chat(ASKS, tokenizer) == expected


@pytest.mark.parametrize("arguments", ['{"a": 1, "b": 2}', {"a": 1, "b": 2}])
def test_arguments_of_calls_may_be_json(arguments: Any, tokenizer: Any) -> None:
    call = {**CALL, "function": {"name": "add", "arguments": arguments}}
    conversation = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    ids = render_chat(conversation, tokenizer)
    assert ids == as_transformers(tokenizer, ASKS)
    assert '"arguments": {"a": 1, "b": 2}}' in rendered(tokenizer, ids)


def test_arguments_may_be_missing(tokenizer: Any) -> None:
    for function in ({"name": "now"}, {"name": "now", "arguments": ""}):
        message = {"role": "assistant", "tool_calls": [{"function": function}]}
        assert '"arguments": {}}' in rendered(tokenizer, render_chat([USER, message], tokenizer))


def test_what_is_none_is_left_out(tokenizer: Any) -> None:
    message = {**USER, "name": None, "tool_calls": None, "tool_call_id": None}
    assert render_chat([message], tokenizer) == as_transformers(tokenizer, [USER])


def test_tools(tokenizer: Any) -> None:
    ids = render_chat([USER], tokenizer, ChatOptions(tools=[MappingProxyType(TOOL)]))
    assert ids == as_transformers(tokenizer, [USER], tools=[TOOL])
    assert '"name": "add"' in rendered(tokenizer, ids)
    assert render_chat([USER], tokenizer, ChatOptions(tools=[])) == as_transformers(
        tokenizer, [USER]
    )


def test_variables(tokenizer: Any) -> None:
    ids = render_chat([USER], tokenizer, ChatOptions(variables={"enable_thinking": False}))
    assert ids == as_transformers(tokenizer, [USER], enable_thinking=False)
    assert rendered(tokenizer, ids).endswith("</think>\n\n")


def test_a_message_that_is_to_be_continued(tokenizer: Any) -> None:
    conversation = [USER, {"role": "assistant", "content": "The sum is"}]
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    ids = render_chat(conversation, tokenizer, options)
    assert ids == as_transformers(
        tokenizer, conversation, add_generation_prompt=False, continue_final_message=True
    )
    assert rendered(tokenizer, ids).endswith("The sum is")


@pytest.mark.parametrize("own", [chat.CHATML, None])
def test_another_template(own: str | None) -> None:
    tokenizer = chat_tokenizer(own)
    ids = render_chat([USER], tokenizer, ChatOptions(template=chat.CONCATENATES))
    assert rendered(tokenizer, ids) == "[user]Hello 東京\n[assistant]"


def test_content_in_parts_is_a_line_each(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "World"}]
    ids = render_chat([{"role": "user", "content": parts}], tokenizer)
    assert ids == as_transformers(tokenizer, [{"role": "user", "content": "Hello\nWorld"}])


@pytest.mark.parametrize(
    "template",
    [
        chat.WALKS_PARTS,
        chat.WALKS_PARTS.replace("in message.content", "in message['content']"),
        chat.WALKS_PARTS.replace(
            "{% for part in message.content",
            "{% set content = message.content %}{% for part in content",
        ),
    ],
)
def test_templates_that_walk_through_parts_get_them(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "World"}]
    conversation = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Hi"}]
    ids = render_chat(conversation, tokenizer)
    assert ids == as_transformers(tokenizer, conversation)
    assert "(Hello)(World)" in rendered(tokenizer, ids)


def test_keys_that_the_template_reads_are_no_strangers() -> None:
    tokenizer = chat_tokenizer(
        "{% for m in messages %}{{ m['mood'] }}: {{ m.content }}{% endfor %}"
    )
    ids = render_chat([{**USER, "mood": "glad"}], tokenizer)
    assert rendered(tokenizer, ids) == "glad: Hello 東京"


class _Odd(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __getitem__(self, key: str) -> Any:
        return USER[key]

    def __iter__(self) -> Iterator[str]:
        return iter(USER)

    def __len__(self) -> int:
        return len(USER)


def test_messages_may_be_any_mapping(tokenizer: Any) -> None:
    assert render_chat([_Odd()], tokenizer) == as_transformers(tokenizer, [USER])


def assistant(**keys: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", **keys}]


DEEP = "[" * 200_000
BAD_MESSAGES: dict[str, tuple[Any, str]] = {
    "no list": (5, "5 .int. is no conversation"),
    "text": ("Hello", "'Hello' .str. is no conversation"),
    "a message alone": (USER, ".dict. is no conversation"),
    "nothing": ([], "the conversation is empty"),
    "text as a message": (["Hello"], "message 0 is 'Hello' .str.: a message has 'role' and"),
    "no role": ([USER, {"content": "x"}], "message 1 is .*: a message has 'role'"),
    "a number as role": ([{"role": 5, "content": "x"}], "message 0 is"),
    "no content": ([{"role": "user"}], "message 0 has neither 'content' nor 'tool_calls'"),
    "no calls": (assistant(tool_calls=[]), "message 1 has neither"),
    "an unknown key": ([{**USER, "images": []}], "message 0 has the key 'images', which the chat"),
    "a part of a known key": ([{**USER, "tool_call": []}], "message 0 has the key 'tool_call'"),
    "a number as key": ([{**USER, 5: "x"}], "message 0 has the key 5"),
    "a number as content": ([{"role": "user", "content": 5}], "content of message 0 is 5 .int."),
    "an image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        "the content of message 0 is a part of type 'image_url': this engine takes text",
    ),
    "a part that is text": ([{"role": "user", "content": ["x"]}], r"message 0 is \['x'\] .list."),
    "a part without text": ([{"role": "user", "content": [{"type": "text"}]}], "message 0 is"),
    "half a character": ([{"role": "user", "content": "a\udc00"}], r"'\\udc00' at position 1"),
    "half a character in a part": (
        [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}],
        r"the text has '\\ud800' at position 0",
    ),
    "half a character as role": ([{"role": "\ud800", "content": "x"}], r"the text has '\\ud800'"),
    "half a character in a call": (
        assistant(tool_calls=[{"function": {"name": "f", "arguments": r'{"a": ["\ud800"]}'}}]),
        r"the text has '\\ud800'",
    ),
    "a number as calls": (assistant(tool_calls=5), "'tool_calls' of message 1 is 5 .int.: it must"),
    "a call as calls": (assistant(tool_calls=CALL), "'tool_calls' of message 1 is .*a list"),
    "a call of text": (assistant(tool_calls=["f"]), "a tool call of message 1 is 'f' .str."),
    "a call without a name": (assistant(tool_calls=[{"function": {}}]), "'function' with 'name'"),
    "no JSON": (
        assistant(tool_calls=[{"function": {"name": "f", "arguments": "{a: 1}"}}]),
        "the arguments of a tool call of message 1 are no JSON: Expecting property name",
    ),
    "JSON too deep": (
        assistant(tool_calls=[{"function": {"name": "f", "arguments": DEEP}}]),
        "the arguments of a tool call of message 1 are no JSON",
    ),
}


@pytest.mark.parametrize(("messages", "text"), BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_what_is_no_conversation_is_refused(messages: Any, text: str, tokenizer: Any) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        render_chat(messages, tokenizer)


@pytest.mark.parametrize("several", [5, "text", b"text", USER])
def test_what_is_no_list_of_messages_is_refused(several: Any) -> None:
    with pytest.raises(InvalidRequestError, match="is no conversation: give a list of messages"):
        as_conversations(several)


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (chat.NO_SYSTEM, [{"role": "system", "content": "x"}, USER], "System role not supported"),
        (chat.NO_SYSTEM, [USER, USER], "Conversation roles must alternate user/assistant"),
        ("{{ messages[0].content / 2 }}", [USER], "unsupported operand"),
        ("{{ 1 / 0 }}", [USER], "division by zero"),
        ("{% for", [USER], "unexpected end of template|Expected an expression|unexpected"),
        ("{{ nothing.at.all }}", [USER], "'nothing' is undefined"),
        ("{{ range(10 ** 9) | list }}", [USER], "Range too big"),
    ],
)
def test_what_a_template_refuses_is_refused_in_its_words(
    template: str, messages: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as error:
        render_chat(messages, chat_tokenizer(template))
    assert "the model's chat template does not take this conversation" in str(error.value)


def test_without_a_template_or_a_tokenizer() -> None:
    with pytest.raises(InvalidRequestError, match="has no chat template: use generate"):
        render_chat([USER], chat_tokenizer(None))
    with pytest.raises(InvalidRequestError, match="has no tokenizer: use generate"):
        render_chat([USER], None, ChatOptions(template=chat.CHATML))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"continue_final_message": True}, "continue_final_message=True goes on with the last"),
        ({"template": ""}, "chat_template='' .str.: it must be a Jinja template"),
        ({"template": 5}, "chat_template=5 .int."),
        ({"variables": "x"}, "chat_template_kwargs='x' .str.: it must be a mapping"),
        ({"variables": {5: 1}}, "chat_template_kwargs={5: 1}"),
        ({"variables": {"tools": []}}, "'tools' cannot be set by chat_template_kwargs"),
        ({"variables": {"truncation": True}}, "'truncation' cannot be set by chat_template_kwargs"),
        ({"tools": TOOL}, "tools=.*: it must be a list of JSON schemas"),
        ({"tools": 5}, "tools=5 .int."),
        ({"tools": [print]}, "tools=.<built-in function print>"),
        ({"tools": [{"type": "\ud800"}]}, r"the text has '\\ud800'"),
    ],
)
def test_options_that_are_none_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        ChatOptions(**options)
