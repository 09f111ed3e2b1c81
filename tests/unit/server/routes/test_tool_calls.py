"""Calls of tools in text are found wherever the text is cut, and no other text is lost."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from pyengine.server.routes.tool_calls import ParsedCall, ToolParser
from tests.support.serving import Client

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
ADD = ParsedCall("add", '{"a": 1, "b": "é"}')
NONE = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'

TEXTS: dict[str, list[Any]] = {
    "": [],
    "no call": ["no call"],
    " two \n lines ": [" two \n lines "],
    CALL: [ADD],
    "I add. \n" + CALL: ["I add.", ADD],
    CALL + "\n" + CALL + "\n": [ADD, ADD],
    CALL + " And so on.": [ADD, " And so on."],
    NONE: [ParsedCall("add", "{}")],
    '<tool_call>{"name": "add"}</tool_call>': [ParsedCall("add", "{}")],
    CALL.removesuffix("</tool_call>"): [ADD],
    "a < b <tool": ["a < b <tool"],
    "<tool_call>": ["<tool_call>"],
    "<tool_call>{": ["<tool_call>{"],
    "<tool_call>nonsense</tool_call>!": ["<tool_call>nonsense</tool_call>!"],
    '<tool_call>{"name": "rm", "arguments": {}}</tool_call>': [
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    ],
    '<tool_call>{"name": "add", "arguments": []}</tool_call>': [
        '<tool_call>{"name": "add", "arguments": []}</tool_call>'
    ],
    "<tool_call>" + "[" * 100_000 + "</tool_call>": [
        "<tool_call>" + "[" * 100_000 + "</tool_call>"
    ],
    "<tool_call>[]</tool_call>": ["<tool_call>[]</tool_call>"],
    **{
        f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>': [
            ParsedCall("add", expected)
        ]
        for arguments, expected in {
            r'"{\"a\": 1}"': '{"a": 1}',
            r'" {\"a\": \"\\ud83d\"} "': r'{"a": "\ud83d"}',
            '""': "{}",
            '"null"': "{}",
            "null": "{}",
            '{"a":1e999,\n "b": 0.10000000000000000001}': (
                '{"a":1e999,\n "b": 0.10000000000000000001}'
            ),
            r'{"a": "\ud800"}': r'{"a": "\ud800"}',
            '{"a": {"arguments": "}"}, "a": [{}]}': '{"a": {"arguments": "}"}, "a": [{}]}',
        }.items()
    },
    '<tool_call>{ "arguments" : {"a": 1} , "name":"add"}</tool_call>': [
        ParsedCall("add", '{"a": 1}')
    ],
    **{
        text: [text]
        for arguments in (
            '{"a": NaN}',
            '{"a": [Infinity]}',
            '{"a": -Infinity}',
            r'"{\"a\": NaN}"',
            '"x"',
            '"[1]"',
            r'"\"{}\""',
            "5",
            "true",
        )
        for text in [f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>']
    },
    "<tool_call>" + CALL: ["<tool_call>" + CALL],
}


def parse(pieces: list[str]) -> list[Any]:
    """The parts, with adjacent texts merged."""
    parser, merged = ToolParser({"add"}), list[Any]()
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.end()
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    return merged


@pytest.mark.parametrize(("text", "expected"), TEXTS.items(), ids=lambda value: repr(value)[:30])
def test_in_one_piece(text: str, expected: list[Any]) -> None:
    assert parse([text]) == expected


@pytest.mark.parametrize(
    "text", [example for example in TEXTS if len(example) < 1000], ids=lambda example: example[:30]
)
def test_a_character_at_a_time(text: str) -> None:
    assert parse(list(text)) == TEXTS[text]


@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", CALL, NONE, " ", "\n", "x", "<", "{"])
    ),
    st.lists(st.integers(0, 200)),
)
def test_where_it_is_cut_makes_no_difference(words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    assert parse(pieces) == parse([text])


USER = {"role": "user", "content": "1 + 2?"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
}
PATH = "/v1/chat/completions"


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def defining(name: str, kind: str) -> dict[str, Any]:
    """A tool whose parameters refer to a definition."""
    parameters = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/T"}},
        "required": ["x"],
        "additionalProperties": False,
        "$defs": {"T": {"type": kind}},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


class Scripted:
    """A stream of one answer, in these pieces."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> Any:
        for at, text in enumerate(self._pieces, start=1):
            is_last = at == len(self._pieces)
            reason = "stop" if is_last else None
            yield RequestOutput(
                request_id="0",
                prompt=None,
                prompt_token_ids=[1, 2],
                prompt_logprobs=None,
                outputs=[CompletionOutput(0, text, [at], finish_reason=reason)],  # type: ignore[arg-type]
                finished=is_last,
                num_cached_tokens=0,
                metrics=RequestMetrics(0.0),
            )

    def close(self) -> None:
        pass


