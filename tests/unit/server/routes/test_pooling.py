"""/v1/embeddings, /score, /rerank and /classify: the shapes of OpenAI, Jina and vLLM."""

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.pooling_params import PoolingParams
from tests.support.pooling import save_classifier
from tests.support.serving import (
    Client,
    assert_nothing_runs,
    error_of,
    make_client,
    open_small_engine,
)

TEXTS = ["the first text", "another one", "the first text"]


@pytest.fixture(scope="module")
def engine(small_model: Path) -> Iterator[AsyncEngine]:
    with open_small_engine(small_model, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: AsyncEngine) -> Client:
    return make_client(engine)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = save_classifier(tmp_path_factory.mktemp("ranker"), labels=1)
    with open_small_engine(folder, dtype="float32") as engine:
        yield make_client(engine)


def embedded(engine: AsyncEngine, prompt: Any, **params: Any) -> Any:
    output = asyncio.run(engine.embed(prompt, PoolingParams(**params)))
    return np.array(output.outputs.embedding)


def test_embeddings_have_openais_shape(client: Client, engine: AsyncEngine) -> None:
    answer = client.answer("/v1/embeddings", {"input": TEXTS, "model": client.context.names[0]})
    assert answer["object"] == "list" and answer["id"].startswith("embd-")
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    for text, item in zip(TEXTS, answer["data"], strict=True):
        assert item["object"] == "embedding"
        assert np.allclose(item["embedding"], embedded(engine, text), atol=1e-6)
    num_tokens = sum([len(engine.tokenizer.encode(text)) for text in TEXTS])
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == num_tokens


def test_every_form_of_input_is_taken(client: Client, engine: AsyncEngine) -> None:
    ids = engine.tokenizer.encode(TEXTS[0])
    wanted = client.answer("/v1/embeddings", {"input": TEXTS[0]})["data"]
    for form in ([TEXTS[0]], ids, [ids]):
        data = client.answer("/v1/embeddings", {"input": form})["data"]
        assert len(data) == 1 and np.allclose(data[0]["embedding"], wanted[0]["embedding"])


def test_base64_is_the_same_numbers_in_float32(client: Client) -> None:
    body = {"input": TEXTS, "dimensions": 5}
    floats = client.answer("/v1/embeddings", body)["data"]
    coded = client.answer("/v1/embeddings", {**body, "encoding_format": "base64"})["data"]
    for one, other in zip(floats, coded, strict=True):
        numbers = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        assert len(numbers) == 5 and np.allclose(one["embedding"], numbers, atol=1e-6)
        assert np.linalg.norm(numbers) == pytest.approx(1.0)


def test_many_embeddings_are_written_in_slices(client: Client) -> None:
    data = client.answer("/v1/embeddings", {"input": [[7, at] for at in range(100)]})["data"]
    assert [item["index"] for item in data] == list(range(100))


def test_scores_are_cosines_of_embeddings(client: Client, engine: AsyncEngine) -> None:
    wanted = [embedded(engine, TEXTS[0]) @ embedded(engine, text) for text in TEXTS]
    for path in ("/score", "/v1/score"):
        answer = client.answer(path, {"text_1": TEXTS[0], "text_2": TEXTS})
        assert [item["object"] for item in answer["data"]] == ["score"] * 3
        assert np.allclose([item["score"] for item in answer["data"]], wanted, atol=1e-6)
    pairs = client.answer("/score", {"text_1": TEXTS, "text_2": TEXTS})["data"]
    assert np.allclose([item["score"] for item in pairs], 1.0)


def test_a_ranking_is_sorted_by_relevance(client: Client) -> None:
    body = {"query": TEXTS[0], "documents": [TEXTS[1], TEXTS[0]]}
    for path in ("/rerank", "/v1/rerank"):
        results = client.answer(path, body)["results"]
        assert [item["index"] for item in results] == [1, 0]
        assert results[0]["document"] == {"text": TEXTS[0]}
        assert results[0]["relevance_score"] == pytest.approx(1.0)
    shorter = {**body, "documents": [{"text": TEXTS[1]}, {"text": TEXTS[0]}], "top_n": 1}
    (best,) = client.answer("/rerank", {**shorter, "return_documents": False})["results"]
    assert sorted(best) == ["index", "relevance_score"] and best["index"] == 1


def test_a_classifier_ranks_pairs_and_names_labels(ranker: Client) -> None:
    texts = [*TEXTS[:2], "x"]
    scores = [
        item["score"]
        for item in ranker.answer("/score", {"text_1": "query", "text_2": texts})["data"]
    ]
    assert all(0 < score < 1 for score in scores)
    results = ranker.answer("/rerank", {"query": "query", "documents": texts})["results"]
    assert [item["relevance_score"] for item in results] == sorted(scores, reverse=True)
    classes = ranker.answer("/classify", {"input": [f"query{text}" for text in texts]})["data"]
    assert [item["label"] for item in classes] == ["LABEL_0"] * 3
    assert [item["num_classes"] for item in classes] == [1, 1, 1]
    # The tokenizer adds nothing, and reads bytes: a pair is both texts
    assert np.allclose([item["probs"][0] for item in classes], scores, atol=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"input": "a", "dimensions": 17}, "dimensions=17.* have 16"),
        ("/v1/embeddings", {"input": "a", "pooling": "cls"}, "pooling='cls'"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [300]}, "token id 300"),
        ("/v1/embeddings", {"input": "a" * 5000}, "context length"),
        ("/v1/embeddings", {"input": "a", "temperature": 1}, "temperature"),
        ("/v1/embeddings", {"input": "a", "priority": 1}, "priority=1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "2 texts cannot be scored with 1"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/classify", {"input": "a"}, "no classifier"),
    ],
)
def test_bad_bodies_are_refused_by_name(client: Client, path: str, body: Any, message: str) -> None:
    import re

    assert re.search(message, client.refusal(path, body)["message"])


def test_unknown_models_and_completions_of_a_classifier_are_refused(
    client: Client, ranker: Client
) -> None:
    client.refusal("/v1/embeddings", {"input": "a", "model": "other"}, 404)
    assert "no head" in ranker.refusal("/v1/completions", {"prompt": "a"})["message"]


def test_keys_and_salts_separate_prompts(engine: AsyncEngine) -> None:
    client = make_client(engine, api_key=["one", "two"])
    body = {"input": [[9] * 64]}
    assert client.post("/v1/embeddings", body).status_code == 401

    def num_cached(key: str, **fields: Any) -> int:
        headers = {"authorization": f"Bearer {key}"}
        answer = client.post("/v1/embeddings", {**body, **fields}, headers=headers).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    for key, salt in (("one", {}), ("two", {}), ("one", {"cache_salt": "own"})):
        assert num_cached(key, **salt) == 0
        assert num_cached(key, **salt) == 48


def test_a_client_that_leaves_ends_its_requests(engine: AsyncEngine, slow_steps: None) -> None:
    client = make_client(engine)
    body = {"input": [[at % 250, 1, *range(200)] for at in range(500)]}

    async def leave(http: Any) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await http.post("/v1/embeddings", json=body)

    client.run(leave)
    assert_nothing_runs(engine)


def test_a_full_queue_is_an_error_of_openais_shape(small_model: Path) -> None:
    with open_small_engine(small_model, max_num_waiting=2) as engine:
        client = make_client(engine)
        error_of(client.post("/v1/embeddings", {"input": [[1], [2], [3]]}), 400)
