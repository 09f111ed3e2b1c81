"""Conversations become token ids, or are refused by what is wrong with them."""

from collections.abc import Iterator, Mapping
from time import process_time
from types import MappingProxyType
from typing import Any

import pytest

from pyengine.errors import InvalidRequestError
from pyengine.request.chat_template import ChatOptions, as_conversations, render_chat
from tests.support import chat
from tests.support.chat import by_template, chat_tokenizer
from tests.support.versions import IS_TRANSFORMERS_5_17

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


def test_one_conversation_or_several() -> None:
    assert as_conversations([USER]) == [[USER]]
    assert as_conversations([[USER], [USER]]) == [[USER], [USER]]
    assert as_conversations(item for item in [USER]) == [[USER]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "template",
    [chat.CHATML, chat.CONCATENATES, chat.LOOKS_FOR_CONTENT, chat.NO_SYSTEM, chat.WALKS_PARTS],
)
def test_plain_messages_are_rendered_as_transformers_renders_them(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    several = [USER, {"role": "assistant", "content": " Hi!\n"}, USER]
    assert render_chat(several, tokenizer) == by_template(tokenizer, several)
    plain = render_chat(several, tokenizer, ChatOptions(add_generation_prompt=False))
    assert plain == by_template(tokenizer, several, add_generation_prompt=False)


@pytest.mark.parametrize("template", [chat.CHATML, chat.LOOKS_FOR_CONTENT])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_calls_without_content(template: str, content: dict[str, Any]) -> None:
    tokenizer = chat_tokenizer(template)
    conversation = [USER, {**ASKS[1], **content}, ANSWERED[2]]
    messages = conversation
    if IS_TRANSFORMERS_5_17:  # it writes "None" where there is no content
        messages = [
            {name: item[name] for name in item if item[name] is not None} for item in messages
        ]
    assert render_chat(conversation, tokenizer) == by_template(tokenizer, messages)


def test_a_template_that_needs_content_gets_an_empty_one() -> None:
    tokenizer = chat_tokenizer(chat.CONCATENATES)
    expected = by_template(tokenizer, [USER, {"role": "assistant", "content": ""}])
    assert render_chat(ASKS, tokenizer) == expected


@pytest.mark.parametrize("arguments", ['{"a": 1, "b": 2}', {"a": 1, "b": 2}])
def test_arguments_of_calls_may_be_json(arguments: Any, tokenizer: Any) -> None:
    call = {**CALL, "function": {"name": "add", "arguments": arguments}}
    conversation = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    ids = render_chat(conversation, tokenizer)
    assert ids == by_template(tokenizer, ASKS)
    assert '"arguments": {"a": 1, "b": 2}}' in rendered(tokenizer, ids)


def test_arguments_may_be_missing(tokenizer: Any) -> None:
    for function in ({"name": "now"}, {"name": "now", "arguments": ""}):
        message = {"role": "assistant", "tool_calls": [{"function": function}]}
        assert '"arguments": {}}' in rendered(tokenizer, render_chat([USER, message], tokenizer))


def test_what_is_none_is_left_out(tokenizer: Any) -> None:
    message = {**USER, "name": None, "tool_calls": None, "tool_call_id": None}
    assert render_chat([message], tokenizer) == by_template(tokenizer, [USER])


def test_tools(tokenizer: Any) -> None:
    ids = render_chat([USER], tokenizer, ChatOptions(tools=[MappingProxyType(TOOL)]))
    assert ids == by_template(tokenizer, [USER], tools=[TOOL])
    assert '"name": "add"' in rendered(tokenizer, ids)
    assert render_chat([USER], tokenizer, ChatOptions(tools=[])) == by_template(tokenizer, [USER])


def test_variables(tokenizer: Any) -> None:
    ids = render_chat([USER], tokenizer, ChatOptions(variables={"enable_thinking": False}))
    assert ids == by_template(tokenizer, [USER], enable_thinking=False)
    assert rendered(tokenizer, ids).endswith("</think>\n\n")


def test_a_message_that_is_to_be_continued(tokenizer: Any) -> None:
    conversation = [USER, {"role": "assistant", "content": "The sum is"}]
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    ids = render_chat(conversation, tokenizer, options)
    assert ids == by_template(
        tokenizer, conversation, add_generation_prompt=False, continue_final_message=True
    )
    assert rendered(tokenizer, ids).endswith("The sum is")


@pytest.mark.parametrize("own", [chat.CHATML, None])
def test_another_template(own: str | None) -> None:
    tokenizer = chat_tokenizer(own)
    ids = render_chat([USER], tokenizer, ChatOptions(template=chat.CONCATENATES))
    assert rendered(tokenizer, ids) == "[user]Hello 東京\n[assistant]"


NAMED = {"default": chat.CHATML, "tool_use": chat.CONCATENATES + "{{ tools[0].function.name }}"}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.mark.parametrize("template", [None, "tool_use", chat.CONCATENATES])
@pytest.mark.parametrize("tools", [None, [LOOK]])
def test_one_of_several_templates_by_name_by_tools_or_the_default(
    template: str | None, tools: Any
) -> None:
    tokenizer = chat_tokenizer(NAMED)
    if template == "tool_use" and tools is None:
        pytest.skip("it reads them")
    ids = render_chat([USER], tokenizer, ChatOptions(template=template, tools=tools))
    assert ids == by_template(tokenizer, [USER], chat_template=template, tools=tools)


def test_several_templates_with_quotes_of_both_kinds_and_an_error_in_another() -> None:
    quoted = """{{ '"' ~ messages[0]['content'] ~ "'" }}"""
    tokenizer = chat_tokenizer({"default": quoted, "other": "{{ 1 / 0 }}"})
    assert rendered(tokenizer, render_chat([USER], tokenizer)) == "\"Hello 東京'"
    with pytest.raises(InvalidRequestError, match="division by zero"):
        render_chat([USER], tokenizer, ChatOptions(template="other"))


def test_several_templates_without_a_default_are_refused() -> None:
    tokenizer = chat_tokenizer({"rag": chat.CONCATENATES, "tool_use": chat.CONCATENATES})
    with pytest.raises(InvalidRequestError, match="rag, tool_use, and none is the default"):
        render_chat([USER], tokenizer)
    assert render_chat([USER], tokenizer, ChatOptions(template="rag"))


def test_content_in_parts_is_a_line_each(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "World"}]
    ids = render_chat([{"role": "user", "content": parts}], tokenizer)
    assert ids == by_template(tokenizer, [{"role": "user", "content": "Hello\nWorld"}])


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
    assert ids == by_template(tokenizer, conversation)
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
    assert render_chat([_Odd()], tokenizer) == by_template(tokenizer, [USER])


