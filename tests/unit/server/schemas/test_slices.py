"""Responses that are serialized in slices are those that pydantic serializes at once."""

import asyncio
import json
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import pytest

from pyengine.outputs import Logprob
from pyengine.server.schemas.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from pyengine.server.schemas.responses import (
    ChatChoice,
    ChatCompletionResponse,
    ChatMessage,
    CompletionChoice,
    CompletionResponse,
    PromptTokensDetails,
    ServerModel,
    Usage,
)
from pyengine.server.schemas.slices import JsonThread, SlicedList, is_long, json_slices

ALPHABET = ["a", "é", '"', "\\", "\u2028", "\U0001f600", "", None]


def entries(count: int, top: int = 3) -> list[dict[int, Logprob] | None]:
    return [
        {
            index + rank: Logprob(-1.5 * rank, rank + 1, ALPHABET[(index + rank) % len(ALPHABET)])
            for rank in range(top)
        }
        for index in range(count)
    ]


def usage() -> Usage:
    details = PromptTokensDetails(cached_tokens=0)
    return Usage(
        prompt_tokens=1, completion_tokens=2, total_tokens=3, prompt_tokens_details=details
    )


def completion(count: int, num_choices: int = 2) -> CompletionResponse:
    choices = []
    for index in range(num_choices):
        choice = CompletionChoice(index=index, text="é\u2028", finish_reason=None, stop_reason=None)
        of_all = [None, *entries(count)[1:]]
        choice.logprobs = completion_logprobs(range(count), of_all, first="x", as_ids=None)
        choice.prompt_logprobs = prompt_logprobs(of_all)
        choices.append(choice)
    return CompletionResponse(
        id="1", object="text_completion", created=1, model="m", choices=choices, usage=usage()
    )


def chat(count: int) -> ChatCompletionResponse:
    logprobs = chat_logprobs(range(count), entries(count), top=2, as_ids=None)
    message = ChatMessage(role="assistant", content="x")
    return ChatCompletionResponse(
        id="1",
        object="chat.completion",
        created=1,
        model="m",
        choices=[ChatChoice(index=0, message=message, logprobs=logprobs, finish_reason="stop")],
        usage=usage(),
        prompt_logprobs=prompt_logprobs([None, *entries(count)]),
    )


async def whole_of(thread: JsonThread, model: ServerModel) -> bytes:
    return b"".join([piece async for piece in thread.json_of(model)])


def with_lists(value: Any) -> Any:
    """The same, with a list instead of each sliced list."""
    if isinstance(value, SlicedList):
        return [with_lists(item) for item in value]
    if isinstance(value, list):
        return [with_lists(item) for item in value]
    if isinstance(value, ServerModel):
        for name in value.model_fields_set:
            setattr(value, name, with_lists(getattr(value, name)))
    return value


@pytest.mark.parametrize("count", [1, 40, 100])
@pytest.mark.parametrize("make", [completion, chat])
def test_slices_are_the_same_json(make: Any, count: int) -> None:
    sliced = b"".join(json_slices(make(count))).decode()
    assert sliced == with_lists(make(count)).to_json()
    assert is_long(make(count)) == (count > 1)


def test_responses_without_long_lists_are_serialized_at_once() -> None:
    for num_choices, is_on_thread in ((0, False), (1, False), (33, True)):
        model = completion(1, num_choices)
        assert is_long(model) == is_on_thread
        assert b"".join(json_slices(model)).decode() == model.to_json()


async def test_the_event_loop_runs_between_slices() -> None:
    model = completion(3000, 8)
    begin = perf_counter()
    whole = b"".join(json_slices(model))
    at_once = perf_counter() - begin
    thread, waits = JsonThread(), []
    task = asyncio.create_task(whole_of(thread, model))
    while not task.done():
        begin = perf_counter()
        await asyncio.sleep(0.001)
        waits.append(perf_counter() - begin)
    thread.close()
    assert task.result() == whole and json.loads(whole)["choices"]
    assert max(waits) < max(0.1, at_once / 3) and len(waits) > 5


async def test_long_responses_take_turns() -> None:
    def items(name: str, ends: list[str]) -> Iterator[int]:
        yield from range(200_000)
        ends.append(name)

    thread, ends = JsonThread(), []  # type: ignore[var-annotated]
    long, short = completion(1), completion(40)
    long.choices[0].token_ids = SlicedList(200_000, lambda: items("long", ends))  # type: ignore

    async def wait_for(model: CompletionResponse, name: str) -> None:
        await whole_of(thread, model)
        ends.append(f"{name} is sent")

    await asyncio.gather(wait_for(long, "long"), wait_for(short, "short"))
    thread.close()
    assert ends == ["short is sent", "long", "long is sent"]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_does_not_have_are_null_as_in_other_responses(number: float) -> None:
    model = completion(2, 1)
    logprobs = model.choices[0].logprobs
    assert logprobs is not None
    logprobs.token_logprobs = SlicedList(2, lambda: iter([number, -1.0]))  # type: ignore[assignment]
    sent = json.loads(b"".join(json_slices(model)), parse_constant=pytest.fail)
    assert sent["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0]
