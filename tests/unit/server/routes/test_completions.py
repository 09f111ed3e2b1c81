"""POST /v1/completions: the engine's answers in OpenAI's shape, streamed and not."""

import asyncio
import re
import threading
from typing import Any

import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.sampling_params import SamplingParams
from tests.support.serving import MAX_MODEL_LEN, Client, alone, make_client

GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}
LONG = {"ignore_eos": True, "max_tokens": 40}
TEXT = "The capital of France is Paris."


def reference(engine: AsyncEngine, prompt: Any, **params: Any) -> Any:
    return alone(engine, prompt, SamplingParams(**{**GREEDY, **params}))


def test_the_text_is_what_the_engine_says(client: Client, engine: AsyncEngine) -> None:
    answer = client.complete(TEXT, **GREEDY)
    expected = reference(engine, TEXT)
    assert answer["choices"] == [
        {
            "index": 0,
            "text": expected.outputs[0].text,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    count = len(expected.prompt_token_ids)
    assert answer["usage"]["prompt_tokens"] == count
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["total_tokens"] == count + 6
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-") and answer["created"] > 1e9
    assert answer["model"] == client.context.names[0]


def test_cached_tokens_are_told(client: Client) -> None:
    prompt = [7, 8, 9] * 20
    client.complete(prompt, **GREEDY)
    usage = client.complete(prompt, **GREEDY)["usage"]
    assert usage["prompt_tokens"] == 60
    assert usage["prompt_tokens_details"] == {"cached_tokens": 48}  # whole blocks


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        (TEXT, 1),
        ([5, 6, 7], 1),
        ([TEXT, "Tokyo"], 2),
        ([[5, 6, 7], [8, 9]], 2),
    ],
    ids=["text", "ids", "texts", "lists of ids"],
)
def test_prompts_in_every_form(
    prompt: Any, count: int, client: Client, engine: AsyncEngine
) -> None:
    several = prompt if count > 1 else [prompt]
    answer = client.complete(prompt, n=2, return_token_ids=True, **GREEDY)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * count))
    for number, single in enumerate(several):
        expected = reference(engine, single, n=2)
        for index in range(2):
            choice = answer["choices"][number * 2 + index]
            assert choice["token_ids"] == expected.outputs[index].token_ids
            assert choice["prompt_token_ids"] == expected.prompt_token_ids
    assert answer["usage"]["completion_tokens"] == 6 * 2 * count


@pytest.mark.parametrize("fields", [{}, {"n": 3, "temperature": 1, "seed": 5}, {"echo": True}])
def test_the_parts_of_a_stream_are_the_whole(fields: dict[str, Any], client: Client) -> None:
    body = {"prompt": [TEXT, "Tokyo"], "logprobs": 2, "return_token_ids": True, **GREEDY, **fields}
    whole = client.answer("/v1/completions", body)
    events = client.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == []
    usage, expected = events[-1]["usage"], whole["usage"]
    assert {**usage, "prompt_tokens_details": 0} == {**expected, "prompt_tokens_details": 0}
    for choice in whole["choices"]:
        parts = [
            part
            for event in events
            for part in event["choices"]
            if part["index"] == choice["index"]
        ]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        for name, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values, name
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
        assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert not [part for part in parts[1:] if "prompt_token_ids" in part]
    assert len({event["id"] for event in events}) == 1
    assert len(events) > len(whole["choices"])


def test_items_of_text_alone_are_as_those_with_more(client: Client) -> None:
    body = {"prompt": [TEXT, "Tokyo"], "n": 2, "temperature": 1, "seed": 5, **LONG}
    plain = client.events("/v1/completions", body)
    more = client.events("/v1/completions", {**body, "return_token_ids": True})
    for index in range(4):
        texts = []
        for events in (plain, more):
            choices = [
                choice
                for event in events
                for choice in event["choices"]
                if choice["index"] == index
            ]
            texts.append("".join([choice["text"] for choice in choices]))
            assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (
                len(choices) - 1
            )
            assert choices[-1]["finish_reason"] == "length"
        assert texts[0] == texts[1]
    for event in plain:
        assert {**event, "id": 0, "created": 0} == {
            "id": 0,
            "object": "text_completion",
            "created": 0,
            "model": client.context.names[0],
            "choices": event["choices"],
        }
        (choice,) = event["choices"]
        assert sorted(choice) == ["finish_reason", "index", "stop_reason", "text"]
    assert len({event["id"] for event in plain}) == len({event["created"] for event in plain}) == 1


