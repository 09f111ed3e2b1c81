"""A fork has a copy of an engine that it cannot use: it is refused, and the parent goes on."""

import asyncio
import copy
import os
import pickle
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.errors import RequestFailedError
from pyengine.sampling_params import SamplingParams
from tests.support.callers import FakeModel, Gate
from tests.support.engines import GREEDY, make_bench
from tests.support.fake_runner import continued
from tests.support.processes import in_a_fork, run_python

LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=190)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModel]:
    model = FakeModel(monkeypatch, num_blocks=512, max_num_seqs=16, max_model_len=200)
    yield model
    model.close()


def assert_refused(reply: str) -> None:
    assert reply.startswith("EngineDeadError: "), reply
    assert f"belongs to process {os.getpid()}" in reply
    assert "'spawn', and make a new engine in it" in reply


def test_an_llm_is_refused_in_a_fork_and_goes_on_in_the_parent(model: FakeModel) -> None:
    llm, gate = model.llm(), Gate(model.bench, 3)
    stream = llm.stream([1, 2], GREEDY)
    next(stream)
    assert gate.is_held.wait(10)  # the stream goes on after the forks
    for act in (
        lambda: llm.generate([[5]], GREEDY, use_tqdm=False),
        lambda: list(llm.generate_iter([[5]], GREEDY)),
        lambda: list(stream),
        lambda: next(llm.stream([5], GREEDY)),
        llm.stats,
    ):
        assert_refused(in_a_fork(act))
    assert in_a_fork(llm.close) == in_a_fork(stream.close) == "None"  # type: ignore[attr-defined]
    gate.is_open.set()
    assert list(stream)[-1].outputs[0].token_ids == continued([1, 2], 8)
    (output,) = llm.generate([[5]], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == continued([5], 8)
    model.bench.assert_all_free()


def test_a_fork_does_not_wait_for_a_thread_that_is_not_there(model: FakeModel) -> None:
    """The fork is made by the engine's thread, in a step."""
    llm, reply = model.llm(), []
    run = model.bench.runner.run

    def forks(*step: Any) -> Any:
        if not reply:
            reply.append(in_a_fork(lambda: llm.generate([[5]], GREEDY, use_tqdm=False)))
            reply.append(in_a_fork(llm.close))
        return run(*step)

    model.bench.runner.run = forks  # type: ignore[method-assign]
    (output,) = llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    assert_refused(reply[0])
    assert reply[1] == "None"
    assert output.outputs[0].token_ids == continued([1, 2], 8)


@pytest.fixture
def engine(model: FakeModel) -> Iterator[AsyncEngine]:
    with model.async_engine() as engine:
        yield engine


async def last_of(engine: AsyncEngine, prompt: list[int]) -> Any:
    return [item async for item in engine.generate(prompt, GREEDY)][-1]


@pytest.mark.parametrize("is_locked", [False, True])
def test_an_async_engine_is_refused_in_a_fork(is_locked: bool, engine: AsyncEngine) -> None:
    if is_locked:
        engine._lock.acquire()
    for act in (
        lambda: asyncio.run(last_of(engine, [5])),
        lambda: asyncio.run(engine.abort("0")),
        lambda: asyncio.run(engine.drain()),
        engine.check_health,
        engine.stats,
    ):
        assert_refused(in_a_fork(act))
    assert in_a_fork(engine.close) == "None"
    if is_locked:
        engine._lock.release()
    output = asyncio.run(last_of(engine, [5]))
    assert output.outputs[0].token_ids == continued([5], 8)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_engines_are_not_copied_and_what_goes_in_and_out_is(copied: Any, model: FakeModel) -> None:
    with model.async_engine() as engine, pytest.raises(TypeError, match="AsyncEngine cannot be"):
        copied(engine)
    llm = model.llm()
    with pytest.raises(TypeError, match=r"LLM cannot be pickled or copied: .* in each process"):
        copied(llm)
    params = SamplingParams(
        n=2, stop=["a"], stop_token_ids=[3], logit_bias={1: 2.0}, bad_words=["b"], seed=5
    )
    (output,) = llm.generate([[1]], SamplingParams(max_tokens=3, logprobs=2), use_tqdm=False)
    error = RequestFailedError("text", [output])
    for item in (params, output):
        again = copied(item)
        assert (pickle.loads(again) if copied is pickle.dumps else again) == item
    again = copied(error)
    again = pickle.loads(again) if copied is pickle.dumps else again
    assert (str(again), again.outputs) == ("text", [output])


def test_two_engines_and_one_that_a_thread_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def make() -> None:
        model = FakeModel(monkeypatch, num_blocks=64)
        llm = model.llm()
        found.append((model, llm, llm.generate([[1, 2]], GREEDY, use_tqdm=False)))

    for _ in range(2):
        thread = threading.Thread(target=make)
        thread.start()
        thread.join(60)
    streams = [llm.stream([1, 2], GREEDY) for _, llm, _ in found]
    for *_, last in streams:
        assert last.outputs[0].token_ids == continued([1, 2], 8)
    for model, _, (output,) in found:
        assert output.outputs[0].token_ids == continued([1, 2], 8)
        model.bench.assert_all_free()


def test_the_prompt_may_change_once_it_was_given(model: FakeModel) -> None:
    llm = model.llm()
    expected = continued([1, 2], 8)
    prompt, stop = [1, 2], [next(at for at in range(97) if at not in expected)]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8, stop_token_ids=stop)
    stream = llm.stream(prompt, params)
    first = next(stream)  # the only item, if all is computed by now
    prompt[:] = [9, 9, 9, 9, 9, 9]
    stop[:] = expected
    last = [first, *stream][-1]
    assert (last.prompt_token_ids, last.outputs[0].token_ids) == ([1, 2], expected)


