"""Calls of the `openai` client to the server at the given address.

Run by the Python of .venv-clients. Fails by an assertion.
"""

import asyncio
import sys
from typing import Annotated, Literal

from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel, Field

QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Tokyo"]}, "celsius": {"type": "boolean"}},
            "required": ["city", "celsius"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    """A form with most kinds of values."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    colour: Literal["red", "green", "blue"]
    is_tall: bool
    lucky: list[Annotated[int, Field(ge=0, le=99)]] = Field(max_length=3)


def chats(client: OpenAI, model: str) -> None:
    """An answer, four answers, a stream, log-probabilities."""
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    assert "Tokyo" in answer.choices[0].message.content
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    text = answer.choices[0].message.content
    back = [*QUESTION, answer.choices[0].message.model_dump(), QUESTION[0]]
    assert client.chat.completions.create(model=model, messages=back, max_tokens=4).choices

    several = client.chat.completions.create(
        model=model, messages=QUESTION, n=4, seed=1, max_tokens=8, logprobs=True, top_logprobs=3
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert all(len(choice.logprobs.content[0].top_logprobs) == 3 for choice in several.choices)

    stream = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    items = list(stream)
    assert "".join(item.choices[0].delta.content or "" for item in items if item.choices) == text
    assert items[-1].usage.completion_tokens == answer.usage.completion_tokens


def completions(client: OpenAI, model: str) -> None:
    """Prompts as text, as ids, several; echo with log-probabilities; fields of vLLM's."""
    answer = client.completions.create(
        model=model, prompt=["The capital of France is"] * 2, max_tokens=4, temperature=0
    )
    assert len(answer.choices) == 2 and answer.choices[0].text == answer.choices[1].text
    answer = client.completions.create(
        model=model, prompt=[[1, 2, 3]], max_tokens=1, echo=True, logprobs=1, seed=5
    )
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    assert len(answer.choices[0].logprobs.tokens) == 4
    more = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(model=model, prompt="x", max_tokens=3, extra_body=more)
    assert len(answer.choices[0].token_ids) == 3


def tools(client: OpenAI, model: str) -> None:
    """A call that is demanded, in one piece and streamed, and its result sent back."""
    asked = {
        "model": model,
        "messages": QUESTION,
        "tools": [TOOL],
        "tool_choice": "required",
        "max_tokens": 200,
        "temperature": 0,
    }
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather" and "celsius" in call.function.arguments
    message = answer.choices[0].message.model_dump()
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    back = [*QUESTION, message, result]
    assert client.chat.completions.create(model=model, messages=back, max_tokens=4).choices
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments


def fields_without_effect(client: OpenAI, model: str) -> None:
    """Fields that only OpenAI's service reads are named; answers come back as they are."""
    sent = {
        "store": True,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "verbosity": "low",
        "modalities": ["text"],
        "tool_choice": "auto",
    }
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=QUESTION, max_tokens=4, **sent
    )
    assert set(raw.headers["x-pyengine-ignored"].split(", ")) == set(sent)
    message = raw.parse().choices[0].message.model_dump()
    message |= {"annotations": [], "id": "m1"}
    back = [*QUESTION, message, *QUESTION]
    assert client.chat.completions.create(model=model, messages=back, max_tokens=4).choices
    assert client.models.retrieve(model).id == model


def refusals(client: OpenAI, model: str) -> None:
    """Errors are those that the client knows."""
    try:
        client.completions.create(model="gpt-9", prompt="x")
        raise AssertionError("a model that is not served")
    except NotFoundError as error:
        assert error.code == "model_not_found" and error.param == "model"
    try:
        client.completions.create(model=model, prompt="x", extra_body={"guided_json": {}})
        raise AssertionError("a field that is not known")
    except BadRequestError as error:
        assert error.code == "unknown_parameter" and "structured_outputs" in error.message


async def parsed(address: str, model: str, count: int) -> None:
    """`parse` gives a valid object every time."""
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", timeout=600) as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.parse(
                    model=model,
                    messages=[{"role": "user", "content": f"Describe person {at} as JSON."}],
                    response_format=Person,
                    seed=at,
                    max_tokens=400,
                )
                for at in range(count)
            )
        )
    people = [answer.choices[0].message.parsed for answer in answers]
    valid = [person for person in people if isinstance(person, Person)]
    print(f"{len(valid)} of {count} valid, {len(set(map(str, valid)))} different")
    assert len(valid) == count


def main(address: str) -> None:
    """All of it."""
    with OpenAI(base_url=f"{address}/v1", api_key="none", timeout=600) as client:
        (card,) = client.models.list().data
        for part in (chats, completions, tools, fields_without_effect, refusals):
            part(client, card.id)
            print(part.__name__)
    asyncio.run(parsed(address, card.id, 100))


if __name__ == "__main__":
    main(sys.argv[1])
