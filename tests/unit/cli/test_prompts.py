"""Reading prompts: every kind of line, and every kind of bad line."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pyengine.cli.prompts import (
    Prompt,
    Template,
    read_prompts,
    to_engine,
)
from pyengine.cli.results import _title
from pyengine.errors import InvalidRequestError
from tests.unit.cli.fakes import FakeEngine


def written(tmp_path: Path, content: str | bytes, name: str = "prompts.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_text_file_has_a_prompt_per_line(tmp_path: Path) -> None:
    path = written(tmp_path, 'one\n\n  two  \r\n{"prompt": 3}\n', "prompts.txt")
    assert read_prompts(path) == [
        Prompt("one"),
        Prompt("  two  "),
        Prompt('{"prompt": 3}'),
    ]


def test_only_newlines_end_a_line(tmp_path: Path) -> None:
    path = written(tmp_path, "one\u2028still one\x0c\ntwo\n", "prompts.txt")
    assert read_prompts(path) == [Prompt("one\u2028still one\x0c"), Prompt("two")]


def test_jsonl_takes_strings_and_three_kinds_of_objects(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé?"}]
    lines = [
        "one",
        {"prompt": "two", "id": "b"},
        {"prompt_token_ids": [1, 0]},
        {"messages": messages},
    ]
    path = written(tmp_path, "\n\n".join(json.dumps(line) for line in lines))
    assert read_prompts(path) == [
        Prompt("one"),
        Prompt("two", "b"),
        Prompt((1, 0), kind="prompt_token_ids"),
        Prompt(tuple(messages), kind="messages"),
    ]


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
PARTS = [{"type": "text", "text": "What\nis"}, {"type": "text", "text": "it?"}]


@pytest.mark.parametrize(
    ("message", "title"),
    [
        ({"role": "user", "content": PARTS}, "What is it?"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, '[{"type": "function"'),
        ({"role": "assistant", "content": "So:", "tool_calls": [CALL]}, "So:"),
        ({"role": "tool", "tool_call_id": "1", "content": "3"}, "3"),
    ],
)
def test_messages_are_those_that_the_engine_takes(
    tmp_path: Path, message: dict[str, Any], title: str
) -> None:
    path = written(tmp_path, json.dumps({"messages": [message]}))
    (prompt,) = read_prompts(path)
    assert prompt == Prompt((message,), kind="messages")
    assert _title(prompt).startswith(title)


def test_what_the_template_does_not_take_is_named(tmp_path: Path) -> None:
    class Refusing(FakeEngine):
        def apply_chat_template(self, messages: Any) -> list[int]:
            raise InvalidRequestError("message 0 has an image")

    prompts = [Prompt(({"role": "user", "content": "x"},), kind="messages")]
    with pytest.raises(InvalidRequestError, match=r'the prompt \[{"role": .* 0 has an image'):
        to_engine(Refusing(chat_template="t"), prompts, Template.AUTO)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "Expecting property name"),
        ("not json", "Expecting value"),
        ("3", "expected a string or an object, found 3"),
        ("null", "found null"),
        ('["a"]', "expected a string or an object"),
        ("{}", "exactly one of prompt, prompt_token_ids, messages is required, found none"),
        ('{"prompt": "a", "messages": []}', "found prompt and messages"),
        ('{"prompt": "a", "max_tokens": 3}', "unknown key 'max_tokens'"),
        ('{"prompt": 7}', "prompt must be a string, found 7"),
        ('{"prompt": "a", "id": true}', "id must be a string or an integer, found true"),
        ('{"prompt_token_ids": []}', "must be a list of token ids, found []"),
        ('{"prompt_token_ids": "abc"}', 'must be a list of token ids, found "abc"'),
        ('{"prompt_token_ids": [1, -2]}', "contains -2, which is not a token id"),
        ('{"prompt_token_ids": [1, 2.0]}', "contains 2.0"),
        ('{"prompt_token_ids": [true]}', "contains true"),
        ('{"messages": []}', "messages must be a list of messages, found []"),
        ('{"messages": [{"role": "user"}]}', "a message needs content (text or a list of parts)"),
        ('{"messages": [{"role": "user", "content": 3}]}', "a message needs content"),
        ('{"messages": [{"role": "user", "content": []}]}', "a message needs content"),
        ('{"messages": [{"role": "assistant", "tool_calls": []}]}', "a message needs content"),
        ('{"messages": [{"role": 1, "content": "a"}]}', "a message is an object with a role"),
        ('{"messages": ["hello"]}', "a message is an object with a role"),
        (r'{"prompt": "a", "id": "\ud800"}', r"contains '\ud800', a lone surrogate"),
        (r'"\udfff"', r"contains '\udfff'"),
        (r'{"messages": [{"role": "user", "content": "\ud83d"}]}', r"contains '\ud83d'"),
        (r'{"prompt": "a", "\ud800": 1}', r"contains '\ud800'"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"prompt_token_ids": [NaN]}', "contains NaN"),
        ('{"prompt_token_ids": [Infinity]}', "contains Infinity"),
        ('{"prompt_token_ids": [' + "9" * 5000 + "]}", "integer string"),
        ('{"prompt": null}', "prompt must be a string, found null"),
        ('{"prompt": ["a"]}', "prompt must be a string"),
        ('{"prompt": "a", "id": 1.5}', "id must be a string or an integer, found 1.5"),
        ('{"prompt": "a", "id": []}', "id must be a string or an integer"),
        ('{"messages": {"role": "user"}}', "messages must be a list"),
        ('{"prompt": "a\x00b"}', "Invalid control character"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, complaint: str) -> None:
    path = written(tmp_path, f'"good"\n\n{line}\n"good"\n')
    with pytest.raises(InvalidRequestError) as caught:
        read_prompts(path)
    assert f"{path}, line 3: " in str(caught.value)
    assert complaint in str(caught.value)


def test_every_bad_line_is_named_up_to_five(tmp_path: Path) -> None:
    path = written(tmp_path, "x\n" * 8)
    with pytest.raises(InvalidRequestError) as caught:
        read_prompts(path)
    message = str(caught.value)
    assert [f"line {n}:" in message for n in range(1, 9)] == [True] * 5 + [False] * 3
    assert "and 3 more" in message


def test_bytes_that_are_not_utf8_are_a_bad_line(tmp_path: Path) -> None:
    path = written(tmp_path, b"good\n\xff\xfe\n", "prompts.txt")
    with pytest.raises(InvalidRequestError, match=r"line 2: .*utf-8"):
        read_prompts(path)


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(InvalidRequestError, match="contains no prompts"):
        read_prompts(written(tmp_path, content))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"none\.txt: No such file"):
        read_prompts(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("template", "model_has_one", "framed"),
    [
        (Template.CHAT, True, True),
        (Template.RAW, True, False),
        (Template.AUTO, True, True),
        (Template.AUTO, False, False),
    ],
)
def test_template_choice_concerns_texts_only(
    template: Template, model_has_one: bool, framed: bool
) -> None:
    engine = FakeEngine(chat_template="t" if model_has_one else None)
    prompts = [
        Prompt("one two"),
        Prompt((5, 6), kind="prompt_token_ids"),
        Prompt(({"role": "u", "content": "x"},), kind="messages"),
    ]
    text, tokens, messages = to_engine(engine, prompts, template)
    chatted = engine.apply_chat_template([{"role": "user", "content": "one two"}])
    assert text == ({"prompt_token_ids": chatted} if framed else "one two")
    assert tokens == {"prompt_token_ids": [5, 6]}
    assert messages == {"prompt_token_ids": engine.encode("<u> x")}


def test_surrogate_pairs_are_characters(tmp_path: Path) -> None:
    assert read_prompts(written(tmp_path, r'"\ud83d\ude00"')) == [Prompt("\N{GRINNING FACE}")]


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: Path, name: str) -> None:
    line = '"one"' if name.endswith("jsonl") else "one"
    path = written(tmp_path, f"{line}\n{line}\n".encode("utf-8-sig"), name)
    assert read_prompts(path) == [Prompt("one")] * 2


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_utf_16_is_named(tmp_path: Path, encoding: str, name: str) -> None:
    mark = "\ufeff" if encoding.endswith("be") else ""
    path = written(tmp_path, f'{mark}"one"\n"two"\n'.encode(encoding), name)
    with pytest.raises(InvalidRequestError, match=r"is UTF-16 text: give it as UTF-8"):
        read_prompts(path)


def test_a_binary_file_is_refused_by_line(tmp_path: Path) -> None:
    path = written(tmp_path, bytes(range(256)) * 40, "model.bin")
    with pytest.raises(InvalidRequestError) as caught:
        read_prompts(path)
    assert "nothing was run" in str(caught.value) and len(str(caught.value)) < 4000


def test_a_nul_in_a_text_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"line 2: contains a NUL"):
        read_prompts(written(tmp_path, b"one\ntw\0o\n", "prompts.txt"))


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_line_ends_of_other_systems(tmp_path: Path, name: str) -> None:
    line = '"one"' if name.endswith("jsonl") else "one"
    for end in ("\r\n", "\r"):
        assert read_prompts(written(tmp_path, f"{line}{end}" * 3, name)) == [Prompt("one")] * 3


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("/", "Is a directory"),
        ("x" * 5000, "File name too long"),
        ("/dev/zero", "a line of 64 MiB or more"),
        ("~nosuchuser/x", "No such file"),
        ("/dev/null", "contains no prompts"),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_file_of_prompts(path: str, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        read_prompts(Path(path))


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = written(tmp_path, '"one"')
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("root may read anything")
    with pytest.raises(InvalidRequestError, match="Permission denied"):
        read_prompts(path)


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template; use --raw"):
        to_engine(FakeEngine(chat_template=None), [Prompt("x")], Template.CHAT)


def test_empty_prompts_are_refused_by_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"fine"\n""\n{"prompt": " "}\n')
    with pytest.raises(
        InvalidRequestError, match=r"line 2: prompt is empty[\s\S]*line 3: prompt is"
    ):
        read_prompts(file)
