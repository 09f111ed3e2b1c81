"""Each field of OpenAI's API and of vLLM's is honoured, named as without effect, or refused."""

import re
from time import process_time
from typing import Any

import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.errors import ConfigurationError
from pyengine.server.settings import ServerSettings
from tests.support import api_fields
from tests.support.serving import Client, error_of, events_of, make_client
from tests.unit.server.bodies import ASSISTANT, BODIES, CHAT, COMPLETIONS, HEADER, ROUTES, USER

WITHOUT_EFFECT: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (ROUTES, {"best_of": 1}),
    (ROUTES, {"best_of": 3, "n": 3}),
    (ROUTES, {"store": True}),
    (ROUTES, {"store": False}),
    (ROUTES, {"service_tier": "flex"}),
    (ROUTES, {"prompt_cache_key": "k"}),
    (ROUTES, {"prompt_cache_retention": "24h"}),
    (ROUTES, {"prompt_cache_options": {"mode": "explicit"}}),
    (ROUTES, {"safety_identifier": "s"}),
    (ROUTES, {"user": "u"}),
    (ROUTES, {"metadata": {"a": "b"}}),
    (ROUTES, {"modalities": ["text"]}),
    (ROUTES, {"prediction": {"type": "content", "content": "Paris"}}),
    (ROUTES, {"stop": ""}),
    (ROUTES, {"stop": ["", ""]}),
    (ROUTES, {"suffix": ""}),
    (ROUTES, {"use_beam_search": False}),
    (ROUTES, {"length_penalty": 2.0}),
    (ROUTES, {"watermarking": False}),
    (ROUTES, {"spaces_between_special_tokens": True}),
    (ROUTES, {"spaces_between_special_tokens": False}),
    (ROUTES, {"spaces_between_special_tokens": True, "skip_special_tokens": False}),
    (ROUTES, {"truncation_side": "left", "truncate_prompt_tokens": 5}),
    (ROUTES, {"truncation_side": "right"}),
    (ROUTES, {"media_io_kwargs": {}}),
    (ROUTES, {"mm_processor_kwargs": {"a": 1}}),
    (ROUTES, {"session_id": "s"}),
    (ROUTES, {"stream_interval": 5}),
    (ROUTES, {"routed_experts_prompt_start": 3}),
    (ROUTES, {"return_token_offsets": True}),
    (ROUTES, {"mm_payload": "none"}),
    (ROUTES, {"return_mm_kwargs": False}),
    (ROUTES, {"logprob_token_ids": []}),
    (ROUTES, {"vllm_xargs": {}}),
    ((CHAT,), {"verbosity": "low"}),
    ((CHAT,), {"include_reasoning": False}),
    ((CHAT,), {"echo": False}),
    ((CHAT,), {"echo": True}),
    ((CHAT,), {"add_special_tokens": False}),
    ((CHAT,), {"documents": []}),
    ((CHAT,), {"functions": []}),
    ((CHAT,), {"function_call": "none"}),
    ((CHAT,), {"return_prompt_text": False}),
    ((CHAT,), {"tool_choice": "auto"}),
    ((CHAT,), {"tool_choice": "auto", "tools": []}),
]
CASES = [
    pytest.param(path, fields, id=f"{path.split('/')[2]}-{fields!r:.60}")
    for paths, fields in WITHOUT_EFFECT
    for path in paths
]


@pytest.mark.parametrize(("path", "fields"), CASES)
def test_a_field_without_effect_is_named_and_changes_nothing(
    path: str, fields: dict[str, Any], client: Client
) -> None:
    name = next(iter(fields))
    honoured = {key: fields[key] for key in list(fields)[1:]}
    response = client.post(path, {**BODIES[path], **fields})
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == name
    plain = client.post(path, {**BODIES[path], **honoured})
    assert HEADER not in plain.headers
    assert response.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize(("path", "fields"), CASES)
def test_a_strict_server_refuses_fields_without_effect(
    path: str, fields: dict[str, Any], engine: AsyncEngine
) -> None:
    client = make_client(engine, strict=True)
    name = next(iter(fields))
    error = client.refusal(path, {**BODIES[path], **fields})
    assert error["param"] == name and error["code"] == "unsupported_parameter"
    assert name in error["message"] and "--strict" in error["message"]
    assert client.answer(path, {**BODIES[path], name: None})["choices"]


REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (ROUTES, {"best_of": 5}, "choose the best"),
    (ROUTES, {"best_of": 1, "n": 2}, "choose the best"),
    (ROUTES, {"modalities": ["audio"]}, "text"),
    (ROUTES, {"modalities": ["text", "audio"]}, "text"),
    (ROUTES, {"suffix": "end"}, "prompt only"),
    (ROUTES, {"use_beam_search": True}, "beam search"),
    (ROUTES, {"watermarking": True}, "watermark"),
    (ROUTES, {"spaces_between_special_tokens": False, "skip_special_tokens": False}, "space"),
    (ROUTES, {"truncation_side": "right", "truncate_prompt_tokens": 5}, "last tokens"),
    (ROUTES, {"logprob_token_ids": [5]}, "logprobs"),
    (ROUTES, {"vllm_xargs": {"a": 1}}, "extension"),
    (ROUTES, {"repetition_detection": {}}, "repetition"),
    (ROUTES, {"kv_transfer_params": {}}, "server"),
    (ROUTES, {"ec_transfer_params": {}}, "server"),
    ((CHAT,), {"audio": {"voice": "x", "format": "mp3"}}, "text"),
    ((CHAT,), {"moderation": {"model": "m"}}, "moderat"),
    ((CHAT,), {"web_search_options": {}}, "search"),
    ((CHAT,), {"documents": [{"text": "x"}]}, "message"),
    ((CHAT,), {"chat_template": "x"}, "the model's template"),
    ((CHAT,), {"return_prompt_text": True}, "return_token_ids"),
    ((CHAT,), {"add_special_tokens": True}, "template"),
    ((CHAT,), {"echo": True, "messages": [USER, ASSISTANT]}, "last message"),
    ((COMPLETIONS,), {"prompt_embeds": "x"}, "text and token ids"),
]


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        pytest.param(path, fields, words, id=f"{path.split('/')[2]}-{fields!r:.60}")
        for paths, fields, words in REFUSED
        for path in paths
    ],
)
def test_a_field_that_would_change_the_answer_is_refused(
    path: str, fields: dict[str, Any], words: str, client: Client
) -> None:
    name = next(iter(fields))
    error = client.refusal(path, {**BODIES[path], **fields})
    assert error["param"] == name and error["code"] == "unsupported_parameter", error
    assert name in error["message"] and words in error["message"], error


@pytest.mark.parametrize(
    "fields", [{"store": "x"}, {"modalities": "text"}, {"best_of": "1"}, {"metadata": []}]
)
def test_values_of_fields_without_effect_have_a_type(fields: Any, client: Client) -> None:
    error = client.refusal(CHAT, {**BODIES[CHAT], **fields})
    assert error["param"].split(".")[0] == next(iter(fields))


def test_several_are_named_in_streams_too(client: Client) -> None:
    body = {**BODIES[CHAT], "store": True, "user": "u", "top_k": 5, "stop": "", "stream": True}
    response = client.post(CHAT, body)
    assert events_of(response.text)
    assert sorted(response.headers[HEADER].split(", ")) == ["stop", "store", "user"]


def test_padding_of_streams_is_named(client: Client) -> None:
    body = {**BODIES[CHAT], "stream": True, "stream_options": {"include_obfuscation": False}}
    response = client.post(CHAT, body)
    assert events_of(response.text)
    assert response.headers[HEADER] == "stream_options.include_obfuscation"


def test_a_browser_may_read_the_header(engine: AsyncEngine) -> None:
    client = make_client(engine, cors_origin=("https://a.example",))
    headers = {"origin": "https://a.example"}
    response = client.post(CHAT, {**BODIES[CHAT], "user": "u"}, headers=headers)
    assert HEADER in response.headers["access-control-expose-headers"]


def test_what_is_ignored_is_in_the_description(client: Client) -> None:
    forms = client.get("/openapi.json").json()["components"]["schemas"]
    for form in ("ChatCompletionRequest", "CompletionRequest"):
        assert "without effect" in forms[form]["properties"]["store"]["description"]


