"""Chat templates: what a template writes, or refuses, is what it does with transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from pyengine.models.tokenizer import Tokenizer, chosen_template
from tests.support import chat
from tests.unit.models.tokenizer.kinds import KINDS

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
FILES = (Path(__file__).parent / "templates").glob("*.jinja")
"""With what templates of published models use: tools, dates, namespaces, thinking."""
ALL = {path.stem: path.read_text("utf-8") for path in FILES} | {
    name.lower(): getattr(chat, name)
    for name in ("CHATML", "CONCATENATES", "NO_SYSTEM", "WALKS_PARTS", "BEGINS_THINKING")
}


def tokenizers(template: Any) -> tuple[Tokenizer, Any]:
    backend = KINDS["with bos"]()
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)
    theirs.chat_template = template
    return Tokenizer(backend, SPECIAL, chat_template=template), theirs


def outcome(tokenizer: Any, messages: Any, **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:
        return f"refused: {type(error).__module__.partition('.')[0]}"


def check_equal(template: Any, messages: Any, **options: Any) -> None:
    ours, theirs = tokenizers(template)
    actual = outcome(ours, messages, tokenize=False, **options)
    expected = outcome(theirs, messages, tokenize=False, **options)
    if str(expected).startswith("refused") and "jinja2" not in expected:
        assert str(actual).startswith("refused")
    else:
        assert actual == expected
    for kept in (True, False):
        ids = outcome(ours, messages, return_dict=kept, **options)
        known = outcome(theirs, messages, return_dict=kept, **options)
        if not str(known).startswith("refused"):
            assert ids == {name: known[name] for name in ids} if kept else ids == known


USER = {"role": "user", "content": " Hello 東京 <|im_end|> "}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
ANSWER = {"role": "assistant", "content": "<think>\nzebra\n</think>\n\nHi"}
ARGUMENTS = {"city": "Köln", "unit": None, "days": [1, 2.5, True], "é": {"<": ">"}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": ARGUMENTS}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "look", "tool_call_id": "1", "content": '{"t": 21}'}
PARTS = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "image"}]}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "ä & <b>", "parameters": {}},
}
CONVERSATIONS = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ANSWER, USER],
    "two of one role": [USER, USER],
    "calls": [USER, CALLS, RESULT],
    "parts": [PARTS],
    "reasoning": [USER, {**ANSWER, "reasoning": "because"}, USER],
    "thinking": [USER, {"role": "assistant", "content": "Hi", "thinking": "so"}],
    "marks": [{"role": "skip", "content": "a"}, USER, {"role": "stop", "content": "b"}, USER],
    "extra": [{**USER, "extra": {"a": [None, "x"]}, "name": None}],
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_templates_of_models(name: str, conversation: str) -> None:
    messages = CONVERSATIONS[conversation]
    for tools in (None, [TOOL]):
        for prompt in (True, False):
            check_equal(ALL[name], messages, tools=tools, add_generation_prompt=prompt)
    check_equal(ALL[name], messages, enable_thinking=False, date_string="today", value="x")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "content",
    ["Hi", "Hi  ", "  ", "", None, [{"type": "text", "text": "Hi "}], [{"type": "image"}], []],
)
def test_a_final_message_that_is_to_be_continued(name: str, content: Any) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    check_equal(ALL[name], messages, continue_final_message=True)
    check_equal(ALL[name], messages, continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.__class__ }}",
        "{{ namespace(__init__=1) }}",
        "{% set ns = namespace() %}{% set ns._a = 1 %}{{ ns._a }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception('no') }}",
        "{{ raise_exception.__globals__ }}",
        "{% include 'x' %}",
        "{{ messages[0].content.format(1) }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% for x in range(999999999) %}{% endfor %}",
        "{{ unknown.attribute }}",
        "{{ unknown }}",
        "{{ 1 / 0 }}",
        "{% unclosed",
        "",
    ],
)
def test_templates_are_confined_as_in_transformers(template: str) -> None:
    check_equal(template, [USER])


class Words(str):
    def escape(self) -> str:
        return "escaped"


@pytest.mark.parametrize(
    "value",
    [np.float32(0.5), np.int64(3), np.bool_(False), Words("a"), object, ("a", [1]), np.zeros(2)],
)
@pytest.mark.parametrize("template", ["{{ value }} {{ value is string }}", "{{ value.escape() }}"])
def test_templates_see_plain_values_only(value: Any, template: str) -> None:
    check_equal(template, [USER], value=value)
    check_equal(template.replace("value", "messages[0].value"), [{**USER, "value": value}])


def test_variables_replace_special_tokens_and_documents() -> None:
    template = "{{ bos_token }}{{ eos_token }}{{ documents }}"
    check_equal(template, [USER])
    check_equal(template, [USER], bos_token="x", documents=[{"title": "a", "text": "b"}])


NAMED = {"default": "d {{ tools | length if tools }}", "tool_use": "t", "rag": "r"}


@pytest.mark.parametrize("template", [NAMED, {"rag": "r"}, None])
@pytest.mark.parametrize("name", [None, "rag", "tool_use", "{{ 'own' }}"])
@pytest.mark.parametrize("tools", [None, [TOOL], []])
def test_one_of_several_templates(template: Any, name: str | None, tools: Any) -> None:
    check_equal(template, [USER], chat_template=name, tools=tools)


def test_a_model_without_templates_has_none() -> None:
    assert chosen_template(None) is None and chosen_template({}) is None
    assert chosen_template("a", has_tools=True) == "a"


@pytest.mark.parametrize("messages", [[], ["Hello"], [{}], None, "Hello"])
def test_what_is_no_conversation(messages: Any) -> None:
    check_equal("{% for m in messages %}{{ m.role }}{% endfor %}x", messages)
