"""Several requests of one caller: queued together or not at all, read as one stream."""

import asyncio
from collections.abc import Iterator

import pytest

from pyengine.errors import (
    DeviceMemoryError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
)
from pyengine.sampling_params import RequestOutputKind, SamplingParams
from tests.support.callers import FakeModel
from tests.support.engines import GREEDY
from tests.support.fake_runner import Fault, continued

LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=190)
DELTAS = SamplingParams(
    temperature=0, ignore_eos=True, max_tokens=20, output_kind=RequestOutputKind.DELTA
)
PROMPTS = [[1, 2], [3], [4, 5, 6]]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModel]:
    model = FakeModel(monkeypatch, num_blocks=2048, max_num_seqs=16, max_model_len=200)
    yield model
    model.bench.assert_all_free()
    assert model.bench.engine.unfinished == []


async def test_one_stream_has_the_items_of_all(model: FakeModel) -> None:
    found: dict[int, list[int]] = {}
    async with model.async_engine() as engine:
        async for item in engine.submit([engine.request(prompt, DELTAS) for prompt in PROMPTS]):
            found.setdefault(item.index, []).extend(item.outputs[0].token_ids)
    assert found == {at: continued(prompt, 20) for at, prompt in enumerate(PROMPTS)}


async def test_what_came_before_anybody_read_is_there(model: FakeModel) -> None:
    """Also the end: who begins to read late waits for nothing."""
    async with model.async_engine() as engine:
        stream = engine.submit([engine.request(prompt, GREEDY) for prompt in PROMPTS])
        while engine.stats().num_new_tokens < 24 or engine.stats().num_running:
            await asyncio.sleep(0.001)
        assert [item.finished async for item in stream] == [True] * 3


@pytest.mark.parametrize("ids", [("a", "a"), ("a", "taken")])
@pytest.mark.usefixtures("slow_steps")
async def test_if_one_id_is_in_use_none_is_queued(ids: tuple[str, ...], model: FakeModel) -> None:
    async with model.async_engine() as engine:
        other = engine.submit([engine.request([7], LONG, "taken")])
        with pytest.raises(InvalidRequestError, match=rf"'{ids[1]}' is in use"):
            engine.submit([engine.request([1], GREEDY, each_id) for each_id in ids])
        await asyncio.sleep(0.01)
        assert len(model.bench.engine.unfinished) == 1
        other.close()
        again = [item async for item in engine.submit([engine.request([1], GREEDY, "a")])]
        assert again[-1].finished


@pytest.mark.parametrize("others", [0, 1])
async def test_a_request_that_was_submitted_before_fails_that_call_alone(
    others: int, model: FakeModel
) -> None:
    async with model.async_engine() as engine, asyncio.timeout(10):
        request = engine.request([1, 2], DELTAS)
        stream = engine.submit([request])
        again = [*(engine.request([3], DELTAS, "other") for _ in range(others)), request]
        with pytest.raises(InvalidRequestError, match="was submitted before"):
            engine.submit(again)
        found = [token async for item in stream for token in item.outputs[0].token_ids]
        assert found == continued([1, 2], 20)
        stream.close()
        with pytest.raises(InvalidRequestError, match="was submitted before"):
            engine.submit(again)
        for at in range(others):  # it was not queued, and may be
            (item,) = [item async for item in engine.submit(again[at : at + 1])][-1:]
            assert item.finished


async def test_ids_that_the_engine_makes_are_never_those_of_callers(model: FakeModel) -> None:
    """Whatever ids they give, and whatever they have seen of the engine's."""
    async with model.async_engine() as engine, asyncio.timeout(10):
        made = engine.request([1], GREEDY).request_id
        number = int(made, 16) if len(made) > 8 else int(made)
        guesses = [*map(str, range(9)), *(f"{number + at:x}" for at in range(9))]
        held = engine.submit(
            [engine.request([at], LONG, guess) for at, guess in enumerate(guesses)]
        )
        own = engine.submit([engine.request(prompt, GREEDY) for prompt in PROMPTS])
        names = {item.request_id async for item in own}
        assert len(names) == 3 and not names & {*guesses, made}
        held.close()


def test_ids_of_two_engines_differ(model: FakeModel) -> None:
    with model.async_engine() as first, model.async_engine() as second:
        made = [
            engine.request([1], GREEDY).request_id for engine in (first, second) for _ in range(9)
        ]
    assert len(set(made)) == 18


async def test_a_request_twice_in_one_call_fails_that_call_alone(model: FakeModel) -> None:
    async with model.async_engine() as engine, asyncio.timeout(10):
        request = engine.request([1, 2], GREEDY)
        with pytest.raises(InvalidRequestError, match="in use"):
            engine.submit([request, request])
        items = [item async for item in engine.submit([request])]
        assert items[-1].outputs[0].token_ids == continued([1, 2], 8)


async def test_one_that_was_refused_for_the_queue_may_be_submitted_again(model: FakeModel) -> None:
    async with model.async_engine(max_num_waiting=2) as engine, asyncio.timeout(10):
        requests = [engine.request([at], GREEDY) for at in range(3)]
        with pytest.raises(InvalidRequestError, match="3 requests at once"):
            engine.submit(requests)
        assert [request.sink for request in requests] == [None] * 3
        items = [item async for item in engine.submit(requests[:2])]
        assert items[-1].finished


