"""Threads and tasks in one small engine: everybody gets what he gets alone, nothing is left."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from queue import Empty, SimpleQueue
from random import Random
from time import monotonic
from typing import Any

import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.errors import InvalidRequestError, RequestFailedError
from pyengine.outputs import RequestOutput
from pyengine.sampling_params import RequestOutputKind, SamplingParams
from tests.support.callers import FakeModel
from tests.support.soak import soak_cases, soak_only
from tests.support.wishes import SMALL, Alone, Faults, Tokens, Wish, drawn, letters

Answer = tuple[Wish, list[RequestOutput], Exception | None]

CALLERS = 32
_LONGEST = 240.0
"""Seconds after which somebody is taken to wait for ever."""


class Storm:
    """Wishes, what came of them, and what happened on the way."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int, depth: int, seed: int) -> None:
        self.random = Random(seed)
        self.seen: Counter[str] = Counter()
        self.wishes = [drawn(self.random) for _ in range(count)]
        self.model = FakeModel(patch, depth=depth, tokenizer=letters(), **SMALL)
        self._faults = Faults(self.model.bench, self.random, self.seen)
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._watch_aborts()

    def _watch_aborts(self) -> None:
        engine = self.model.bench.engine
        abort = engine.abort

        def watched(states: Any, **reason: Any) -> Any:
            for state in list(states):
                if state.result.finished_time is not None:
                    continue
                if state.result.first_token_time is None:
                    self.seen["ended before its first token"] += 1
                elif state.progress.num_preemptions and not any(
                    sample.is_running for sample in state.unfinished
                ):
                    self.seen["ended while it was preempted"] += 1
                else:
                    self.seen["ended while it ran"] += 1
            return abort(states, **reason)

        engine.abort = watched  # type: ignore[method-assign]

    def note(self, wish: Wish, items: list[RequestOutput], error: Exception | None) -> None:
        """Keep what a caller has read."""
        self._answers.put((wish, items, error))

    def judge(self) -> None:
        """Compare what every caller has read with what he would have got alone."""
        alone = Alone()
        while not self._answers.empty():
            self._judge(alone, *self._answers.get())

    def _judge(
        self, alone: Alone, wish: Wish, items: list[RequestOutput], error: Exception | None
    ) -> None:
        if wish.is_poisoned:
            assert not any(output.token_ids for item in items for output in item.outputs)
            if error is not None:
                assert isinstance(error, RequestFailedError), error
                self.seen["failed alone"] += 1
            return
        if isinstance(error, InvalidRequestError):
            assert wish.leaving == "has a deadline" and "seconds ago" in str(error)
            return
        assert error is None, error
        expected = {output.index: output for output in alone.answer(wish).outputs}
        found = added_up(wish, items)
        for index, tokens in found.items():
            assert tokens == expected[index].token_ids[: len(tokens)], wish
        if not items or not items[-1].finished:
            assert wish.leaving != "stays", wish
            self.seen["left by its caller"] += 1
            return
        reasons = {output.finish_reason for output in items[-1].outputs}
        self.seen["finished"] += "abort" not in reasons
        self.seen["had cached tokens"] += items[-1].num_cached_tokens > 0
        metrics = items[-1].metrics
        self.seen["finished after a preemption"] += metrics.num_preemptions > 0
        for output in items[-1].outputs:
            self.seen[f"{output.finish_reason}, {type(output.stop_reason).__name__}"] += 1
            if output.finish_reason == "abort":
                self.seen["deadline"] += output.stop_reason == "deadline"
                continue
            it = expected[output.index]
            assert found.get(output.index, []) == it.token_ids, wish
            assert (output.finish_reason, output.stop_reason) == (it.finish_reason, it.stop_reason)
            if wish.params.output_kind is not RequestOutputKind.DELTA:
                assert output.text == it.text

    def assert_over(self) -> None:
        """Nobody waits, nothing is held, no thread is left."""
        bench = self.model.bench
        assert not bench.engine.has_work
        assert bench.engine.unfinished == []
        assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (0, 0)
        bench.assert_all_free()
        assert bench.engine.stats().num_preemptions > 0
        assert not any(thread.is_alive() for _, thread in self.model.made)


def added_up(wish: Wish, items: list[RequestOutput]) -> Tokens:
    """The tokens of each sample, as far as they were read."""
    tokens: Tokens = {}
    for item in items:
        for output in item.outputs:
            before = tokens.get(output.index, [])
            if wish.params.output_kind is RequestOutputKind.DELTA:
                tokens[output.index] = before + output.token_ids
            else:
                assert output.token_ids[: len(before)] == before
                tokens[output.index] = output.token_ids
    return tokens


async def ask(engine: AsyncEngine, wish: Wish, storm: Storm, name: str) -> None:
    """One request by a caller who may go at any moment."""
    items: list[RequestOutput] = []

    async def read() -> None:
        deadline = None
        if wish.leaving == "has a deadline":
            deadline = monotonic() + 0.01 * (1 + wish.patience)
        stream = engine.generate(
            list(wish.prompt),
            wish.params,
            name,
            cache_salt=wish.salt,
            priority=wish.priority,
            deadline=deadline,
        )
        async for item in stream:
            items.append(item)
            if wish.leaving == "closes" and len(items) == wish.patience:
                await stream.aclose()  # type: ignore[attr-defined]
                return
            if wish.leaving == "is aborted" and len(items) == max(wish.patience, 1):
                await engine.abort(name)

    error: Exception | None = None
    try:
        if wish.leaving == "closes" and wish.patience == 0:
            task = asyncio.ensure_future(read())
            for _ in range(len(wish.prompt) % 4):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        else:
            await asyncio.wait_for(read(), _LONGEST)
    except (RequestFailedError, InvalidRequestError) as failure:
        error = failure
    storm.note(wish, items, error)


