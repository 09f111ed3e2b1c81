"""The engine's thread: what callers bring to it, at every moment, and how it ends."""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import pytest

from pyengine.engine.core import Engine
from pyengine.engine.loop import EngineLoop
from pyengine.engine.parts import MemoryAhead
from pyengine.errors import BrokenLogitsError, EngineClosedError, EngineDeadError
from pyengine.request.prompts import Prompt
from pyengine.request.request import Request
from pyengine.sampling_params import SamplingParams
from tests.support.callers import Gate
from tests.support.engines import GREEDY, Bench, Sink, add_parts, make_bench
from tests.support.fake_runner import continued
from tests.support.moments import moments

_NAMES = count()


LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=50)


def request(
    bench: Bench, prompt: list[int], params: SamplingParams = GREEDY
) -> tuple[Request, Sink]:
    """A request that nobody has queued yet."""
    state = bench.processor.request(f"{next(_NAMES)}", Prompt(token_ids=prompt), params)
    state.sink = sink = Sink(streams=False)
    return state, sink


@contextmanager
def running(bench: Bench, kill: Callable[[], object] | None = None) -> Iterator[EngineLoop]:
    """A loop, closed at the end."""
    loop = EngineLoop(bench.engine, kill=kill)
    try:
        yield loop
    finally:
        loop.close()
        assert not loop._thread.is_alive()


def run(loop: EngineLoop, engine: Engine) -> None:
    """Wait until all requests have ended."""
    loop.flush()
    while engine.has_work:
        loop.flush()
    loop.flush()  # the step that ended the last one


def test_a_request_that_comes_while_everybody_is_told_of_a_failure_is_served() -> None:
    late: list[tuple[Request, Sink]] = []
    bench = make_bench()
    loop = EngineLoop(bench.engine)

    def submit() -> None:
        late.append(request(bench, [3]))
        loop.submit([late[-1][0]])

    for moment in moments({EngineLoop._fail_all.__code__}, submit):
        loop.close()
        bench = make_bench()
        gate = Gate(bench, 1)
        loop = EngineLoop(bench.engine)
        states = [request(bench, [at]) for at in range(3)]

        def fail_all() -> None:
            with moment.watched():  # noqa: B023
                loop._fail_all(ValueError("all of it"))  # noqa: B023

        loop.submit([state for state, _ in states])
        loop.enqueue(fail_all)
        gate.is_open.set()
        run(loop, bench.engine)
        assert all(isinstance(sink.error, ValueError) for _, sink in states)
        if moment.has_come:
            assert late[-1][1].items[0].outputs[0].token_ids == continued([3], 8)
        bench.assert_all_free()
    loop.close()


class OddError(Exception):
    """It cannot be made of its message alone."""

    def __init__(self, *, number: int) -> None:
        super().__init__(f"odd number {number}")
        self.number = number


