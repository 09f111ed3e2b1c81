"""POST /tokenize, /detokenize, GET /tokenizer_info: the tokenizer's own answers."""

from typing import Any

import pytest

from pyengine.async_engine import AsyncEngine
from tests.support.serving import MAX_MODEL_LEN, Client

TEXT = "The capital of France is Paris."
USER = {"role": "user", "content": TEXT}


def test_a_text_there_and_back(client: Client, engine: AsyncEngine) -> None:
    answer = client.answer("/tokenize", {"prompt": TEXT, "return_token_strs": True})
    ids = engine.tokenizer.encode(TEXT)
    assert answer == {
        "count": len(ids),
        "max_model_len": MAX_MODEL_LEN,
        "tokens": ids,
        "token_strs": engine.tokenizer.convert_ids_to_tokens(ids),
    }
    assert client.answer("/detokenize", {"tokens": ids}) == {"prompt": TEXT}


def test_a_conversation(client: Client, engine: AsyncEngine) -> None:
    answer = client.answer("/tokenize", {"messages": [USER], "add_generation_prompt": False})
    expected = engine.apply_chat_template([USER], add_generation_prompt=False)
    assert answer["tokens"] == expected


def test_an_empty_text_has_no_tokens(client: Client) -> None:
    assert client.answer("/tokenize", {"prompt": ""})["tokens"] == []
    assert client.answer("/detokenize", {"tokens": []}) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": [USER]}, "either prompt or messages"),
        ("/tokenize", {"prompt": "x" * 200_000}, "200000 characters"),
        ("/tokenize", {"prompt": "x", "text": "x"}, "'text'"),
        ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"tokenize": 1}}, "not allowed"),
        ("/detokenize", {"tokens": [10**9]}, "token id 1000000000"),
        ("/detokenize", {"tokens": [-1]}, "token id -1"),
        ("/detokenize", {"tokens": ["x"]}, "valid integer"),
        ("/detokenize", {}, "tokens is missing"),
    ],
)
def test_what_is_refused(path: str, body: Any, words: str, client: Client) -> None:
    assert words in client.refusal(path, body)["message"]


def test_what_clients_ask_of_a_tokenizer(client: Client, engine: AsyncEngine) -> None:
    answer = client.get("/tokenizer_info").json()
    assert answer["eos_token"] == engine.tokenizer.eos_token
    assert answer["chat_template"] == engine.tokenizer.chat_template
    assert answer["model_max_length"] == MAX_MODEL_LEN
    assert answer["vocab_size"] == len(engine.tokenizer)
