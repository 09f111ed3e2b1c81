"""POST /v1/chat/completions: the template's prompt, the engine's answer, OpenAI's shape."""

from pathlib import Path
from typing import Any

import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.sampling_params import SamplingParams
from tests.support.serving import (
    Client,
    alone,
    make_client,
    open_small_engine,
    save_small_model,
)

USER = {"role": "user", "content": "What is the capital of France?"}
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}
PATH = "/v1/chat/completions"


def reference(engine: AsyncEngine, messages: Any, options: Any = None, **params: Any) -> Any:
    prompt = engine.apply_chat_template(messages, **(options or {}))
    return alone(engine, prompt, SamplingParams(**{**GREEDY, **params}))


def test_the_answer_is_what_the_engine_says(client: Client, engine: AsyncEngine) -> None:
    answer = client.chat([USER], **GREEDY)
    expected = reference(engine, [USER])
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": expected.outputs[0].text},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        (
            {"continue_final_message": True},
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
    ],
)
def test_options_of_the_template(
    fields: Any, options: Any, client: Client, engine: AsyncEngine
) -> None:
    messages = [USER, {"role": "assistant", "content": "It is"}]
    answer = client.chat(messages, return_token_ids=True, **fields, **GREEDY)
    expected = reference(engine, messages, options)
    assert answer["prompt_token_ids"] == expected.prompt_token_ids
    assert answer["choices"][0]["token_ids"] == expected.outputs[0].token_ids


@pytest.mark.parametrize("fields", [{}, {"n": 3, "temperature": 1, "seed": 5}])
def test_the_parts_of_a_stream_are_the_whole(fields: dict[str, Any], client: Client) -> None:
    body = {
        "messages": [USER],
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        **GREEDY,
        **fields,
    }
    whole = client.answer(PATH, body)
    events = client.events(PATH, {**body, "stream_options": {"include_usage": True}})
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        parts = [
            part
            for event in events
            for part in event["choices"]
            if part["index"] == choice["index"]
        ]
        text = "".join(part["delta"].get("content", "") for part in parts)
        assert text == choice["message"]["content"]
        assert parts[0]["delta"]["role"] == "assistant"
        assert not [part for part in parts[1:] if "role" in part["delta"]]
        entries = [entry for part in parts for entry in part["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == "length"


def test_items_of_text_alone_are_as_those_with_more(client: Client) -> None:
    body = {"messages": [USER], "n": 2, "temperature": 1, "seed": 5, "ignore_eos": True}
    body["max_tokens"] = 40
    plain = client.events(PATH, body)
    more = client.events(PATH, {**body, "return_token_ids": True})
    for index in range(2):
        texts = []
        for events in (plain, more):
            choices = [
                part for event in events for part in event["choices"] if part["index"] == index
            ]
            assert choices[0]["delta"]["role"] == "assistant"
            assert not [choice for choice in choices[1:] if "role" in choice["delta"]]
            texts.append("".join([choice["delta"].get("content", "") for choice in choices]))
            assert [choice["finish_reason"] for choice in choices] == [None] * (
                len(choices) - 1
            ) + ["length"]
        assert texts[0] == texts[1]
    for event in plain:
        assert sorted(event) == ["choices", "created", "id", "model", "object"]
        (choice,) = event["choices"]
        assert sorted(choice) == ["delta", "finish_reason", "index", "logprobs", "stop_reason"]
    assert len({event["id"] for event in plain}) == 1


def test_logprobs_are_those_of_the_engine(client: Client, engine: AsyncEngine) -> None:
    expected = reference(engine, [USER], logprobs=3).outputs[0]
    (choice,) = client.chat([USER], logprobs=True, top_logprobs=3, **GREEDY)["choices"]
    content = choice["logprobs"]["content"]
    for entry, token, entries in zip(content, expected.token_ids, expected.logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(entries[token].logprob)
        assert bytes(entry["bytes"]) == entries[token].token_bytes
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True) and len(values) == 3
    (choice,) = client.chat([USER], logprobs=True, **GREEDY)["choices"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[]] * 6


def test_without_a_limit_an_answer_ends_with_the_model(client: Client) -> None:
    answer = client.chat([USER], temperature=0, ignore_eos=True, stop_token_ids=list(range(290)))
    assert answer["choices"][0]["finish_reason"] == "stop"
    answer = client.chat([USER], **{**GREEDY, "max_tokens": None, "max_completion_tokens": 3})
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 3, "max_completion_tokens": 3}, "mean the same"),
        ({"top_logprobs": 3}, "needs logprobs"),
        ({"chat_template_kwargs": {"tokenize": False}}, "allows enable_thinking"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "allows enable_thinking"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "set one of them"),
        ({"stream_options": {"include_usage": True}}, "needs stream: true"),
    ],
)
def test_options_that_contradict_each_other(fields: Any, words: str, client: Client) -> None:
    error = client.refusal(PATH, {"messages": [USER], **fields})
    assert words in error["message"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user"}, "neither 'content' nor 'tool_calls'"),
        ({"content": "x"}, "'role' and 'content'"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///"}}]},
            "takes text",
        ),
        ({"role": "user", "content": 5}, "takes text"),
        ({"role": "user", "content": "x", "colour": "red"}, "'colour'"),
    ],
)
def test_messages_that_no_template_takes(message: Any, words: str, client: Client) -> None:
    error = client.refusal(PATH, {"messages": [message], "max_tokens": 1})
    assert words in error["message"]