def assistant(**keys: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", **keys}]


BAD_MESSAGES: dict[str, tuple[Any, str]] = {
    "no list": (5, "5 .int. is no conversation"),
    "text": ("Hello", "'Hello' .str. is no conversation"),
    "a message alone": (USER, ".dict. is no conversation"),
    "nothing": ([], "the conversation is empty"),
    "text as a message": (["Hello"], "message 0 is 'Hello' .str.: a message has 'role' and"),
    "no role": ([USER, {"content": "x"}], "message 1 is .*: a message has 'role'"),
    "a number as role": ([{"role": 5, "content": "x"}], "message 0 is"),
    "no content": ([{"role": "user"}], "message 0 has neither 'content' nor 'tool_calls'"),
    "an unknown key with spaces": (assistant(content="x", **{"a b": 1}), "the key 'a b'"),
    "a long unknown key": (assistant(content="x", **{"a" * 65: 1}), "has the key 'aaa"),
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
        ("{{ range(10 * 10000000) | list }}", [USER], "Range too big"),
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


@pytest.mark.parametrize(
    "message", [{"role": "x" * 3_000_000}, {"role": "user", "y" * 3_000_000: 1}]
)
def test_long_names_are_refused_at_once(message: dict[str, Any], tokenizer: Any) -> None:
    """No regular expression is made of a client's name: for 3 MB that takes seconds."""
    start = process_time()
    with pytest.raises(InvalidRequestError, match="message 0 has the"):
        render_chat([{"content": "x", **message}], tokenizer)
    assert process_time() - start < 0.5
