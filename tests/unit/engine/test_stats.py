"""A look at the whole engine between two steps, from an event loop while it runs."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pyengine.engine.stats import EngineView
from pyengine.sampling_params import SamplingParams
from tests.support.callers import FakeModel
from tests.support.engines import make_bench

LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=150)
STATES = ("free", "evictable", "active", "pinned", "loading")


def is_exact(view: EngineView) -> bool:
    counts, usage = Counter(view.pool.states), view.stats.usage
    return [counts[at] for at in range(5)] == [getattr(usage, name) for name in STATES]


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_look_while_it_runs_is_of_one_moment(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    model = FakeModel(monkeypatch, num_blocks=512, max_num_seqs=6, max_model_len=200, depth=depth)

    async def exhausted(items: AsyncIterator[Any]) -> None:
        async for _ in items:
            pass

    async with model.async_engine() as engine:
        tasks = [
            asyncio.create_task(exhausted(engine.generate([at, 5, 6], LONG))) for at in range(20)
        ]
        seen = 0
        while not all(task.done() for task in tasks):
            view = await engine.view(8)
            assert is_exact(view)
            running = [request for request in view.requests if request.is_running]
            assert len(running) == view.stats.num_running
            assert len(view.requests) <= 8
            assert view.requests[: len(running)] == running
            for sequence in running:
                assert 0 <= sequence.num_output <= sequence.max_output == 150
                assert sequence.num_computed >= sequence.num_prompt - 1 or not sequence.num_output
            seen += 1
            await asyncio.sleep(0)
        assert seen > 3
        view = await engine.view()  # nothing runs: it is woken
        assert view.requests == [] and is_exact(view)
    view = await engine.view()  # closed
    assert is_exact(view)


def test_samples_are_added_up_and_waiting_ones_counted() -> None:
    bench = make_bench(max_num_seqs=3)
    bench.submit({"three": [3, 4, 5]}, SamplingParams(n=3, max_tokens=9, ignore_eos=True))
    bench.submit({"late": [6, 7]}, LONG)
    for _ in range(4):
        bench.step()
    first, second = bench.engine.view(10).requests
    assert (first.num_output, first.max_output, first.num_prompt) == (12, 27, 3)
    assert (second.is_running, second.num_output, second.num_computed) == (False, 0, 0)
    assert [request.request.request_id for request in bench.engine.view(1).requests] == ["three"]
    assert bench.engine.view(0).requests == []


async def test_a_look_that_fails_is_told_to_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(monkeypatch)
    async with model.async_engine() as engine:
        monkeypatch.setattr(model.bench.engine, "view", lambda most: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await engine.view()
        monkeypatch.undo()
        assert is_exact(await engine.view())