def test_what_is_echoed_comes_with_the_first_item(client: Client) -> None:
    body = {"prompt": TEXT, "echo": True, "temperature": 0, **LONG}
    texts = [event["choices"][0]["text"] for event in client.events("/v1/completions", body)]
    assert texts[0].startswith(TEXT) and len(texts) > 1
    assert "".join(texts) == client.answer("/v1/completions", body)["choices"][0]["text"]


def test_usage_in_every_item_of_a_stream(client: Client) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    events = client.events(
        "/v1/completions", {"prompt": [5, 6], "stream_options": options, **GREEDY}
    )
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 6
    assert {event["usage"]["prompt_tokens"] for event in events} == {2}


def test_logprobs_are_those_of_the_engine(client: Client, engine: AsyncEngine) -> None:
    expected = reference(engine, TEXT, logprobs=3).outputs[0]
    (choice,) = client.complete(TEXT, logprobs=3, **GREEDY)["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx(
        [
            several[token].logprob
            for token, several in zip(expected.token_ids, expected.logprobs, strict=True)
        ]
    )
    assert logprobs["text_offset"][0] == 0
    data = [
        several[token].token_bytes
        for token, several in zip(expected.token_ids, expected.logprobs, strict=True)
    ]
    lengths = [sum(byte & 0xC0 != 0x80 for byte in part) for part in data]
    assert logprobs["text_offset"] == [sum(lengths[:at]) for at in range(6)]


def test_the_likeliest_tokens_are_there(client: Client, engine: AsyncEngine) -> None:
    expected = reference(engine, TEXT, logprobs=3).outputs[0]
    fields = {"logprobs": 3, "return_tokens_as_token_ids": True, **GREEDY}
    (choice,) = client.complete(TEXT, **fields)["choices"]
    for top, entries in zip(choice["logprobs"]["top_logprobs"], expected.logprobs, strict=True):
        assert top == {
            f"token_id:{token}": pytest.approx(entry.logprob) for token, entry in entries.items()
        }


def test_echo_has_the_log_probabilities_of_the_prompt(client: Client, engine: AsyncEngine) -> None:
    expected = reference(engine, TEXT, prompt_logprobs=1)
    (choice,) = client.complete(TEXT, logprobs=1, echo=True, **GREEDY)["choices"]
    assert choice["text"] == TEXT + expected.outputs[0].text
    logprobs = choice["logprobs"]
    count = len(expected.prompt_token_ids)
    assert len(logprobs["tokens"]) == count + 6
    assert "".join(logprobs["tokens"][:count]) == TEXT
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:count] == pytest.approx(
        [
            several[token].logprob
            for token, several in zip(
                expected.prompt_token_ids[1:], expected.prompt_logprobs[1:], strict=True
            )
        ]
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [TEXT, [5, 6, 7], [[5, 6, 7], [8, 9]]])
def test_a_prompt_alone(prompt: Any, stream: bool, client: Client) -> None:
    """`max_tokens=0` computes the prompt for its log-probabilities, and nothing else."""
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    more = client.answer("/v1/completions", {**body, "max_tokens": 1})
    if stream:
        events = client.events("/v1/completions", body)
        choices = sorted(
            [choice for event in events for choice in event["choices"]],
            key=lambda choice: choice["index"],
        )
    else:
        answer = client.answer("/v1/completions", body)
        assert answer["usage"]["completion_tokens"] == 0
        choices = answer["choices"]
    for choice, other in zip(choices, more["choices"], strict=True):
        assert choice["finish_reason"] == "length"
        for name, values in choice["logprobs"].items():
            assert values == other["logprobs"][name][:-1]


