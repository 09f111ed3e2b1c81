"""Fields that set variables of the chat template."""

from pathlib import Path
from typing import Any

import pytest

from pyengine.async_engine import AsyncEngine
from tests.support import chat
from tests.support.serving import Client, make_client, open_small_engine, save_small_model
from tests.unit.server.bodies import BODIES, CHAT, HEADER, USER

READS_EFFORT = chat.CHATML.replace("enable_thinking", "reasoning_effort")
SHOWS_EFFORT = "{% for m in messages %}{{ m.content }}{% endfor %}<{{ reasoning_effort }}>"


@pytest.fixture(scope="module")
def effort_engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_small_model(tmp_path_factory.mktemp("effort"), SHOWS_EFFORT)
    with open_small_engine(folder) as engine:
        yield engine


def prompt_of(client: Client, **fields: Any) -> tuple[str, str | None]:
    """The prompt of a chat, and what was ignored."""
    response = client.post(CHAT, {**BODIES[CHAT], **fields, "return_token_ids": True})
    assert response.status_code == 200, response.text
    ids = response.json()["prompt_token_ids"]
    assert client.answer("/tokenize", {"messages": [USER], **fields})["tokens"] == ids
    text = client.answer("/detokenize", {"tokens": ids})["prompt"]
    return text, response.headers.get(HEADER)


def test_reasoning_effort_reaches_a_template_that_reads_it(effort_engine: AsyncEngine) -> None:
    client = make_client(effort_engine)
    text, ignored = prompt_of(client, reasoning_effort="high")
    assert text.endswith("<high>") and ignored is None
    same = {"chat_template_kwargs": {"reasoning_effort": "high"}}
    assert prompt_of(client, **same) == (text, None)
    assert prompt_of(client, **same, reasoning_effort="high") == (text, None)
    other = {**BODIES[CHAT], **same, "reasoning_effort": "low"}
    assert client.refusal(CHAT, other)["param"] == "reasoning_effort"
    kept = make_client(effort_engine, template_variable=("enable_thinking",))
    assert prompt_of(kept, reasoning_effort="high")[1] == "reasoning_effort"
    body = {**BODIES[CHAT], "reasoning_effort": "high"}
    assert make_client(effort_engine, strict=True).answer(CHAT, body)["choices"]


def test_reasoning_effort_turns_thinking_on_and_off(client: Client) -> None:
    """The template reads `enable_thinking` alone."""
    plain, _ = prompt_of(client)
    assert prompt_of(client, reasoning_effort="high") == (plain, None)
    off, ignored = prompt_of(client, reasoning_effort="none")
    assert off.endswith("<think>\n\n</think>\n\n") and ignored is None
    expected = {"chat_template_kwargs": {"enable_thinking": False}}
    assert prompt_of(client, **expected)[0] == off
    assert prompt_of(client, **expected, reasoning_effort="high") == (off, "reasoning_effort")


def test_reasoning_effort_is_named_where_no_template_reads_it(tmp_path: Path) -> None:
    with open_small_engine(save_small_model(tmp_path, chat.CONCATENATES)) as engine:
        text, ignored = prompt_of(make_client(engine), reasoning_effort="high")
        body = {"messages": [USER], "reasoning_effort": "high"}
        response = make_client(engine).post("/tokenize", body)
        assert response.headers[HEADER] == "reasoning_effort"
        error = make_client(engine, strict=True).refusal("/tokenize", body)
        assert error["param"] == "reasoning_effort"
    assert ignored == "reasoning_effort"
    assert text == prompt_of_messages(USER)


def prompt_of_messages(*messages: Any) -> str:
    return (
        "".join([f"[{message['role']}]{message['content']}\n" for message in messages])
        + "[assistant]"
    )