class Work:
    """Wishes that many callers take from, each the next one."""

    def __init__(self, wishes: list[Wish]) -> None:
        self._left: SimpleQueue[tuple[str, Wish]] = SimpleQueue()
        for number, wish in enumerate(wishes):
            self._left.put((f"wish {number}", wish))

    def __iter__(self) -> Iterator[tuple[str, Wish]]:
        while True:
            try:
                yield self._left.get_nowait()
            except Empty:
                return


def tasks_and_threads(storm: Storm) -> None:
    """As many tasks on one event loop, and threads with an event loop each."""
    work = Work(storm.wishes)

    async def caller(engine: AsyncEngine) -> None:
        for name, wish in work:
            await ask(engine, wish, storm, name)

    async def main(engine: AsyncEngine) -> None:
        await asyncio.gather(*(caller(engine) for _ in range(CALLERS)))

    with storm.model.async_engine() as engine, ThreadPoolExecutor(CALLERS + 1) as pool:
        several = [pool.submit(lambda: asyncio.run(caller(engine))) for _ in range(CALLERS)]
        several.append(pool.submit(lambda: asyncio.run(main(engine))))
        for value in several:
            value.result(_LONGEST)


def read_some(items: Iterator[RequestOutput], patience: int | None) -> list[RequestOutput]:
    """So many items, or all; then it is closed."""
    try:
        return list(islice(items, patience))
    finally:
        items.close()  # type: ignore[attr-defined]


def threads_of_an_llm(storm: Storm) -> None:
    """Batches, streams and iterators, in as many threads."""
    work = Work(storm.wishes)

    def stream(wish: Wish) -> None:
        patience = None if wish.leaving == "stays" else max(1, wish.patience)
        items: list[RequestOutput] = []
        error = None
        try:
            prompt: Any = {"prompt_token_ids": list(wish.prompt), "cache_salt": wish.salt}
            items = read_some(llm.stream(prompt, wish.params, priority=wish.priority), patience)
        except RequestFailedError as failure:
            error = failure
        storm.note(wish, items, error)

    def batch(wishes: list[Wish]) -> None:
        prompts: Any = [
            {"prompt_token_ids": list(each_wish.prompt), "cache_salt": each_wish.salt}
            for each_wish in wishes
        ]
        everything = (
            [each_wish.params for each_wish in wishes],
            [each_wish.priority for each_wish in wishes],
        )
        leaver = next((each_wish for each_wish in wishes if each_wish.leaving != "stays"), None)
        if leaver is not None:
            several = llm.generate_iter(prompts, everything[0], priority=everything[1])
            outputs = read_some(several, max(1, leaver.patience))
        else:
            try:
                outputs = llm.generate(prompts, everything[0], False, priority=everything[1])
            except RequestFailedError as failure:
                outputs = failure.outputs
        for output in outputs:
            wish = replace(wishes[output.index], params=whole(wishes[output.index].params))
            error = None if output.error is None else RequestFailedError(output.error, [output])
            storm.note(wish, [output], error)

    def caller() -> None:
        random, several = Random(), []
        for _, wish in work:
            several.append(wish)
            if len(several) == 4:
                batch(several)
                several = []
            elif random.random() < 0.5:
                stream(several.pop())
        batch(several)

    with storm.model.llm() as llm, ThreadPoolExecutor(CALLERS) as pool:
        for item in [pool.submit(caller) for _ in range(CALLERS)]:
            item.result(_LONGEST)


def whole(params: SamplingParams) -> SamplingParams:
    """Results of a batch are whole, whatever the kind."""
    return replace(params, output_kind=RequestOutputKind.FINAL_ONLY)


EVENTS = (
    "finished",
    "finished after a preemption",
    "had cached tokens",
    "left by its caller",
    "ended before its first token",
    "ended while it ran",
    "steps that failed",
    "steps that failed on a request",
    "failed alone",
    "stop, str",
    "stop, int",
    "stop, NoneType",
    "length, NoneType",
)


@pytest.mark.parametrize(
    ("callers", "depth"),
    [
        (tasks_and_threads, 2),
        (threads_of_an_llm, 1),
        *soak_cases([(tasks_and_threads, 1), (threads_of_an_llm, 2)]),
    ],
)
@pytest.mark.parametrize("count", [300, *soak_only([2000])])
def test_everybody_gets_what_he_gets_alone(
    count: int, callers: Callable[[Storm], None], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {*EVENTS, *(["deadline", "abort, NoneType"] if callers is tasks_and_threads else [])}
    seen: Counter[str] = Counter()
    for turn in range(3):  # which requests meet a failing step depends on the threads
        storm = Storm(monkeypatch, count, depth, seed=count + depth + 1000 * turn)
        callers(storm)
        storm.judge()
        storm.assert_over()
        seen += storm.seen
        if expected <= set(seen):
            break
    assert expected <= set(seen), (expected - set(seen), seen)