def test_a_prompt_alone_may_fill_the_model(client: Client) -> None:
    prompt = [5] * MAX_MODEL_LEN
    answer = client.complete(prompt, max_tokens=0)
    assert answer["usage"]["prompt_tokens"] == MAX_MODEL_LEN
    error = client.refusal("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    assert "at most 1023 fit" in error["message"]
    error = client.refusal("/v1/completions", {"prompt": [5] * 1025, "max_tokens": 0})
    assert "1025 tokens; at most 1024 fit" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_more_tokens_than_the_context_holds_are_refused(stream: bool, client: Client) -> None:
    prompt = [5] * (MAX_MODEL_LEN - 8)
    body = {"prompt": prompt, "ignore_eos": True, "stream": stream}
    error = client.refusal("/v1/completions", {**body, "max_tokens": 9})
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert "max_tokens=9" in error["message"] and "at most 8" in error["message"]
    assert f"{len(prompt)} tokens" in error["message"]
    client.refusal("/v1/completions", {**body, "prompt": [[5], prompt], "max_tokens": 9})
    client.refusal("/v1/completions", {**body, "max_tokens": 2**63 - 1})


def test_a_prompt_that_is_truncated_leaves_more_for_the_answer(client: Client) -> None:
    body = {"prompt": [5] * 2000, "truncate_prompt_tokens": MAX_MODEL_LEN - 4, "ignore_eos": True}
    assert client.complete(**body, max_tokens=4)["usage"]["completion_tokens"] == 4
    client.refusal("/v1/completions", {**body, "max_tokens": 5})


def test_the_longest_answer_of_a_server(engine: AsyncEngine) -> None:
    """Requests that ask for more are refused; those that do not say get no more."""
    client = make_client(engine, max_answer_tokens=5)
    error = client.refusal("/v1/completions", {"prompt": [5], "max_tokens": 6})
    assert (error["param"], error["code"]) == ("max_tokens", "max_answer_tokens")
    assert "max_tokens=6" in error["message"] and "limit is 5" in error["message"]
    for max_tokens, num_tokens in ((5, 5), (None, 5), (0, 0)):
        answer = client.complete([5], max_tokens=max_tokens, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == num_tokens
        assert answer["choices"][0]["finish_reason"] == "length"
    message = [{"role": "user", "content": "x"}]
    answer = client.chat(message, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 5
    chat = {"messages": message, "max_completion_tokens": 6}
    assert client.refusal("/v1/chat/completions", chat)["param"] == "max_completion_tokens"


def test_prompt_logprobs_by_token_id(client: Client, engine: AsyncEngine) -> None:
    expected = reference(engine, [5, 6, 7], prompt_logprobs=2)
    (choice,) = client.complete([5, 6, 7], prompt_logprobs=2, **GREEDY)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    for actual, entries in zip(rest, expected.prompt_logprobs[1:], strict=True):
        assert {int(token) for token in actual} == set(entries)
        for token, entry in entries.items():
            assert actual[str(token)]["logprob"] == pytest.approx(entry.logprob)
            assert actual[str(token)]["rank"] == entry.rank
            assert actual[str(token)]["decoded_token"] == entry.decoded_token


def test_tokens_as_ids(client: Client) -> None:
    (choice,) = client.complete(
        [5, 6], logprobs=1, echo=True, return_tokens_as_token_ids=True, **GREEDY
    )["choices"]
    assert choice["logprobs"]["tokens"][:2] == ["token_id:5", "token_id:6"]


FIELDS: dict[str, Any] = {
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.2,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.5,
    "stop_token_ids": [40, 41],
    "min_tokens": 3,
    "bad_words": ["a", "b"],
    "allowed_token_ids": [40, 50, 60],
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "truncate_prompt_tokens": 2,
    "stop": ["a", "e", "1", "2", "3"],
    "ignore_eos": False,
}


@pytest.mark.parametrize(("name", "value"), FIELDS.items(), ids=FIELDS)
def test_every_sampling_parameter_reaches_the_engine(
    name: str, value: Any, client: Client, engine: AsyncEngine
) -> None:
    fields = {"temperature": 1.0, "seed": 3, "max_tokens": 24, "ignore_eos": True, name: value}
    expected = alone(engine, TEXT, SamplingParams(**fields))
    answer = client.complete(TEXT, return_token_ids=True, **fields)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected.outputs[0].token_ids
    assert choice["text"] == expected.outputs[0].text
    assert choice["finish_reason"] == expected.outputs[0].finish_reason
    assert choice["stop_reason"] == expected.outputs[0].stop_reason


def test_logit_bias_is_keyed_by_text(client: Client) -> None:
    answer = client.complete(
        TEXT, logit_bias={"77": 100}, max_tokens=3, ignore_eos=True, return_token_ids=True
    )
    assert answer["choices"][0]["token_ids"] == [77, 77, 77]


def test_null_is_as_if_it_was_left_out(client: Client) -> None:
    names = ("stop", "seed", "n", "max_tokens", "logit_bias", "logprobs", "stream", "priority")
    names += ("suffix", "best_of", "guided_json")  # they change nothing so
    whole = client.complete(TEXT, temperature=0)
    nulls = client.complete(TEXT, temperature=0, **dict.fromkeys(names))
    assert nulls["choices"] == whole["choices"]


def test_salts_part_the_cache(client: Client) -> None:
    prompt = [9, 8, 7] * 20

    def cached(**fields: Any) -> int:
        usage = client.complete(prompt, **GREEDY, **fields)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached(cache_salt="mine")
    assert cached(cache_salt="mine") == 48
    assert cached(cache_salt="yours") == 0


def test_the_id_of_a_client_comes_back_and_is_not_the_servers(client: Client) -> None:
    body = {"prompt": [5], "max_tokens": 1}
    named = {**body, "request_id": "mine"}
    seen = set()
    for fields, headers, expected in (
        (body, {"x-request-id": "abc"}, "abc"),
        (body, {"x-request-id": "abc"}, "abc"),
        (named, {"x-request-id": "abc"}, "mine"),
        (named, {}, "mine"),
    ):
        response = client.post("/v1/completions", fields, headers=headers)
        assert response.headers["x-request-id"] == expected
        name = response.json()["id"]
        assert re.fullmatch(rf"cmpl-{expected}-[0-9a-f]{{32}}", name)
        seen.add(name)
    for headers in ({}, {"x-request-id": "two words"}, {"x-request-id": "x" * 201}):
        response = client.post("/v1/completions", body, headers=headers)
        name = response.json()["id"]
        assert name == f"cmpl-{response.headers['x-request-id']}" and len(name) == 37
        seen.add(name)
    assert len(seen) == 7


def test_priorities_are_taken_as_far_as_the_server_lets(client: Client) -> None:
    body = {"prompt": [5], "max_tokens": 1}
    for priority in (-1e9, -3, 0.5):
        error = client.refusal("/v1/completions", {**body, "priority": priority})
        assert error["param"] == "priority" and "--max-priority" in error["message"]
    assert client.complete(**body, priority=0)["choices"]
    bounded = make_client(client.context.engine, max_priority=3)
    assert bounded.complete(**body, priority=-3)["choices"]
    error = bounded.refusal("/v1/completions", {**body, "priority": 3.5})
    assert "from -3 to 3" in error["message"]


async def test_no_thread_is_taken_for_a_request(client: Client) -> None:
    async with client.open() as http:
        body = {"prompt": [5, 6], "max_tokens": 2}
        calls = [http.post("/v1/completions", json=body) for _ in range(8)]
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
        names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if "AnyIO" in name]


@pytest.mark.parametrize("stream", [False, True])
def test_parts_of_characters_have_their_bytes_and_their_place(stream: bool, client: Client) -> None:
    """As in OpenAI's API: `bytes:\\xe6\\x9d`. Offsets are those of the text."""
    tokenizer, text = client.context.engine.tokenizer, "a東京 😀é"
    allowed = tokenizer.encode(text, add_special_tokens=False)
    body = {"prompt": text, "echo": True, "logprobs": 2, "max_tokens": 20, "temperature": 1}
    body |= {"seed": 1, "allowed_token_ids": allowed, "ignore_eos": True}
    if stream:
        choices = [event["choices"][0] for event in client.events("/v1/completions", body)]
    else:
        choices = client.answer("/v1/completions", body)["choices"]
    whole = "".join(choice["text"] for choice in choices)
    assert whole.startswith(text)
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    tops = [top for choice in choices for top in choice["logprobs"]["top_logprobs"]]
    offsets = [at for choice in choices for at in choice["logprobs"]["text_offset"]]
    joined = b"".join(
        bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
        if token.startswith("bytes:")
        else token.encode()
        for token in tokens
    )
    assert joined.decode(errors="replace") == whole
    assert sum(token.startswith("bytes:") for token in tokens) > 10
    assert all(token in top for token, top in zip(tokens[1:], tops[1:], strict=True))
    echoed = offsets[: len(allowed)]
    for at, token in zip(echoed, tokens, strict=False):
        if not token.startswith("bytes:"):
            assert text[at:].startswith(token)
    assert echoed == sorted(echoed) and offsets[len(allowed)] == len(text)


def test_bytes_of_parts_of_characters_in_the_prompt(client: Client) -> None:
    tokenizer, text = client.context.engine.tokenizer, "a東京"
    ids = tokenizer.encode(text, add_special_tokens=False)
    body = {"prompt": text, "max_tokens": 0, "prompt_logprobs": 1}
    (choice,) = client.answer("/v1/completions", body)["choices"]
    data = b"a"
    for token, entries in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True):
        entry = entries[str(token)]
        data += bytes(entry.get("bytes") or entry["decoded_token"].encode())
        assert ("bytes" in entry) == ("\ufffd" in entry["decoded_token"])
    assert data.decode() == text
