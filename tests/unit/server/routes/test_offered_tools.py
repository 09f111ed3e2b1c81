"""Tools that a request offers: which of them the model may call, and what has no effect."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pyengine.async_engine import AsyncEngine
from tests.support import chat
from tests.support.serving import Client, make_client, open_small_engine, save_small_model
from tests.unit.server.routes.test_tool_calls import (
    CALL,
    PATH,
    TOOL,
    USER,
    defining,
    named,
    say,
)

__all__ = ["say"]

HEADER = "x-pyengine-ignored"
DRAWN = {"max_tokens": 150, "temperature": 1}
ADD = TOOL["function"]


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


NO_PARAMETERS: dict[str, dict[str, Any]] = {
    "none": {},
    "null": {"parameters": None},
    "empty": {"parameters": {}},
    "any object": {"parameters": {"type": "object"}},
    "no properties": {"parameters": {"type": "object", "properties": {}}},
    "none required": {"parameters": {"type": "object", "required": [], "title": "F"}},
    "of pydantic": {"parameters": {"properties": {}, "title": "F", "type": "object"}},
}


@pytest.mark.parametrize("form", ["tools", "functions"])
@pytest.mark.parametrize("function", NO_PARAMETERS.values(), ids=NO_PARAMETERS)
def test_a_required_call_without_parameters_ends(function: Any, form: str, client: Client) -> None:
    """From a model of random weights, which never ends an object by itself."""
    if form == "tools":
        fields = {"tools": [tool("now", **function)], "tool_choice": "required"}
    else:
        fields = {
            "functions": [{"name": "now", **function}],
            "function_call": {"name": "now"},
        }
    for seed in range(3):
        (choice,) = client.chat([USER], **fields, **DRAWN, seed=seed)["choices"]
        message = choice["message"]
        if form == "tools":
            assert choice["finish_reason"] == "tool_calls"
            call = message["tool_calls"][0]["function"]
        else:
            assert choice["finish_reason"] == "function_call" and "tool_calls" not in message
            call = message["function_call"]
        assert call["name"] == "now" and message["content"] is None
        assert json.loads(call["arguments"]) == {}


def test_a_required_call_of_an_open_schema_ends(client: Client) -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "boolean"}, "y": {"enum": [1]}}}
    tools = [tool("set", parameters=parameters)]
    for seed in range(5):
        fields = {"tools": tools, "tool_choice": "required", "seed": seed, **DRAWN}
        (choice,) = client.chat([USER], **fields)["choices"]
        assert choice["finish_reason"] == "tool_calls", choice
        (call,) = choice["message"]["tool_calls"]
        assert set(json.loads(call["function"]["arguments"])) <= {"x", "y"}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]},
    }


def test_of_allowed_tools_one_is_called_and_the_prompt_has_all(client: Client) -> None:
    tools = [defining("a", "boolean"), defining("b", "boolean"), defining("c", "boolean")]
    seen = set()
    for seed in range(8):
        fields = {"tools": tools, "tool_choice": allowed("required", "a", "c"), **DRAWN}
        answer = client.chat([USER], seed=seed, return_token_ids=True, **fields)
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        seen.add(answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"])
    assert seen == {"a", "c"}
    prompt = client.context.engine.apply_chat_template([USER], tools=tools)
    assert answer["prompt_token_ids"] == prompt


def test_a_call_that_is_not_allowed_is_content(client: Client, say: Any) -> None:
    say([CALL])
    fields = {"tools": [TOOL, tool("other")]}
    (choice,) = client.chat([USER], tool_choice=allowed("auto", "other"), **fields)["choices"]
    assert choice["message"] == {"role": "assistant", "content": CALL}
    (choice,) = client.chat([USER], tool_choice=allowed("auto", "add"), **fields)["choices"]
    assert choice["message"]["tool_calls"]


def test_functions_are_an_older_form_of_tools(client: Client, say: Any) -> None:
    say(["I add. ", *CALL, CALL])
    body = {"messages": [USER], "functions": [ADD], "function_call": "auto"}
    response = client.post(PATH, body)
    (choice,) = response.json()["choices"]
    call = {"name": "add", "arguments": '{"a": 1, "b": "é"}'}
    assert choice["finish_reason"] == "function_call" and HEADER not in response.headers
    assert choice["message"] == {"role": "assistant", "content": "I add.", "function_call": call}
    parts = [part for event in client.events(PATH, body) for part in event["choices"]]
    deltas = [part["delta"] for part in parts]
    assert [delta["function_call"] for delta in deltas if "function_call" in delta] == [call]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I add."
    assert parts[-1]["finish_reason"] == "function_call"
    (choice,) = client.chat([USER], functions=[ADD], function_call="none")["choices"]
    assert choice["message"] == {"role": "assistant", "content": "I add. " + CALL + CALL}


def test_the_template_gets_functions_as_tools(client: Client) -> None:
    answer = client.chat([USER], functions=[ADD], max_tokens=1, return_token_ids=True)
    prompt = client.context.engine.apply_chat_template([USER], tools=[TOOL])
    assert answer["prompt_token_ids"] == prompt


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [TOOL], "tool_choice": allowed("never", "add")}, "tool_choice", "'never'"),
        ({"tools": [TOOL], "tool_choice": allowed("auto")}, "tool_choice", "with functions of"),
        ({"tools": [TOOL], "tool_choice": allowed("auto", "x")}, "tool_choice", "allowed_tools"),
        ({"tool_choice": allowed("required", "add")}, "tool_choice", "functions of tools"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "sql"}}]},
            "tools[0]",
            "type 'custom' are not supported",
        ),
        ({"tools": [TOOL, {"type": "web_search"}]}, "tools[1]", "type 'web_search'"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "sql"}}},
            "tool_choice",
            "'custom'",
        ),
        ({"functions": [ADD], "tools": [TOOL]}, "functions", "older form"),
        ({"functions": [ADD], "tool_choice": "auto"}, "functions", "older form"),
        ({"functions": [ADD, ADD]}, "functions", "same name"),
        ({"functions": [ADD], "function_call": {"name": "sub"}}, "function_call", "'sub'"),
        ({"functions": [ADD], "function_call": "required"}, "function_call", "'required'"),
        ({"function_call": {"name": "add"}}, "function_call", "needs functions"),
        ({"tools": [TOOL], "function_call": {"name": "add"}}, "function_call", "tool_choice"),
        ({"functions": [{"name": "f", "colour": 1}]}, "functions[0].colour", "colour"),
    ],
)
def test_what_cannot_be_is_named(fields: Any, param: str, words: str, client: Client) -> None:
    error = client.refusal(PATH, {"messages": [USER], **fields})
    assert error["param"] == param and words in error["message"], error


@pytest.mark.parametrize(
    "marked",
    [
        {**TOOL, "cache_control": {"type": "ephemeral"}},
        {**TOOL, "function": {**ADD, "cache_control": {"type": "ephemeral"}}},
    ],
)
def test_cache_control_of_a_tool_is_without_effect(marked: Any, client: Client) -> None:
    body = {"messages": [USER], "tools": [marked], "max_tokens": 1, "return_token_ids": True}
    response = client.post(PATH, body)
    assert response.status_code == 200 and response.headers[HEADER] == "tools.cache_control"
    plain = client.post(PATH, {**body, "tools": [TOOL]})
    assert HEADER not in plain.headers
    assert response.json()["prompt_token_ids"] == plain.json()["prompt_token_ids"]
    tokenized = client.post("/tokenize", {"messages": [USER], "tools": [marked]})
    assert tokenized.headers[HEADER] == "tools.cache_control"
    assert tokenized.json()["tokens"] == plain.json()["prompt_token_ids"]


def test_nulls_within_a_tool_are_ignored(client: Client) -> None:
    nulls = {**TOOL, "function": {**ADD, "strict": None, "examples": None}, "defer_loading": None}
    response = client.post(PATH, {"messages": [USER], "tools": [nulls], "max_tokens": 1})
    assert response.status_code == 200, response.text


@pytest.fixture(scope="module")
def blind_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    """Of a model whose template reads no tools."""
    folder = save_small_model(tmp_path_factory.mktemp("blind"), chat.CONCATENATES)
    with open_small_engine(folder) as engine:
        yield engine


NOW = tool("now", description="tells the time")
UNREAD: dict[str, tuple[dict[str, Any], str]] = {
    "auto": ({"tools": [TOOL]}, "tools"),
    "allowed": ({"tools": [TOOL], "tool_choice": allowed("auto", "add")}, "tools"),
    "functions": ({"functions": [ADD]}, "functions"),
    "required": ({"tools": [NOW], "tool_choice": "required"}, "tools.function.description"),
    "named function": (
        {"functions": [NOW["function"]], "function_call": {"name": "now"}},
        "functions.description",
    ),
}


@pytest.mark.parametrize(("fields", "name"), UNREAD.values(), ids=UNREAD)
def test_tools_that_the_template_does_not_read_are_named(
    fields: Any, name: str, blind_engine: AsyncEngine, client: Client
) -> None:
    body = {"messages": [USER], "max_tokens": 40, **fields}
    response = make_client(blind_engine).post(PATH, body)
    assert response.status_code == 200 and response.headers[HEADER] == name
    error = make_client(blind_engine, strict=True).refusal(PATH, body)
    assert error["param"] == name and "--strict" in error["message"]
    assert HEADER not in client.post(PATH, body).headers


def test_tools_that_are_not_for_the_template_are_not_named(blind_engine: AsyncEngine) -> None:
    client = make_client(blind_engine)
    for fields in ({"tool_choice": "none"}, {"tool_choice": "required", "tools": [tool("now")]}):
        body = {"messages": [USER], "max_tokens": 40, "tools": [TOOL], **fields}
        assert HEADER not in client.post(PATH, body).headers
    tokenized = client.post("/tokenize", {"messages": [USER], "tools": [TOOL]})
    assert tokenized.headers[HEADER] == "tools"


def test_a_grammar_that_fails_while_it_runs_is_the_error_of_its_request(client: Client) -> None:
    bomb = {"grammar": 'start: x{1000}\nx: y{1000}\ny: z{1000}\nz: "a"'}
    nothing = {"choice": ["yes"]}
    for fields in (
        {"structured_outputs": bomb, "max_tokens": 500},
        {"structured_outputs": nothing, "allowed_token_ids": [5], "max_tokens": 5},
    ):
        body = {"prompt": [5, 6], "temperature": 0, **fields}
        error = client.refusal("/v1/completions", body)
        assert error["code"] == "structured_output_failed" and error["message"]
        last = client.events("/v1/completions", body)[-1]
        assert last["error"]["code"] == "structured_output_failed"
    assert client.complete([5, 6], max_tokens=1)["choices"]


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"NaN", b"Infinity"])
def test_no_number_is_infinite(number: bytes, client: Client) -> None:
    """The template would write Infinity into the prompt, which is not JSON."""
    parameters = b'{"type":"object","properties":{"a":{"maximum":' + number + b"}}}"
    tools = b'[{"type":"function","function":{"name":"f","parameters":' + parameters + b"}}]"
    body = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"tools":' + tools + b"}"
    response = client.send(PATH, body)
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_json"