@pytest.mark.parametrize(
    "error",
    [
        ValueError("all of it"),
        KeyError("a", 1),
        OSError(28, "No space left on device", "/nowhere"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        BrokenLogitsError([3, 4], 8),
        OddError(number=7),
    ],
    ids=repr,
)
def test_each_reader_has_an_exception_of_its_own(error: Exception) -> None:
    bench = make_bench()
    error.__cause__ = cause = RuntimeError("why")
    error.add_note("a note")
    states = [request(bench, [at]) for at in range(3)]
    bench.engine.step = partial(fail, error)  # type: ignore[method-assign]
    with running(bench) as loop:
        loop.submit([state for state, _ in states])
        loop.flush()
    found = [sink.error for _, sink in states]
    assert len({id(match) for match in [error, *found]}) == 4
    length = len(traceback.extract_tb(error.__traceback__))
    for match in found:
        assert match is not None
        assert type(match) is type(error)
        assert (str(match), match.args) == (str(error), error.args)
        assert vars(match) == vars(error)
        assert match.__cause__ is cause
        assert traceback.extract_tb(match.__traceback__)[-1].name == "fail"  # where it came from
        for _ in range(3):
            with pytest.raises(type(error)):
                raise match
        match.add_note("of this reader")
    assert len(traceback.extract_tb(error.__traceback__)) == length
    assert vars(error)["__notes__"] == ["a note"]


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("death", [EngineDeadError("by hand"), SystemExit(1), None])
def test_no_request_is_lost_that_comes_when_the_thread_ends(death: BaseException | None) -> None:
    """At every moment: its sink gets an output or an error."""
    late: list[tuple[Request, Sink]] = []
    bench = make_bench()
    loop = EngineLoop(bench.engine)

    def submit() -> None:  # as a caller does that had looked before
        late.append(request(bench, [3]))
        loop.enqueue(partial(loop._add, [late[-1][0]]))

    codes = {EngineLoop._run.__wrapped__.__code__, EngineLoop._read_inbox.__code__}  # type: ignore[attr-defined]
    for moment in moments(codes, submit):
        loop.close()
        bench = make_bench()
        state, sink = request(bench, [1], LONG)
        if death is not None:
            bench.engine.step = partial(fail, death)  # type: ignore[method-assign]
        threading.settrace(moment._trace)
        try:
            loop = EngineLoop(bench.engine)
            loop.submit([state])
            if death is None:
                loop.end()
            loop._thread.join(10)
        finally:
            threading.settrace(None)  # type: ignore[arg-type]
        assert sink.items or sink.error is not None
        if death is not None:
            assert isinstance(loop.death, EngineDeadError)
        if moment.has_come:
            _, sink = late[-1]
            assert sink.items or isinstance(sink.error, EngineDeadError | EngineClosedError)
        with pytest.raises(EngineClosedError if death is None else EngineDeadError):
            loop.submit([state])
        loop.flush()
        bench.assert_all_free()


def test_an_abort_ends_a_request_before_the_next_step() -> None:
    bench = make_bench(max_model_len=200)
    gate = Gate(bench, 2)
    with running(bench) as loop:
        (stays, sink), (goes, left) = request(bench, [1]), request(bench, [2], LONG)
        loop.submit([stays, goes])
        assert gate.is_held.wait(10)
        loop.abort([goes])
        gate.is_open.set()
        run(loop, bench.engine)
    assert sink.items[0].outputs[0].token_ids == continued([1], 8)
    assert left.items[0].outputs[0].finish_reason == "abort"
    assert len(left.items[0].outputs[0].token_ids) <= 3
    bench.assert_all_free()


def test_an_id_in_use_is_told_to_its_own_sink() -> None:
    bench = make_bench()
    with running(bench) as loop:
        (first, sink), (second, other) = request(bench, [1], LONG), request(bench, [2])
        second.request_id = first.request_id
        loop.submit([first, second])
        run(loop, bench.engine)
    assert "in use" in str(other.error)
    assert sink.items[0].outputs[0].token_ids == continued([1], 50)


@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c_ends_a_step_that_does_not_end(
    interrupts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some time after the first, or at the second."""
    monkeypatch.setattr("pyengine.engine.loop.PATIENCE", 0.1 if interrupts == 1 else 60.0)
    bench = make_bench()
    gate = Gate(bench, 1)
    state, sink = request(bench, [1], LONG)
    with running(bench, kill=gate.is_open.set) as loop:
        loop.submit([state])
        assert gate.is_held.wait(10)
        if interrupts == 2:
            main = threading.main_thread().ident or 0
            threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
        loop.interrupt([state])
        run(loop, bench.engine)
    assert sink.items[0].outputs[0].finish_reason == "abort"


def test_close_ends_a_step_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyengine.engine.loop.PATIENCE", 0.1)
    bench = make_bench()
    gate = Gate(bench, 1)
    state, sink = request(bench, [1], LONG)
    with running(bench, kill=gate.is_open.set) as loop:
        loop.submit([state])
        assert gate.is_held.wait(10)
    assert sink.items[0].outputs[0].finish_reason == "abort"


def test_the_thread_may_close_its_own_loop() -> None:
    """As a finalizer does that the garbage collector calls there."""
    bench = make_bench()
    with running(bench) as loop:
        loop.enqueue(loop.close)
        loop._thread.join(10)
        assert not loop._thread.is_alive()


def test_waiting_is_for_other_threads() -> None:
    bench = make_bench()
    with running(bench) as loop:
        answers: SimpleQueue[Any] = SimpleQueue()

        def wait() -> None:
            try:
                loop.wait(SimpleQueue[int]())
            except RuntimeError as error:
                answers.put(error)

        loop.enqueue(wait)
        assert "cannot wait for its own steps" in str(loop.wait(answers))


def test_a_signal_just_before_a_wait_ends_it_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the wait has looked for signals and does not sleep yet: likely on one CPU."""
    monkeypatch.setattr("pyengine.engine.loop.SIGNAL_DELAY", 0.02)
    main, seen = threading.main_thread().ident or 0, list[bool]()
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})  # the loop's thread has it from this one
    try:
        with running(make_bench()) as loop:
            for _ in range(100):
                is_seen, answers = threading.Event(), SimpleQueue[None]()

                def interrupt(
                    is_seen: threading.Event = is_seen, answers: SimpleQueue[None] = answers
                ) -> None:
                    signal.pthread_kill(main, signal.SIGINT)
                    seen.append(is_seen.wait(1))
                    answers.put(None)

                with pytest.raises(KeyboardInterrupt):
                    loop.enqueue(interrupt)
                    loop.wait(answers)
                is_seen.set()
                loop.flush()
                assert seen.pop()
    finally:
        os.sched_setaffinity(0, cpus)


def test_memory_of_the_next_blocks_is_allocated_while_no_request_runs() -> None:
    bench = make_bench(num_blocks=64, block_size=4, max_num_batched_tokens=16)
    asked: list[int] = []
    idle = threading.Event()

    def populate(num_blocks: int) -> bool:
        asked.append(num_blocks)
        if len(asked) % 5 == 0:
            idle.set()
        return len(asked) % 5 != 0

    add_parts(bench.engine, MemoryAhead(bench.manager, populate, 16))
    with running(bench) as loop:
        assert idle.wait(10)
        assert asked == [16] * 5  # four steps of 16 tokens
        idle.clear()
        state, sink = request(bench, list(range(11)))
        loop.submit([state])
        run(loop, bench.engine)
        assert idle.wait(10)
        assert sink.items[-1].finished
    used = bench.manager.stats().allocated_blocks
    assert used >= 3
    assert asked[-1] == 16 + used


def test_a_request_does_not_wait_until_memory_is_allocated() -> None:
    bench = make_bench()
    more = MemoryAhead(bench.manager, lambda num_blocks: True, 16)  # there is always more
    add_parts(bench.engine, more)
    with running(bench) as loop:
        state, sink = request(bench, [1, 2, 3])
        loop.submit([state])
        run(loop, bench.engine)
        assert sink.items[-1].finished