def test_an_empty_stop_among_others_stops_nothing(client: Client) -> None:
    body = {"messages": [USER], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    text = client.answer(CHAT, body)["choices"][0]["message"]["content"]
    first = client.answer(CHAT, {**body, "stop": [text[3]]})["choices"]
    assert client.answer(CHAT, {**body, "stop": ["", text[3]]})["choices"] == first


@pytest.mark.parametrize("path", ROUTES)
def test_without_detokenization_there_is_no_text(path: str, client: Client) -> None:
    body = {**BODIES[path], "return_token_ids": True, "logprobs": path == CHAT or 1}
    (expected,) = client.answer(path, body)["choices"]
    response = client.post(path, {**body, "detokenize": False})
    (choice,) = response.json()["choices"]
    assert HEADER not in response.headers
    assert choice["token_ids"] == expected["token_ids"] and len(choice["token_ids"]) == 2
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == ""
    events = client.events(path, {**body, "detokenize": False})
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == expected[
        "token_ids"
    ]


def test_calls_of_tools_need_text(client: Client) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    error = client.refusal(CHAT, {**BODIES[CHAT], "tools": [tool], "detokenize": False})
    assert error["param"] == "detokenize" and "tools" in error["message"]


@pytest.mark.parametrize(
    ("path", "name", "hint"),
    [
        (COMPLETIONS, "max_completion_tokens", CHAT),
        (COMPLETIONS, "messages", CHAT),
        (COMPLETIONS, "tools", CHAT),
        (COMPLETIONS, "reasoning_effort", CHAT),
        (CHAT, "prompt", COMPLETIONS),
        (CHAT, "prompt_embeds", "text and token ids"),
        (COMPLETIONS, "documents", "into a message"),
        ("/tokenize", "temperature", "leave it out"),
        ("/tokenize", "add_special_token", "add_special_tokens"),
    ],
)
def test_a_hint_leads_somewhere_else(path: str, name: str, hint: str, client: Client) -> None:
    body = {**BODIES.get(path, {"prompt": "x"}), name: 1}
    error = client.refusal(path, body)
    assert error["param"] == name and hint in error["message"].partition(": ")[2]


@pytest.mark.parametrize("path", [*ROUTES, "/tokenize", "/detokenize"])
def test_no_hint_suggests_the_word_that_was_sent(path: str, client: Client) -> None:
    known = {*api_fields.OPENAI_CHAT, *api_fields.OPENAI_COMPLETIONS}
    known |= {*api_fields.VLLM_CHAT, *api_fields.VLLM_COMPLETIONS, "request_ids", "tokens"}
    body = BODIES.get(path, {"prompt": "x"} if path == "/tokenize" else {"tokens": [5]})
    count = 0
    for name in sorted(known - set(body)):
        response = client.post(path, {**body, name: {}})
        error = {"code": None} if response.status_code == 200 else error_of(response)
        if error["code"] == "unknown_parameter":
            hint = error["message"].partition("nothing was run: ")[2]
            assert hint and name not in re.findall(r"(?:mean|use) (\w+)", hint), hint
            count += 1
    assert count > 3


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"stream": True, "stream_options": {"stream": True}}, "leave it out"),
        ({"stream": True, "stream_options": {"include_usag": True}}, "include_usage"),
        ({"response_format": {"type": "text", "schema_": {}}}, "did you mean json_schema?"),
        ({"structured_outputs": {"jso": {}}}, "did you mean json?"),
    ],
)
def test_hints_within_a_field_are_names_within_it(fields: Any, hint: str, client: Client) -> None:
    error = client.refusal(COMPLETIONS, {**BODIES[COMPLETIONS], **fields})
    assert error["code"] == "unknown_parameter" and hint in error["message"], error


def test_a_long_name_is_refused_at_once(client: Client) -> None:
    body = {**BODIES[COMPLETIONS], "x" * 3_000_000: 1}
    start = process_time()
    error = client.refusal(COMPLETIONS, body)
    assert process_time() - start < 0.5
    assert len(error["message"]) < 500 and len(error["param"]) < 500


def test_context_length_has_its_code(client: Client) -> None:
    for path, fields in (
        (COMPLETIONS, {"prompt": [5] * 2000}),
        (COMPLETIONS, {"prompt": "x" * 2000}),
        (COMPLETIONS, {"prompt": "x" * 200_000}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 2000}]}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 200_000}]}),
    ):
        error = client.refusal(path, {**BODIES[path], **fields})
        assert error["code"] == "context_length_exceeded", error
        assert "maximum context length" in error["message"]
    error = error_of(client.post(COMPLETIONS, {**BODIES[COMPLETIONS], "prompt": [-1]}))
    assert error["code"] is None


def test_strict_is_a_setting() -> None:
    assert ServerSettings().strict is False
    with pytest.raises(ConfigurationError, match="strict"):
        ServerSettings(strict="yes")  # type: ignore[arg-type]