def test_what_clients_send_back_of_an_answer_is_taken(client: Client) -> None:
    """The openai client dumps its own answers with all their fields, most of them null."""
    back = {"role": "assistant", "content": "Paris", "refusal": None, "annotations": None}
    assert client.chat([USER, back, USER], **GREEDY)["choices"]


def test_the_type_of_a_message_may_be_named(client: Client) -> None:
    """As lm-eval does."""
    plain = client.chat([USER], return_token_ids=True, **GREEDY)
    typed = client.chat([{**USER, "type": "text"}], return_token_ids=True, **GREEDY)
    assert typed["prompt_token_ids"] == plain["prompt_token_ids"]
    body = {"messages": [{**USER, "type": "image"}]}
    assert "'type'" in client.refusal(PATH, body)["message"]


def test_an_endless_template_costs_its_caller_a_refusal(tmp_path: Path) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    save_small_model(tmp_path, "{% if messages[0].content == 'x' %}" + endless + "{% endif %}ab")
    with open_small_engine(tmp_path) as engine:
        client = make_client(engine, template_timeout=0.2)
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        for _ in range(3):  # more than there are threads
            assert "after 0.2 seconds" in client.refusal(PATH, body)["message"]
        assert client.chat([USER], max_tokens=1)["choices"]


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True}, {"logprobs": 1}])
def test_the_usage_is_null_in_all_chunks_but_the_last(
    path: str, fields: Any, client: Client
) -> None:
    fields = {**fields, "logprobs": True} if path == PATH and "logprobs" in fields else fields
    prompt = {"messages": [USER]} if path == PATH else {"prompt": [5, 6]}
    body = {**prompt, **GREEDY, **fields, "max_tokens": 8}
    *events, last = client.events(path, {**body, "stream_options": {"include_usage": True}})
    assert events
    assert [event["usage"] for event in events] == [None] * len(events)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8
    usage = {"include_usage": True, "continuous_usage_stats": True}
    assert all(event["usage"] for event in client.events(path, {**body, "stream_options": usage}))
    for options in ({"stream_options": None}, {"stream_options": {"include_usage": None}}, {}):
        assert not [event for event in client.events(path, {**body, **options}) if "usage" in event]


def test_many_messages_are_too_long_not_too_many(client: Client, engine: AsyncEngine) -> None:
    several = [{"role": "user", "content": "x"}] * 1025
    for count in (1025, 5000):
        error = client.refusal(PATH, {"messages": several[:1] * count})
        assert error["code"] == "context_length_exceeded", error
        assert "maximum context length" in error["message"]
    assert len(engine.apply_chat_template(several)) > len(several)


def test_bytes_of_logprobs_add_up_to_the_text(client: Client) -> None:
    """With parts of characters, of which the tokenizer makes U+FFFD one by one."""
    tokenizer = client.context.engine.tokenizer
    ids = tokenizer.encode("東京😀é", add_special_tokens=False)
    parts = 0
    for seed in range(4):
        body = {"allowed_token_ids": ids, "temperature": 1, "seed": seed, "max_tokens": 30}
        answer = client.chat([USER], logprobs=True, top_logprobs=3, ignore_eos=True, **body)
        (choice,) = answer["choices"]
        content = choice["logprobs"]["content"]
        joined = b"".join(bytes(entry["bytes"]) for entry in content)
        assert joined.decode(errors="replace") == choice["message"]["content"]
        parts += sum(entry["token"] == "\ufffd" for entry in content)
        for entry in content:
            same = [top for top in entry["top_logprobs"] if top["logprob"] == entry["logprob"]]
            assert not same or entry["bytes"] in [top["bytes"] for top in same]
            assert [0xEF, 0xBF, 0xBD] not in [top["bytes"] for top in entry["top_logprobs"]]
    assert parts > 20


def test_the_end_of_an_answer_adds_no_bytes(client: Client) -> None:
    end = client.context.engine.tokenizer.eos_token_id
    bias = {"logit_bias": {str(end): 100}, "min_tokens": 2, "temperature": 0, "logprobs": True}
    (choice,) = client.chat([USER], **bias)["choices"]
    content = choice["logprobs"]["content"]
    assert choice["finish_reason"] == "stop" and content[-1]["token"] == "<|end|>"
    joined = b"".join(bytes(entry["bytes"]) for entry in content)
    assert joined.decode(errors="replace") == choice["message"]["content"]
