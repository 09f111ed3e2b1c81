"""Messages of every server and client, for templates of every kind."""

import json
from typing import Any

import pytest

from pyengine.request.chat_messages import unread_keys
from pyengine.request.chat_template import ChatOptions, render_chat
from tests.support import chat
from tests.support.chat import by_template, chat_tokenizer

USER = {"role": "user", "content": "Hello"}
TEXT = '{"a":1, "b": "é"}'
VALUE = {"a": 1, "b": "é"}
DUMPED = '{"a": 1, "b": "é"}'

READS: dict[str, tuple[str, str]] = {
    "+": ("{{ 'x' + c.function.arguments + 'y' }}", "x%sy"),
    "+, by name": ("{{ '```json\n' + c['function']['arguments'] }}", "```json\n%s"),
    "+ behind": ("{{ c.function.arguments + 'y' }}", "%sy"),
    "~": ("{{ 'x' ~ c.function.arguments ~ 'y' }}", "x%sy"),
    "output": ("{{ c.function.arguments }}", "%s"),
    "string": ("{{ c.function.arguments | string }}", "%s"),
    "trim": ("{{ c.function.arguments | trim }}", "%s"),
    "replace": ("{{ c.function.arguments | replace('zzz', '') }}", "%s"),
    "join": ("{{ ['x', c.function.arguments] | join(' ') }}", "x %s"),
    "format": ("{{ '<%s>' | format(c.function.arguments) }}", "<%s>"),
    "tojson": ("{{ c.function.arguments | tojson }}", DUMPED),
    "tojson of the function": ("{{ c.function | tojson }}", '{"name": "f", "arguments": ' + DUMPED),
    "either": (
        "{% if c.function.arguments is string %}s{% else %}"
        "{{ c.function.arguments | tojson }}{% endif %}",
        DUMPED,
    ),
    "mapping": ("{{ c.function.arguments is mapping }}", "True"),
    "items": (
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
        "a=1;b=é;",
    ),
    "items by a filter": (
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}",
        "a=1;b=é;",
    ),
    "by key": ("{{ c.function.arguments.b }}", "é"),
}


def tokenizer_of(expression: str) -> Any:
    return chat_tokenizer(
        "{% for m in messages %}{% for c in m.tool_calls %}"
        + expression
        + "{% endfor %}{% endfor %}"
    )


def calling(arguments: Any, **call: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}, **call}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize("arguments", [TEXT, VALUE], ids=["text", "mapping"])
@pytest.mark.parametrize(("expression", "expected"), READS.values(), ids=READS)
def test_templates_read_arguments_as_text_and_as_a_mapping(
    expression: str, expected: str, arguments: Any
) -> None:
    """As text they are what the model wrote, if the client has sent that."""
    tokenizer = tokenizer_of(expression)
    found = tokenizer.decode(render_chat(calling(arguments), tokenizer))
    text = TEXT if arguments == TEXT else DUMPED
    assert found.startswith(expected.replace("%s", text)), found


@pytest.mark.parametrize("arguments", [None, "", "null", "{}", {}])
def test_no_arguments_are_an_empty_object(arguments: Any) -> None:
    for expression in ("{{ c.function.arguments | tojson }}", "{{ 'x' + c.function.arguments }}"):
        tokenizer = tokenizer_of(expression)
        found = tokenizer.decode(render_chat(calling(arguments), tokenizer))
        assert found.removeprefix("x") == "{}"


@pytest.mark.parametrize("arguments", ["{a: 1}", '{"a": NaN}', '{"a": "cut', "[" * 200_000, "[1]"])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    """Models write such arguments, and a conversation goes on with them."""
    tokenizer = tokenizer_of("{{ ('x' + c.function.arguments)[:50] }}")
    found = tokenizer.decode(render_chat(calling(arguments), tokenizer))
    assert found == ("x" + arguments)[:50]