@pytest.fixture
def say(client: Client, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have the next answer be these pieces."""
    pieces: list[str] = []

    def submit(requests: Any) -> Scripted:
        is_streamed = requests[0].params.output_kind.name == "DELTA"
        return Scripted(pieces if is_streamed else ["".join(pieces)])

    monkeypatch.setattr(client.context.engine, "submit", submit)
    return pieces.extend


def deltas(events: list[Any]) -> tuple[str, list[Any], str]:
    """The content, the calls and the reason of a streamed answer."""
    parts = [part for event in events for part in event["choices"]]
    content = "".join(part["delta"].get("content") or "" for part in parts)
    calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
    return content, calls, parts[-1]["finish_reason"]


def test_calls_are_told_apart_from_the_content(client: Client, say: Any) -> None:
    say(["I ", "add.\n", *CALL, "\n", *CALL])
    answer = client.chat([USER], tools=[TOOL])
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I add."
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "add", "arguments": '{"a": 1, "b": "é"}'}
    ] * 2
    assert len({call["id"] for call in calls}) == 2
    assert {call["type"] for call in calls} == {"function"}
    events = client.events(PATH, {"messages": [USER], "tools": [TOOL]})
    content, streamed, reason = deltas(events)
    assert (content, reason) == ("I add.", "tool_calls")
    assert [call["index"] for call in streamed] == [0, 1]
    assert [call["function"] for call in streamed] == [call["function"] for call in calls]


def test_an_answer_that_is_calls_alone_has_no_content(client: Client, say: Any) -> None:
    say([CALL])
    (choice,) = client.chat([USER], tools=[TOOL])["choices"]
    assert choice["message"]["content"] is None
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_without_tools_it_is_text(fields: Any, client: Client, say: Any) -> None:
    say([CALL])
    (choice,) = client.chat([USER], **fields)["choices"]
    assert choice["message"] == {"role": "assistant", "content": CALL}
    assert choice["finish_reason"] == "stop"


def test_one_call_at_a_time(client: Client, say: Any) -> None:
    say([CALL, CALL])
    fields = {"tools": [TOOL], "parallel_tool_calls": False}
    (choice,) = client.chat([USER], **fields)["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    _, calls, _ = deltas(client.events(PATH, {"messages": [USER], **fields}))
    assert len(calls) == 1


def test_the_template_gets_the_tools(client: Client) -> None:
    engine = client.context.engine
    fields = {"max_tokens": 1, "return_token_ids": True}
    answer = client.chat([USER], tools=[TOOL], **fields)
    assert answer["prompt_token_ids"] == engine.apply_chat_template([USER], tools=[TOOL])
    answer = client.chat([USER], tools=[TOOL], tool_choice="none", **fields)
    assert answer["prompt_token_ids"] == engine.apply_chat_template([USER])


def test_an_answer_with_calls_goes_back_into_the_conversation(client: Client, say: Any) -> None:
    say([CALL])
    message = client.chat([USER], tools=[TOOL])["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
    assert client.chat([USER, message, result], tools=[TOOL])["choices"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required"}, "needs tools"),
        ({"tool_choice": named("add")}, "a function of tools"),
        ({"tools": [TOOL], "tool_choice": named("subtract")}, "a function of tools"),
        ({"tools": [TOOL], "tool_choice": "perhaps"}, "'perhaps'"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "a function of tools"),
        ({"tools": [{"type": "search"}]}, "tools"),
        ({"tools": [TOOL, TOOL]}, "same name"),
        (
            {
                "tools": [TOOL],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "send one of them",
        ),
        (
            {
                "tools": [defining("a", "string"), defining("b", "integer")],
                "tool_choice": "required",
            },
            "'T' differently",
        ),
    ],
)
def test_choices_that_cannot_be(fields: Any, words: str, client: Client) -> None:
    assert words in client.refusal(PATH, {"messages": [USER], **fields})["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", named("b")])
def test_a_call_that_is_demanded_comes(choice: Any, stream: bool, client: Client) -> None:
    """From a model of random weights, so only the form produces it."""
    body = {
        "messages": [USER],
        "tools": [defining("a", "boolean"), defining("b", "boolean")],
        "tool_choice": choice,
        "max_tokens": 200,
        "temperature": 1,
        "seed": 1,
    }
    if stream:
        content, calls, reason = deltas(client.events(PATH, body))
    else:
        (first,) = client.answer(PATH, body)["choices"]
        content, calls, reason = (
            first["message"]["content"] or "",
            first["message"]["tool_calls"],
            first["finish_reason"],
        )
    assert (content, reason) == ("", "tool_calls")
    (call,) = calls
    assert call["function"]["name"] in ("b" if isinstance(choice, dict) else "ab")
    assert json.loads(call["function"]["arguments"])["x"] in (True, False)


def test_a_demanded_call_that_is_cut_short_is_content(client: Client) -> None:
    fields = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 3}
    (choice,) = client.chat([USER], **fields)["choices"]
    assert choice["message"]["content"].startswith("{")
    assert choice["finish_reason"] == "length"


def test_arguments_are_json(client: Client, say: Any) -> None:
    say([CALL])
    call = client.chat([USER], tools=[TOOL])["choices"][0]["message"]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "é"}
