"""Two keys on one real server: neither waits for the other's work, and sees none of it."""

import asyncio
import dataclasses
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.errors import ContextLengthError, InvalidRequestError
from pyengine.request.chat_template import ChatOptions, render_chat
from pyengine.request.untrusted_calls import within
from pyengine.sampling_params import RequestOutputKind, SamplingParams
from pyengine.server.tokenizer_threads import TokenizerThreads
from tests.support.chat import chat_tokenizer
from tests.support.serving import (
    RunningServer,
    assert_nothing_runs,
    assert_soon,
    error_of,
    open_small_engine,
)

KEYS = ("of-a", "of-b")
ADMIN = "of-the-admin"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def engine(small_model: Path) -> Iterator[AsyncEngine]:
    with open_small_engine(small_model, max_num_seqs=8, max_num_waiting=400) as engine:
        yield engine


@contextmanager
def clients(engine: AsyncEngine) -> Iterator[list[httpx2.Client]]:
    """Clients with the keys of A, of B, and of the admin."""
    with RunningServer(engine, api_key=KEYS, admin_key=(ADMIN,), log_format="none") as server:
        several = [
            httpx2.Client(
                base_url=server.address, headers={"authorization": f"Bearer {key}"}, timeout=120
            )
            for key in (*KEYS, ADMIN)
        ]
        try:
            yield several
        finally:
            for client in several:
                client.close()


@contextmanager
def flood(client: httpx2.Client, count: int) -> Iterator[Future[Any]]:
    """One request with so many long answers is at work; it is aborted at the end."""
    body = {
        "prompt": [[5, 6, 7 + at % 200] for at in range(count)],
        "max_tokens": 900,
        "ignore_eos": True,
        "request_id": "flood",
    }
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(client.post, COMPLETIONS, json=body)
        try:
            assert_soon(lambda: client.get("/load").json()["num_running"])
            yield answer
        finally:
            client.post("/abort_requests", json={"request_ids": ["flood"]})
            answer.result(60)


SHORT = {"prompt": [9, 9, 9], "max_tokens": 8, "temperature": 0}


def test_a_key_is_answered_beside_hundreds_of_long_requests_of_another(
    engine: AsyncEngine,
) -> None:
    with clients(engine) as (a, b, _), flood(b, 300) as answer:
        for _ in range(5):
            assert a.post(COMPLETIONS, json=SHORT).status_code == 200
        assert not answer.done()
        assert b.get("/load").json()["num_waiting"] > 250
    assert_nothing_runs(engine)


def test_a_key_that_fills_its_queue_fills_no_other(engine: AsyncEngine) -> None:
    with clients(engine) as (a, b, _), flood(b, 400):
        for _ in range(2):
            refused = b.post(COMPLETIONS, json={**SHORT, "prompt": [[1, 2]] * 100})
            error = error_of(refused, 429)
            assert "requests of this caller wait and max_num_waiting=400" in error["message"]
            assert (error["code"], error["type"]) == ("too_many_requests", "rate_limit_error")
            assert refused.headers["retry-after"] == "1"
        assert a.post(COMPLETIONS, json=SHORT).status_code == 200
    assert_nothing_runs(engine)


def test_a_key_sees_its_own_load_only(engine: AsyncEngine) -> None:
    with clients(engine) as (a, b, admin), flood(b, 50):
        assert a.get("/load").json() == {"server_load": 0, "num_running": 0, "num_waiting": 0}
        own, whole = b.get("/load").json(), admin.get("/load").json()
        assert (own["server_load"], own["num_running"]) == (1, 8)
        assert own["num_waiting"] > 30
        assert whole["server_load"] >= 1 and whole["num_running"] == 8
    assert_nothing_runs(engine)


async def test_a_key_tokenizes_beside_what_another_has_queued() -> None:
    gate = threading.Event()
    threads = TokenizerThreads(None, has_tenants=True)
    queued = [asyncio.ensure_future(threads.run(lambda _: gate.wait(), b"b")) for _ in range(32)]
    await asyncio.sleep(0)
    for _ in range(3):
        assert await asyncio.wait_for(threads.run(lambda _: 1, b"a"), 30) == 1
    assert not any(call.done() for call in queued)
    for call in queued[16:]:
        call.cancel()
    gate.set()
    done = await asyncio.gather(*queued, return_exceptions=True)
    assert done[:16] == [True] * 16
    threads.close()


async def test_work_after_its_time_limit_is_bounded_and_of_its_key() -> None:
    """Such work cannot be interrupted: each refused request would leave a thread at work."""
    gate = threading.Event()
    num_begun = 0

    def stuck(_: Any) -> bool:
        nonlocal num_begun

        def work() -> bool:
            nonlocal num_begun
            num_begun += 1
            return gate.wait()

        return within(0.01, work, "the tokenizer")

    threads = TokenizerThreads(None, has_tenants=True)
    calls = [asyncio.ensure_future(threads.run(stuck, b"b")) for _ in range(8)]
    done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert isinstance(done.pop().exception(), InvalidRequestError)
    for _ in range(3):
        assert await asyncio.wait_for(threads.run(lambda _: 1, b"a"), 30) == 1
    assert num_begun == 1
    gate.set()
    await asyncio.wait(calls)
    assert num_begun == 8
    threads.close()


MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_tools_count_for_the_length(engine: AsyncEngine, path: str) -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"f{at}",
                "description": "x" * 5000,
                "parameters": {"properties": {"y" * 5000: {}}},
            },
        }
        for at in range(3)
    ]
    with clients(engine) as (a, _, _):
        error = error_of(a.post(path, json={"messages": MESSAGES, "tools": tools}))
    assert error["code"] == "context_length_exceeded"
    assert "tools and template variables have 3" in error["message"]


def test_template_variables_count_for_the_length(engine: AsyncEngine) -> None:
    body = {"messages": MESSAGES, "chat_template_kwargs": {"thinking": ["z" * 50] * 1000}}
    with clients(engine) as (a, _, _):
        error = error_of(a.post("/v1/chat/completions", json=body))
    assert error["code"] == "context_length_exceeded"


def test_a_text_that_a_template_makes_long_does_not_get_to_the_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = "{% for _ in range(1000) %}{{ messages[0].content }}{% endfor %}"
    tokenizer = chat_tokenizer(template)
    ids = render_chat(MESSAGES, tokenizer)
    assert len(ids) > 1000
    assert render_chat(MESSAGES, tokenizer, ChatOptions(longest=5000)) == ids
    encoded = []
    monkeypatch.setattr(type(tokenizer), "encode", lambda *given, **_: encoded.append(given))
    with pytest.raises(ContextLengthError, match="5000 characters as the chat template writes it"):
        render_chat(MESSAGES, tokenizer, ChatOptions(longest=4999))
    assert not encoded


def test_bad_words_have_a_length_in_all(engine: AsyncEngine) -> None:
    with clients(engine) as (a, _, _):
        body = {**SHORT, "bad_words": ["w" * 1000] * 66}
        error = error_of(a.post(COMPLETIONS, json=body))
        assert error["message"] == "bad_words have 66000 characters in all: the limit is 65536"
        body["bad_words"] = [f"w{at}" for at in range(1000)]
        assert a.post(COMPLETIONS, json=body).status_code == 200


def test_bad_words_are_tokenized_once_for_all_prompts(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = engine._input_processor
    tokenized = []
    monkeypatch.setattr(
        "pyengine.engine.input_processor.tokens_of_words",
        lambda words, _: tokenized.append(words) or [(7, 8)],
    )
    assert processor is not None
    with clients(engine) as (a, _, _):
        body = {**SHORT, "prompt": [[1, 2], [3, 4]] * 20, "bad_words": ["a", "b"]}
        for _ in range(2):
            assert a.post(COMPLETIONS, json=body).status_code == 200
    assert len(tokenized) == 2


def test_the_seeds_of_a_key_do_not_count_the_requests_of_another(small_model: Path) -> None:
    """A key that knows the engine's seed would find its place among all requests."""

    def seeds(others: int) -> list[int]:
        with open_small_engine(small_model) as engine:
            found = []
            for _ in range(3):
                for _ in range(others):
                    engine.request([1], tenant=b"b")
                request = engine.request([1], tenant=b"a")
                found.append(request.sequences[0].output.sampling.seed)
            return found

    assert seeds(0) == seeds(5)
    assert len(set(seeds(0))) == 3


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_a_client_that_leaves_has_nothing_tokenized(
    engine: AsyncEngine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun = threading.Event(), threading.Semaphore(0)
    call = TokenizerThreads._call
    num_calls = 0

    def slow(self: TokenizerThreads, work: Any, tenant: bytes) -> Any:
        nonlocal num_calls
        num_calls += 1
        begun.release()
        gate.wait()
        return call(self, work, tenant)

    monkeypatch.setattr(TokenizerThreads, "_call", slow)
    body = {"prompt": "text"} if path == "/tokenize" else {"tokens": [7]}
    with clients(engine) as (a, b, _):
        for _ in range(5):
            with pytest.raises(httpx2.ReadTimeout):
                b.post(path, json=body, timeout=0.3)
        assert begun.acquire(timeout=10)
        assert_soon(lambda: b.get("/load").json()["server_load"] == 0)
        gate.set()
        assert a.post(path, json=body).status_code == 200
    assert num_calls == 2, "the first one of B's, which had begun, and A's"


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}, {"speculation": "ngram"}])
def test_answers_do_not_depend_on_turns(small_model: Path, settings: dict[str, Any]) -> None:
    """With preemptions for another tenant, and with steps that leave one out."""
    prompts = [[7 + at, *range(20, 30 + at)] for at in range(24)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    async def answers(engine: AsyncEngine, tenants: list[bytes]) -> list[list[int]]:
        async def answer(at: int) -> list[int]:
            while tenants[at] == b"a" and engine.stats().num_running < 8:
                await asyncio.sleep(0.001)
            stream = engine.generate(prompts[at], params, tenant=tenants[at])
            return [token async for item in stream for token in item.outputs[0].token_ids]

        return await asyncio.gather(*map(answer, range(len(prompts))))

    small = {"num_blocks": 40, "max_num_seqs": 8, **settings}
    params = dataclasses.replace(params, output_kind=RequestOutputKind.DELTA)
    with open_small_engine(small_model, **small) as engine:
        expected = asyncio.run(answers(engine, [b""] * 24))
        assert all(len(answer) == 40 for answer in expected)
        engine._engine._scheduler.shares.left_out = (  # type: ignore[method-assign]
            lambda *_: frozenset([b"b"]) if random.random() < 0.5 else frozenset()
        )
        found = asyncio.run(answers(engine, [b"b"] * 16 + [b"a"] * 8))
        assert engine.stats().num_preemptions > 0
    assert found == expected