async def test_what_comes_first_is_read_first(model: FakeModel) -> None:
    """Of many prompts whose reader is slow, none waits for others that came later."""
    async with model.async_engine() as engine, asyncio.timeout(10):
        stream = engine.submit([engine.request([at], DELTAS) for at in range(8)])
        order = []
        async for item in stream:
            order.append(item.index)
            await asyncio.sleep(0.002)  # steps go on meanwhile, for all of them
    assert order[:8] == list(range(8))
    assert max(order.count(at) for at in range(8)) - min(order.count(at) for at in range(8)) <= 2


async def test_a_stream_that_was_read_to_its_end_is_over(model: FakeModel) -> None:
    async with model.async_engine() as engine, asyncio.timeout(10):
        for _ in range(3):  # the id is free again, without a close
            stream = engine.submit(
                [engine.request(prompt, DELTAS, f"{prompt}") for prompt in PROMPTS]
            )
            async for item in stream:
                last = item
            assert last.finished
            assert engine._live == {}
            assert [item async for item in stream] == []
            stream.close()


async def test_a_stream_may_be_left_and_read_on(model: FakeModel) -> None:
    async with model.async_engine() as engine, asyncio.timeout(10):
        stream = engine.submit([engine.request(prompt, DELTAS) for prompt in PROMPTS])
        num_ended = 0
        while num_ended < len(PROMPTS):
            async for item in stream:
                num_ended += item.finished
                break
        assert engine._live == {}


async def test_an_error_that_is_the_streams_last_item_ends_it(model: FakeModel) -> None:
    async with model.async_engine() as engine, asyncio.timeout(10):
        model.bench.runner.fault = Fault(0, DeviceMemoryError("by hand"))
        request = engine.request([1], GREEDY)
        stream = engine.submit([request])
        with pytest.raises(DeviceMemoryError):
            async for _ in stream:
                pass
        assert request.result.finished_time is not None
        assert engine._live == {}


@pytest.mark.usefixtures("slow_steps")
async def test_if_the_queue_has_no_room_for_all_none_is_queued(model: FakeModel) -> None:
    async with model.async_engine(max_num_waiting=4) as engine:
        long = [engine.request([at], LONG) for at in range(16)]
        running = []
        for at in (0, 4, 8, 12):
            running.append(engine.submit(long[at : at + 4]))
            while engine.stats().num_running < at + 4:
                await asyncio.sleep(0.001)
        waiting = engine.submit([engine.request([1], GREEDY) for _ in range(2)])
        with pytest.raises(QueueFullError, match="2 requests wait and max_num_waiting=4"):
            engine.submit([engine.request([1], GREEDY) for _ in range(3)])
        with pytest.raises(InvalidRequestError, match="5 requests at once"):
            engine.submit([engine.request([1], GREEDY) for _ in range(5)])
        await asyncio.sleep(0.02)
        assert engine.stats().num_waiting == 2
        for stream in (*running, waiting):
            stream.close()


async def test_closing_it_ends_all(model: FakeModel) -> None:
    async with model.async_engine() as engine:
        stream = engine.submit([engine.request(prompt, LONG, f"{prompt}") for prompt in PROMPTS])
        async for _ in stream:
            break
        stream.close()
        stream.close()
        async with asyncio.timeout(10):
            while model.bench.engine.unfinished:
                await asyncio.sleep(0.001)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("n", [1, 3])
async def test_a_prompt_alone_gives_no_token(
    n: int, kind: RequestOutputKind, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`max_tokens=0`: the log-probabilities of the prompt, and an end by length."""
    model = FakeModel(monkeypatch, num_blocks=64, max_model_len=200, depth=depth)
    params = SamplingParams(n=n, max_tokens=0, prompt_logprobs=1, output_kind=kind)
    async with model.async_engine() as engine:
        other = engine.submit([engine.request([7], GREEDY)])
        items = [item async for item in engine.generate(list(range(200))[::-1][-97:], params)]
        outputs = items[-1].outputs
        assert [output.token_ids for output in outputs] == [[]] * n
        assert {output.finish_reason for output in outputs} == {"length"}
        assert items[-1].prompt_logprobs is not None
        assert len(items[-1].prompt_logprobs) == 97
        assert items[-1].metrics.first_token_time is None
        assert [item.outputs[0].token_ids async for item in other][-1] == continued([7], 8)
        assert engine.stats().num_new_tokens == 8
    model.bench.assert_all_free()


async def test_the_error_of_one_is_the_streams(model: FakeModel) -> None:
    async with model.async_engine() as engine:
        requests = [engine.request(prompt, LONG) for prompt in PROMPTS]
        stream = engine.submit(requests)
        with pytest.raises(RequestFailedError, match="by hand"):
            async for _ in stream:
                sink = requests[1].sink
                assert sink is not None
                sink.fail(RequestFailedError("failed by hand"))
        stream.close()