SCRIPT = """
    import asyncio, sys
    import pytest
    from pyengine.sampling_params import SamplingParams
    from tests.support.callers import FakeModel, Gate

    LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=190)
    model = FakeModel(pytest.MonkeyPatch(), num_blocks=512, max_num_seqs=16, max_model_len=200)
"""
ENDS = {
    "a stream of an LLM": "stream = model.llm().stream([1], LONG); next(stream)",
    "an open engine": "engine = model.async_engine()",
    "a stream of an engine": """
        async def main():
            global engine, stream
            engine = model.async_engine()
            stream = engine.generate([1], LONG)
            await anext(stream)
            sys.exit(0)
        asyncio.run(main())
    """,
    "a stream whose loop is gone": """
        async def main():
            global engine, task
            engine = model.async_engine()
            async def read():
                async for _ in engine.generate([1], LONG): pass
            task = asyncio.ensure_future(read())
            await asyncio.sleep(0.01)
        asyncio.run(main())
    """,
}


@pytest.mark.parametrize("text", ENDS.values(), ids=ENDS)
def test_the_interpreter_ends_in_the_middle(text: str) -> None:
    script = textwrap.dedent(SCRIPT) + textwrap.dedent(text)
    ended = run_python(script, timeout=120)
    assert (ended.stdout, ended.stderr) == ("", "")


def test_a_fork_may_make_its_own(model: FakeModel) -> None:
    def make() -> list[int]:
        bench = make_bench()
        (output,) = bench.generate([[1]], GREEDY)
        return output.outputs[0].token_ids

    assert in_a_fork(make) == repr(continued([1], 8))


def test_but_not_an_llm_whose_threads_it_does_not_have(model: FakeModel) -> None:
    model.llm()
    reply = in_a_fork(model.llm)
    assert reply.startswith("ConfigurationError: ")
    assert f"a fork of process {os.getpid()}, which has made an engine" in reply
    assert "'spawn', and make the engine in it" in reply
