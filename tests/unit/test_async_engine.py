"""Many callers on event loops: each gets its answers, no reader delays another, nothing leaks."""

import asyncio
import functools
import gc
import logging
import operator
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, suppress
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.errors import (
    DeviceMemoryError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
)
from pyengine.outputs import RequestOutput
from pyengine.sampling_params import RequestOutputKind, SamplingParams
from tests.support.callers import FakeModel, Gate
from tests.support.engines import GREEDY
from tests.support.fake_runner import continued

LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=190)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=None)
"""Still runs when a test reacts to its first token."""
DELTAS = SamplingParams(
    temperature=0, ignore_eos=True, max_tokens=20, output_kind=RequestOutputKind.DELTA
)


@pytest.fixture(params=[1, 2], ids=["one step", "two steps"])
def model(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModel]:
    model = FakeModel(
        monkeypatch, num_blocks=2048, max_num_seqs=16, max_model_len=4000, depth=request.param
    )
    yield model
    model.bench.assert_all_free()
    assert model.bench.engine.unfinished == []
    assert not threads()


async def last_of(items: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [item async for item in items][-1]


async def test_a_hundred_tasks_each_get_their_own(model: FakeModel) -> None:
    async with model.async_engine() as engine:
        prompts = [[at % 97, at // 7] for at in range(100)]
        outputs = await asyncio.gather(
            *(last_of(engine.generate(prompt, GREEDY)) for prompt in prompts)
        )
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.finished
            assert output.outputs[0].token_ids == continued(prompt, 8)


@pytest.mark.parametrize("kind", RequestOutputKind)
async def test_items_are_what_was_asked_for(kind: RequestOutputKind, model: FakeModel) -> None:
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=20, output_kind=kind)
    async with model.async_engine() as engine:
        items = [item async for item in engine.generate([1, 2], params)]
    expected = continued([1, 2], 20)
    results = [item.outputs[0].token_ids for item in items]
    match kind:
        case RequestOutputKind.CUMULATIVE:
            assert all(tokens == expected[: len(tokens)] for tokens in results)
            assert results[-1] == expected
        case RequestOutputKind.DELTA:
            assert functools.reduce(operator.iadd, results, []) == expected
        case RequestOutputKind.FINAL_ONLY:
            assert results == [expected]
    assert [item.finished for item in items] == [False] * (len(items) - 1) + [True]


async def test_a_slow_reader_finds_what_came_meanwhile_in_one_item(model: FakeModel) -> None:
    async with model.async_engine() as engine:
        stream, results = engine.generate([1, 2], DELTAS), []
        async for item in stream:
            results.append(item.outputs[0].token_ids)
            while engine.stats().num_running:  # the others, and this one, go on
                await asyncio.sleep(0.001)
    assert functools.reduce(operator.iadd, results, []) == continued([1, 2], 20)
    assert len(results) <= 2  # one, where it came too late for the first


async def test_what_a_step_gave_is_read_before_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where steps do not overlap: else loop and step hinder each other.

    An observer sees the step before its tokens are read.
    """
    monkeypatch.setattr("pyengine.engine.output_stream._TURN", 60.0)
    read: list[int] = []
    seen: list[int] = []

    class Watcher:
        def on_arrival(self, request: Any) -> None: ...

        def on_finish(self, request: Any) -> None: ...

        def on_step(self, result: Any) -> None:
            seen.append(len(read))

    async with FakeModel(monkeypatch, num_blocks=64).async_engine() as engine:
        engine.observe(Watcher())
        async for item in engine.generate([1], DELTAS):
            read.extend(item.outputs[0].token_ids)
    assert seen[2:] == list(range(2, 20))  # the first may be there before anybody waits for it


async def test_a_loop_that_is_busy_holds_steps_up_once(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyengine.engine.output_stream._TURN", 0.5)
    async with model.async_engine() as engine:
        begin = monotonic()
        async for _ in engine.generate([1, 2], LONG):
            while engine.stats().num_running:
                sleep(0.001)
        assert monotonic() - begin < 190 * 0.5 / 4


@pytest.mark.parametrize("items", [0, 1, 5])
async def test_a_caller_that_goes_away_takes_its_request_along(
    items: int, model: FakeModel
) -> None:
    """Before its first token, and in the middle; the others notice nothing."""
    async with model.async_engine() as engine:
        other = asyncio.ensure_future(last_of(engine.generate([7], LONG)))

        async def reader() -> None:
            count = 0
            async for _ in engine.generate([1, 2], LONG):
                count += 1
                if count == items:
                    break

        if items:
            await reader()
        else:
            task = asyncio.ensure_future(reader())
            await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        output = await other
        assert output.outputs[0].token_ids == continued([7], 190)
        assert engine.stats().usage.active == 0


async def test_an_abort_ends_it_for_its_reader(model: FakeModel) -> None:
    async with model.async_engine() as engine:
        stream = engine.generate([1, 2], ENDLESS, "mine")
        first = await anext(stream)
        assert await engine.abort("mine")
        last = await last_of(stream)
        assert last.outputs[0].finish_reason == "abort"
        tokens = last.outputs[0].token_ids
        assert tokens == continued([1, 2], len(tokens))
        assert len(first.outputs[0].token_ids) <= len(tokens) < 3000
        assert not await engine.abort("mine")
        assert not await engine.abort("nobody's")


async def test_an_id_in_use_is_refused_and_may_be_used_again_later(model: FakeModel) -> None:
    async with model.async_engine() as engine:
        async with aclosing(engine.generate([1, 2], ENDLESS, "mine")) as stream:
            await anext(stream)
            with pytest.raises(InvalidRequestError, match="request id 'mine' is in use"):
                await last_of(engine.generate([3], GREEDY, "mine"))
        output = await last_of(engine.generate([3], GREEDY, "mine"))
        assert output.request_id == "mine"
        assert output.outputs[0].token_ids == continued([3], 8)


async def test_a_deadline_ends_what_waits_and_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(monkeypatch, num_blocks=512, max_num_seqs=1, max_model_len=1000)
    run = model.bench.runner.run

    def slow(*step: Any) -> Any:
        sleep(0.002)
        return run(*step)

    model.bench.runner.run = slow  # type: ignore[method-assign]
    async with model.async_engine() as engine:
        end = monotonic() + 0.2
        outputs = await asyncio.gather(
            *(last_of(engine.generate([at], ENDLESS, deadline=end)) for at in (1, 2))
        )
        for prompt, output in zip((1, 2), outputs, strict=True):
            completion = output.outputs[0]
            assert (completion.finish_reason, completion.stop_reason) == ("abort", "deadline")
            assert completion.token_ids == continued([prompt], len(completion.token_ids))
        assert outputs[0].outputs[0].token_ids
        assert outputs[1].outputs[0].token_ids == []  # there was no slot
        assert outputs[1].metrics.scheduled_time is None
        later = await last_of(engine.generate([3], GREEDY, deadline=monotonic() + 60))
        assert later.outputs[0].token_ids == continued([3], 8)
    model.bench.assert_all_free()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *[("deadline", 0.0, "seconds ago"), ("deadline", "soon", "'soon'")],
        *[("deadline", float("nan"), "nan"), ("deadline", True, "True")],
        *[("request_id", "", ""), ("request_id", 5, ""), ("request_id", b"a", "")],
    ],
)
async def test_bad_deadlines_and_ids_are_refused(
    name: str, value: Any, message: str, model: FakeModel
) -> None:
    async with model.async_engine() as engine:
        with pytest.raises(InvalidRequestError, match=f"{name}=.*{message}"):
            await last_of(engine.generate([3], GREEDY, **{name: value}))


@pytest.mark.usefixtures("slow_steps")
async def test_a_queue_that_is_full_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(monkeypatch, num_blocks=512, max_num_seqs=1, max_model_len=1000)
    async with model.async_engine(max_num_waiting=2) as engine:
        running = engine.generate([1], LONG)
        await anext(running)
        waiting = [asyncio.ensure_future(last_of(engine.generate([at], GREEDY))) for at in (2, 3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="2 requests wait and max_num_waiting=2"):
            await last_of(engine.generate([4], GREEDY))
        await running.aclose()  # type: ignore[attr-defined]
        outputs = await asyncio.gather(*waiting)
        assert [output.outputs[0].token_ids for output in outputs] == [
            continued([2], 8),
            continued([3], 8),
        ]
    model.bench.assert_all_free()


@pytest.mark.parametrize("how", ["closed", "aborted"])
@pytest.mark.usefixtures("slow_steps")
async def test_who_has_gone_waits_no_more(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: not when the step that runs is over."""
    model = FakeModel(monkeypatch, num_blocks=512, max_num_seqs=1, max_model_len=1000)
    gate = Gate(model.bench)
    async with model.async_engine(max_num_waiting=2) as engine, asyncio.timeout(10):
        running = engine.submit([engine.request([1], LONG)])
        await anext(aiter(running))
        early = engine.submit([engine.request([2], GREEDY, "early")])
        while engine.stats().num_waiting < 1:  # it is in the queue, the next one in the inbox
            await asyncio.sleep(0.001)
        await asyncio.to_thread(gate.close)
        late = engine.submit([engine.request([3], GREEDY, "late")])
        with pytest.raises(QueueFullError, match="2 requests wait and max_num_waiting=2"):
            engine.submit([engine.request([4], GREEDY)])
        for stream, name in ((early, "early"), (late, "late")):
            if how == "closed":
                stream.close()
            else:
                assert await engine.abort(name)
        streams = [engine.submit([engine.request([at], GREEDY)]) for at in (4, 5)]
        with pytest.raises(QueueFullError, match="2 requests wait and max_num_waiting=2"):
            engine.submit([engine.request([6], GREEDY)])
        gate.is_open.set()
        running.close()
        for at, stream in zip((4, 5), streams, strict=True):
            items = [item async for item in stream]
            assert items[-1].outputs[0].token_ids == continued([at], 8)
    model.bench.assert_all_free()


@pytest.mark.usefixtures("slow_steps")
async def test_who_runs_or_was_preempted_does_not_count_as_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = FakeModel(monkeypatch, num_blocks=12, max_model_len=48)
    gate = Gate(model.bench)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=38)
    async with model.async_engine(max_num_waiting=1) as engine, asyncio.timeout(10):
        streams = []
        for prompt in ([1, 2], [3, 4], [5, 6]):
            streams.append(engine.submit([engine.request(prompt, params)]))
            await anext(aiter(streams[-1]))
        while not engine.stats().num_waiting:
            await asyncio.sleep(0)
        await asyncio.to_thread(gate.close)
        streams.append(engine.submit([engine.request([7, 8], params)]))
        with pytest.raises(QueueFullError, match="1 requests wait and max_num_waiting=1"):
            engine.submit([engine.request([9], params)])
        gate.is_open.set()
        for prompt, stream in zip(([1, 2], [3, 4], [5, 6], [7, 8]), streams, strict=True):
            items = [item async for item in stream]
            assert items[-1].outputs[0].token_ids == continued(prompt, 38)
        assert engine.stats().num_preemptions > 0
        assert not engine._waiting or not any(map(engine._waits, engine._waiting))
    model.bench.assert_all_free()


@pytest.mark.usefixtures("slow_steps")
async def test_smaller_priorities_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(monkeypatch, num_blocks=512, max_num_seqs=1, max_model_len=1000)
    ended: list[int] = []

    async def answer(priority: int) -> None:
        await last_of(engine.generate([priority + 50], GREEDY, priority=priority))
        ended.append(priority)

    async with model.async_engine() as engine:
        running = engine.generate([1], LONG)
        await anext(running)
        tasks = [asyncio.ensure_future(answer(priority)) for priority in (5, 0, 9, -3)]
        await asyncio.sleep(0.01)
        await running.aclose()  # type: ignore[attr-defined]
        await asyncio.gather(*tasks)
    assert ended == [-3, 0, 5, 9]


async def test_salts_separate(model: FakeModel) -> None:
    cached = []
    async with model.async_engine() as engine:
        for salt in ("a", "a", "b", None):
            output = await last_of(engine.generate(range(20), GREEDY, cache_salt=salt))
            cached.append(output.num_cached_tokens)
        with pytest.raises(InvalidRequestError, match="give it once"):
            prompt = {"prompt_token_ids": [1], "cache_salt": "x"}
            await last_of(engine.generate(prompt, GREEDY, cache_salt="y"))
    assert cached == [0, 19, 0, 0]


@pytest.mark.parametrize("timeout", [None, 30.0])
async def test_draining_lets_everybody_end_and_nobody_in(
    timeout: float | None, model: FakeModel
) -> None:
    async with model.async_engine() as engine:
        tasks = [asyncio.ensure_future(last_of(engine.generate([at], LONG))) for at in range(20)]
        await asyncio.sleep(0.01)
        drained = asyncio.ensure_future(engine.drain(timeout))
        await asyncio.sleep(0)
        with pytest.raises(EngineClosedError, match="drained"):
            await last_of(engine.generate([1], GREEDY))
        assert await drained
        for at, output in enumerate(await asyncio.gather(*tasks)):
            assert output.outputs[0].token_ids == continued([at], 190)


class StuckFlush:
    """A flush that a slow disk never ends, or that ends since the disk writes nothing."""

    def __init__(self, answer: bool | None) -> None:
        self.answer = answer

    def poll(self) -> bool | None:
        return self.answer


@pytest.mark.parametrize(("answer", "timeouts"), [(False, [None]), (None, [None, 0.1])])
async def test_draining_waits_for_no_disk_without_a_bound(
    answer: bool | None, timeouts: list[float | None], model: FakeModel
) -> None:
    async with model.async_engine() as engine:
        offloader = SimpleNamespace(begin_flush=lambda: StuckFlush(answer))
        engine._offloader, before = offloader, engine._offloader  # type: ignore[assignment]
        drains = [engine.drain(timeout) for timeout in timeouts]
        assert await asyncio.wait_for(asyncio.gather(*drains), 10)
        engine._offloader = before


async def test_what_has_not_ended_in_time_is_aborted(model: FakeModel) -> None:
    async with model.async_engine() as engine:
        stream = engine.generate([1], ENDLESS)
        await anext(stream)
        assert not await engine.drain(0)
        assert (await last_of(stream)).outputs[0].finish_reason == "abort"


async def test_closing_ends_everything_and_every_reader(model: FakeModel) -> None:
    engine = model.async_engine()
    stream = engine.generate([1], ENDLESS)
    await anext(stream)
    engine.close()
    engine.close()
    assert (await last_of(stream)).outputs[0].finish_reason == "abort"
    with pytest.raises(EngineClosedError, match="closed"):
        await last_of(engine.generate([1], GREEDY))


def threads() -> list[threading.Thread]:
    """The threads of this test's engines."""
    return [
        thread
        for thread in threading.enumerate()
        if thread.name == "pyengine-engine" and thread not in _of_others
    ]


_of_others: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
"""Threads of engines that an earlier test of this process has left."""


@pytest.fixture(autouse=True)
def _threads_of_others() -> None:
    _of_others.update(threads())


def has_ended(engine: "weakref.ref[AsyncEngine]") -> bool:
    """Whether an engine and its thread go, in time."""
    end = monotonic() + 10
    while (threads() or engine() is not None) and monotonic() < end:
        gc.collect()
        sleep(0.005)
    return not threads() and engine() is None


@pytest.mark.parametrize("has_run", [False, True])
def test_one_that_is_dropped_ends(has_run: bool, model: FakeModel) -> None:
    engine = model.async_engine()
    if has_run:
        asyncio.run(last_of(engine.generate([1], GREEDY)))
    held = weakref.ref(engine)
    assert len(threads()) == 1
    del engine
    assert has_ended(held)


@pytest.mark.parametrize("how", ["never read", "left", "generator", "closed"])
def test_one_that_is_dropped_with_what_runs_ends(how: str, model: FakeModel) -> None:
    async def main() -> "weakref.ref[AsyncEngine]":
        engine = model.async_engine()
        if how == "generator":
            await anext(engine.generate([1], LONG))
            return weakref.ref(engine)
        stream = engine.submit([engine.request([1], LONG)])
        if how == "left":
            async for _ in stream:
                break
        if how == "closed":
            stream.close()
        return weakref.ref(engine)

    assert has_ended(asyncio.run(main()))


def test_one_that_is_dropped_serves_its_readers_to_the_end(model: FakeModel) -> None:
    engine = model.async_engine()
    held = weakref.ref(engine)
    streams = [engine.submit([engine.request([1], LONG)]), engine.generate([2], LONG)]
    del engine

    async def main() -> list[RequestOutput]:
        return [await last_of(aiter(stream)) for stream in streams]

    outputs = asyncio.run(main())
    assert [output.outputs[0].token_ids for output in outputs] == [
        continued([1], 190),
        continued([2], 190),
    ]
    streams.clear()
    assert has_ended(held)


def test_many_that_are_dropped_leave_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(20):
        engine = FakeModel(monkeypatch).async_engine()
        asyncio.run(last_of(engine.generate([1], GREEDY)))
        held = weakref.ref(engine)
        del engine
    assert has_ended(held)


async def test_one_on_which_the_model_fails_is_told_and_alone(model: FakeModel) -> None:
    model.fail_on(96)
    good = next([at, 3] for at in range(80) if 96 not in continued([at, 3], 8))
    async with model.async_engine() as engine:
        other = asyncio.ensure_future(last_of(engine.generate(good, GREEDY)))
        with pytest.raises(RequestFailedError, match="token 96"):
            await last_of(engine.generate([96], GREEDY, "bad"))
        engine.check_health()
        assert (await other).outputs[0].token_ids == continued(good, 8)


@pytest.mark.parametrize("error", [DeviceMemoryError("by hand"), ValueError("by hand")])
async def test_what_ends_all_requests_is_logged_with_its_traceback_once(
    error: Exception, model: FakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> Any:
        raise error

    model.bench.runner.run = failing  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        async with model.async_engine() as engine:
            readers = [last_of(engine.generate([at], GREEDY)) for at in range(9)]
            results = await asyncio.gather(*readers, return_exceptions=True)
            assert {type(match) for match in results} >= {type(error)}
    assert "a step failed for all requests" in caplog.text
    logged = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert logged == [error]


async def test_a_dead_engine_says_so_to_everybody(model: FakeModel) -> None:
    import torch

    def broken(*step: Any) -> Any:
        raise torch.AcceleratorError("the device is gone")

    engine: AsyncEngine = model.async_engine()
    streams = [engine.generate([at], ENDLESS) for at in range(3)]
    for stream in streams:
        await anext(stream)
    model.bench.runner.run = broken  # type: ignore[method-assign]
    for stream in streams:
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await last_of(stream)
    for use in (engine.check_health, lambda: anext(engine.generate([1], GREEDY))):
        with pytest.raises(EngineDeadError, match="the device is gone"):
            result: Any = use()
            await result
    engine.close()


def test_two_event_loops_share_one_engine(model: FakeModel) -> None:
    engine, results = model.async_engine(), {}

    def loop(first: int) -> None:
        async def main() -> None:
            prompts = [[first, at] for at in range(10)]
            results[first] = await asyncio.gather(
                *(last_of(engine.generate(prompt, GREEDY)) for prompt in prompts)
            )

        asyncio.run(main())

    threads = [threading.Thread(target=loop, args=(first,)) for first in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    engine.close()
    for first in (1, 2):
        for at, output in enumerate(results[first]):
            assert output.outputs[0].token_ids == continued([first, at], 8)


async def test_who_looks_on_sees_every_request_and_step(model: FakeModel) -> None:
    class Watcher:
        def __init__(self) -> None:
            self.came: list[str] = []
            self.went: list[str] = []
            self.num_tokens = 0

        def on_arrival(self, request: Any) -> None:
            self.came.append(request.request_id)

        def on_step(self, result: Any) -> None:
            self.num_tokens += result.num_new_tokens

        def on_finish(self, request: Any) -> None:
            times = (
                request.arrival_time,
                request.progress.scheduled_time,
                request.result.first_token_time,
            )
            assert None not in times
            assert [*times, request.result.finished_time] == sorted(
                [*times, request.result.finished_time]
            )
            self.went.append(request.request_id)

    watcher = Watcher()
    async with model.async_engine() as engine:
        engine.observe(watcher)
        await asyncio.gather(*(last_of(engine.generate([at], GREEDY, str(at))) for at in range(5)))
    assert sorted(watcher.came) == sorted(watcher.went) == ["0", "1", "2", "3", "4"]
    assert watcher.num_tokens == 40
