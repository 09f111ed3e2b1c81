"""Chats of models whose template leaves thinking out of later turns."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyengine import LLM, SamplingParams
from pyengine.async_engine import AsyncEngine
from tests.support import chat
from tests.support.checkpoints import save_tiny
from tests.support.serving import make_client, open_small_engine
from tests.support.tokenizers import save_tokenizer

USER = {"role": "user", "content": "What is the capital of France?"}


@pytest.fixture(scope="module", params=[chat.CHATML, chat.BEGINS_THINKING], ids=["all", "strips"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """A model, and whether its template strips thinking."""
    path = tmp_path_factory.mktemp("thinks")
    settings = {"max_position_embeddings": 512, "dtype": "float32", "eos_token_id": 0}
    save_tiny(path, vocab_size=chat.VOCAB_SIZE + 3, **settings)
    save_tokenizer(path, chat.thinking_tokenizer(request.param))
    return path, request.param == chat.BEGINS_THINKING


@pytest.fixture
def served(folder: tuple[Path, bool]) -> Iterator[tuple[AsyncEngine, bool]]:
    with open_small_engine(folder[0]) as engine:
        yield engine, folder[1]


def test_only_what_the_next_turn_repeats_stays_cached(served: tuple[AsyncEngine, bool]) -> None:
    engine, strips = served
    client = make_client(engine)
    body = {"messages": [USER], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    usage = client.answer("/v1/chat/completions", body)["usage"]
    num_prompt = usage["prompt_tokens"]
    cached = num_prompt - 2 if strips else num_prompt + 59  # "<think>" and a new line end it
    assert engine.stats().usage.evictable == cached // 16
    again = client.answer("/v1/chat/completions", body)["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == (num_prompt - 1) // 16 * 16
    evictable = engine.stats().usage.evictable
    texts = {"prompt": [5] * 40, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    client.answer("/v1/completions", texts)
    assert engine.stats().usage.evictable == evictable + 99 // 16


def test_the_same_in_python(folder: tuple[Path, bool]) -> None:
    path, strips = folder
    llm = LLM(path, device="cpu", block_size=16, num_blocks=80)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=60)
    (output,) = llm.chat([USER], params, use_tqdm=False)
    cached = len(output.prompt_token_ids) + (-2 if strips else 59)
    assert llm.stats().usage.evictable == cached // 16
    llm.close()


@pytest.mark.parametrize("stream", [False, True])
def test_the_budget_of_thinking_is_a_field_of_chats(
    served: tuple[AsyncEngine, bool], stream: bool
) -> None:
    engine, begins = served
    client = make_client(engine)
    (begin, end) = engine.tokenizer.encode("<think></think>", add_special_tokens=False)
    greedy = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = {"messages": [USER], **greedy, "thinking_token_budget": 4}
    if not begins:
        body["logit_bias"] = {str(begin): 100}  # the answer thinks again and again
    if stream:
        chunks = client.events("/v1/chat/completions", body)
        tokens = [
            token
            for chunk in chunks
            for choice in chunk["choices"]
            for token in choice.get("token_ids") or ()
        ]
    else:
        tokens = client.answer("/v1/chat/completions", body)["choices"][0]["token_ids"]
    assert tokens.index(end) == (3 if begins else 5)  # the new line counts, the marker does not
    free = {**body, "thinking_token_budget": -1}
    free = client.answer("/v1/chat/completions", free)["choices"][0]["token_ids"]
    assert tokens[: tokens.index(end)] == free[: tokens.index(end)]
    error = client.refusal("/v1/chat/completions", {**body, "thinking_token_budget": -5})
    assert "thinking_token_budget=-5" in error["message"]


@pytest.mark.parametrize("name", ["logits_processors", "stop_when", "stopping_criteria"])
def test_code_cannot_be_sent(served: tuple[AsyncEngine, bool], name: str) -> None:
    client = make_client(served[0])
    error = client.refusal("/v1/chat/completions", {"messages": [USER], name: ["os.system"]})
    assert name in error["message"]
    assert "code cannot be sent" in error["message"]
