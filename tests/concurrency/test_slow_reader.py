"""A task that reads slowly: the steps go on, the others are woken, and little waits for it."""

import asyncio
import gc
from collections import Counter
from typing import Any

import pytest

from pyengine.engine.output_stream import OutputCollector
from pyengine.outputs import RequestOutput
from pyengine.request.prompts import Prompt
from pyengine.sampling_params import RequestOutputKind, SamplingParams
from tests.support.callers import FakeModel
from tests.support.engines import make_bench
from tests.support.fake_runner import continued

LENGTH = 150


def params(kind: RequestOutputKind, **settings: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=LENGTH, output_kind=kind, **settings
    )


@pytest.mark.parametrize("readers", [2, 64])
async def test_the_others_read_to_their_end_while_one_has_read_a_single_item(
    readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on reading only when all others are through: no clock is needed to see it."""
    model = FakeModel(monkeypatch, num_blocks=4096, max_num_seqs=64, max_model_len=200)
    delta = params(RequestOutputKind.DELTA)
    items: Counter[int] = Counter()
    others_are_through = asyncio.Event()

    async def read(number: int) -> list[int]:
        tokens: list[int] = []
        async for item in engine.generate([number], delta):
            items[number] += 1
            tokens += item.outputs[0].token_ids
            if number == 0:
                await others_are_through.wait()
        return tokens

    async with model.async_engine() as engine:
        slow = asyncio.ensure_future(read(0))
        others = await asyncio.wait_for(
            asyncio.gather(*(read(number) for number in range(1, readers))), 120
        )
        assert not slow.done()
        others_are_through.set()
        found = [await slow, *others]
    for number, tokens in enumerate(found):
        assert tokens == continued([number], LENGTH)
    assert items[0] <= 3  # the first, perhaps what came before the others' end, the rest
    model.bench.assert_all_free()


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_what_waits_for_a_slow_reader_is_one_item(kind: RequestOutputKind) -> None:
    """As many tokens, log-probabilities and characters as the answer has, and no more objects."""
    bench = make_bench(max_model_len=200)
    woken: list[OutputCollector] = []
    collector = OutputCollector(kind, woken.append)
    wants, before = params(kind, logprobs=2), num_outputs()
    state = bench.processor.request("slow", Prompt(token_ids=[1, 2]), wants)
    state.sink = collector
    bench.engine.add(state)
    while bench.engine.has_work:
        bench.engine.step()
    assert num_outputs() - before <= 3, "items pile up while nobody reads"
    item = collector.get()
    assert item is not None
    assert item.finished
    (one,) = item.outputs
    assert one.token_ids == continued([1, 2], LENGTH)
    assert one.logprobs is not None
    assert len(one.logprobs) == LENGTH
    assert collector.get() is None


def num_outputs() -> int:
    """All that there are in this process."""
    return sum(type(get_object) is RequestOutput for get_object in gc.get_objects())


def test_a_reader_that_never_reads_is_woken_once_per_step_and_nobody_else_for_it() -> None:
    bench = make_bench(max_model_len=200)
    told: Counter[str] = Counter()
    for name in ("slow", "quick"):
        state = bench.processor.request(
            name, Prompt(token_ids=[1, 2]), params(RequestOutputKind.DELTA)
        )
        state.sink = OutputCollector(
            RequestOutputKind.DELTA, lambda _, name=name: told.update([name])
        )
        bench.engine.add(state)
    bench.submit({"whole": [3]}, params(RequestOutputKind.FINAL_ONLY))
    steps = 0
    while bench.engine.has_work:
        bench.engine.step()
        steps += 1
        quick = bench.engine.unfinished[1:2]
        for state in quick:
            assert isinstance(state.sink, OutputCollector)
            state.sink.get()
    assert told["slow"] == told["quick"] == LENGTH <= steps