STRICT = """\
{% for m in messages %}{% if m.tool_calls %}{% if not loop.last %}\
{{ raise_exception('a result must not follow') if messages[loop.index].role == 'tool' }}{% endif %}\
{{ m.content + '<' + m.tool_calls[0].function.arguments + '>' }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_template_may_need_both_text_and_content(content: dict[str, Any]) -> None:
    tokenizer = chat_tokenizer(STRICT)
    messages = calling(TEXT)
    messages[1] = {**messages[1], **content}
    assert tokenizer.decode(render_chat(messages, tokenizer)) == f"<{TEXT}>"


OWN_PROMPT = """\
{% if messages[0].role != 'system' %}[system]You are helpful.{% endif %}\
{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"""
"""Of the kind that SmolLM2 and Qwen2.5 have: it has a system prompt of its own."""
NAMES_DEVELOPER = OWN_PROMPT.replace("!= 'system'", "not in ['system', 'developer']")
NAMES_TOOL = (
    "{% for m in messages %}{% if m.role == 'tool' %}<{{ m.content }}>{% endif %}{% endfor %}"
)


def text_of(template: str, messages: list[dict[str, Any]]) -> str:
    tokenizer = chat_tokenizer(template)
    options = ChatOptions(add_generation_prompt=False)
    return str(tokenizer.decode(render_chat(messages, tokenizer, options)))


def test_the_developer_is_the_system_where_the_template_knows_no_developer() -> None:
    asks = [{"role": "developer", "content": "Be brief."}, USER]
    assert text_of(OWN_PROMPT, asks) == "[system]Be brief.[user]Hello"
    assert text_of(NAMES_DEVELOPER, asks) == "[developer]Be brief.[user]Hello"
    assert text_of(OWN_PROMPT, [*asks, asks[0]]).endswith("[user]Hello[system]Be brief.")
    assert text_of(OWN_PROMPT, [USER]) == "[system]You are helpful.[user]Hello"


def test_the_result_of_a_function_is_that_of_a_tool() -> None:
    result = {"role": "function", "name": "f", "content": "3"}
    assert text_of(NAMES_TOOL, [USER, result]) == "<3>"
    assert text_of(OWN_PROMPT, [USER, result]).endswith("[function]3")
    assert text_of(NAMES_TOOL.replace("'tool'", "'function'"), [USER, result]) == "<3>"


def test_a_function_call_is_a_call_of_a_tool() -> None:
    tokenizer = chat_tokenizer(chat.CHATML)
    called = {"name": "f", "arguments": TEXT}
    old = [USER, {"role": "assistant", "content": None, "function_call": called}]
    assert render_chat(old, tokenizer) == by_template(
        tokenizer,
        [USER, {"role": "assistant", "tool_calls": [{"function": {**called, "arguments": VALUE}}]}],
    )
    assert unread_keys(old, chat.CHATML) == []


ANSWERS: dict[str, dict[str, Any]] = {
    "openai": {
        "content": "Hi",
        "refusal": None,
        "role": "assistant",
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    },
    "vllm": {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [],
        "reasoning": "Hm.",
        "reasoning_content": "Hm.",
    },
    "sglang": {"role": "assistant", "content": "Hi", "reasoning_content": None, "tool_calls": None},
    "litellm": {
        "content": "Hi",
        "role": "assistant",
        "tool_calls": None,
        "function_call": None,
        "provider_specific_fields": {"citations": None},
        "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}],
        "images": [],
    },
    "openrouter": {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "reasoning": "Hm.",
        "reasoning_details": [{"type": "reasoning.text", "text": "Hm.", "format": None}],
    },
    "audio": {"role": "assistant", "content": "Hi", "audio": {"id": "audio_1", "data": ""}},
    "parts": {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": None},
        ],
    },
    "parts of mistral": {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}], "closed": True},
            {"type": "text", "text": "Hi", "citations": None},
        ],
        "prefix": False,
    },
    "groq": {"role": "assistant", "content": "Hi", "executed_tools": [], "channel": "final"},
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("template", [chat.CHATML, chat.CONCATENATES])
def test_answers_of_other_servers_go_back_into_the_conversation(
    answer: dict[str, Any], template: str
) -> None:
    tokenizer = chat_tokenizer(template)
    plain = [USER, {"role": "assistant", "content": "Hi"}, USER]
    assert render_chat([USER, answer, USER], tokenizer) == by_template(tokenizer, plain)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"content": None},
        {"content": None, "tool_calls": []},
        {"content": []},
        {"content": None, "reasoning_content": "Hm."},
        {"content": None, "reasoning_details": [{"type": "reasoning.encrypted"}]},
    ],
)
def test_an_answer_without_content_is_empty(keys: dict[str, Any]) -> None:
    """As one that was cut while the model was thinking."""
    tokenizer = chat_tokenizer(chat.CONCATENATES)
    found = render_chat([USER, {"role": "assistant", **keys}, USER], tokenizer)
    plain = [USER, {"role": "assistant", "content": ""}, USER]
    assert found == by_template(tokenizer, plain)


def test_keys_without_effect_are_named() -> None:
    call = {"id": "1", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
    answer = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "x"},
            {"type": "text", "text": "x", "id": "1"},
        ],
        "reasoning_details": [{}],
        "thinking_blocks": None,
        "tool_calls": [{**call, "extra_content": {"google": {}}, "a\r\nb": 1}],
    }
    result = {"role": "tool", "tool_call_id": "1", "name": "f", "content": "x"}
    named = ["messages.reasoning_details", "messages.tool_calls", "messages.name"]
    within = ["content.thinking", "content.id", "tool_calls.extra_content"]
    inner = [f"messages.{name}" for name in within]
    assert unread_keys([answer, result], chat.CONCATENATES) == [*named, *inner]
    reads = chat.CHATML + "{{ message.name }}"
    assert unread_keys([answer, result], reads) == [named[0], *inner]


def test_a_call_has_no_keys_of_its_server() -> None:
    tokenizer = tokenizer_of("{{ c | tojson }}")
    extra = {"id": "1", "index": 0, "extra_content": {"a": 1}, "custom": None}
    found = tokenizer.decode(render_chat(calling(TEXT, **extra), tokenizer))
    assert json.loads(found) == {
        "type": "function",
        "id": "1",
        "function": {"name": "f", "arguments": VALUE},
    }
    reads = tokenizer_of("{{ c.extra_content.a }}")
    assert reads.decode(render_chat(calling(TEXT, **extra), reads)) == "1"
