"""What many threads bring to one engine, at every moment of what another one does."""

import sys
import traceback
from itertools import count
from threading import Event, Thread
from types import FrameType

import pytest

from pyengine.engine.loop import EngineLoop, _Turn
from pyengine.engine.prompts import Prompt
from pyengine.engine.request import Request
from pyengine.errors import BrokenLogitsError
from pyengine.sampling_params import SamplingParams
from tests.support.engines import GREEDY, Bench, Sink, make_bench
from tests.support.fake_runner import Fault, continued
from tests.support.moments import Moment, interrupt, moments

_NAMES = count()


LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=50)


def request(
    bench: Bench, prompt: list[int], params: SamplingParams = GREEDY
) -> tuple[Request, Sink]:
    """A request that nobody has queued yet."""
    state = bench.engine.input_processor.request(
        f"{next(_NAMES)}", Prompt(token_ids=prompt), params
    )
    state.sink = sink = Sink(streams=False)
    return state, sink


def test_nobody_is_lost_who_comes_while_everybody_is_told_of_a_failure() -> None:
    late: list[tuple[Request, Sink]] = []

    def submit() -> None:
        late.append(request(bench, [3]))
        shared.submit([late[-1][0]])

    codes = {EngineLoop._fail_all.__code__}
    bench = make_bench()
    shared = EngineLoop(bench.engine)
    for moment in moments(codes, submit):
        bench = make_bench()
        shared = EngineLoop(bench.engine)
        states = [request(bench, [at]) for at in range(3)]
        shared.submit([state for state, _ in states])
        with moment.watched():
            shared._fail_all(ValueError("all of it"))
        assert all(isinstance(sink.error, ValueError) for _, sink in states)
        if moment.has_come:
            _, sink = late[-1]
            if sink.error is None:
                shared.run_until(lambda: bool(sink.items), Event())  # noqa: B023
                assert sink.items[0].outputs[0].token_ids == continued([3], 8)
        bench.assert_all_free()


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
    shared = EngineLoop(bench.engine)
    error.__cause__ = cause = RuntimeError("why")
    error.add_note("a note")
    states = [request(bench, [at]) for at in range(3)]
    shared.submit([state for state, _ in states])
    try:
        fail(error)
    except Exception as caught:
        shared._fail_all(caught)
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


def fail(error: Exception) -> None:
    raise error


def test_readers_of_one_call_have_one_exception() -> None:
    bench = make_bench()
    shared = EngineLoop(bench.engine)
    (one, sink), (other, _) = request(bench, [1]), request(bench, [2])
    other.sink = sink
    told: list[Exception] = []
    sink.fail = told.append  # type: ignore[method-assign]
    shared.submit([one, other])
    shared._fail_all(ValueError("all of it"))
    assert len(told) == 1


def test_what_is_given_up_while_another_thread_drives_is_gone_when_that_one_stops() -> None:
    """At whatever moment: nobody has to come by for the blocks to be free."""
    bench = make_bench()
    codes = {EngineLoop.run_until.__code__, EngineLoop.settle.__code__}
    left: list[Request] = []

    def give_up() -> None:
        shared.abort(left)

    shared = EngineLoop(bench.engine)
    for moment in moments(codes, give_up):
        bench = make_bench(max_model_len=200)
        shared = EngineLoop(bench.engine)
        (stays, sink), (goes, _) = request(bench, [1]), request(bench, [2], LONG)
        left[:] = [goes]
        shared.submit([stays, goes])
        with moment.watched():
            shared.run_until(lambda: bool(sink.items), Event())  # noqa: B023
        assert sink.items[0].outputs[0].token_ids == continued([1], 8)
        if moment.has_come:
            assert not bench.engine.has_work
            bench.assert_all_free()


def test_an_interrupt_while_requests_are_taken_in_does_no_harm_to_them() -> None:
    """Whoever comes next takes them in, and nobody is told that his own id is in use."""
    bench = make_bench()
    codes = {
        EngineLoop._read_inbox.__code__,
        EngineLoop._add.__code__,
        type(bench.engine).add.__code__,
        type(bench.scheduler).add.__code__,
    }
    for moment in moments(codes, interrupt):
        bench = make_bench()
        shared = EngineLoop(bench.engine)
        states = [request(bench, [at]) for at in range(3)]
        shared.submit([state for state, _ in states])
        try:
            with moment.watched():
                shared.settle()
        except KeyboardInterrupt:
            pass
        for at, (_, sink) in enumerate(states):
            shared.run_until(lambda: bool(sink.items) or sink.error is not None, Event())  # noqa: B023
            assert sink.error is None
            assert sink.items[0].outputs[0].token_ids == continued([at], 8)
        bench.assert_all_free()


@pytest.mark.parametrize("at", range(3))
def test_a_fault_leaves_the_turn_free(at: int) -> None:
    bench = make_bench()
    shared = EngineLoop(bench.engine)
    state, sink = request(bench, [1])
    bench.runner.fault = Fault(at, KeyboardInterrupt())
    shared.submit([state])
    with pytest.raises(KeyboardInterrupt):
        shared.run_until(lambda: bool(sink.items), Event())
    shared.run_until(lambda: bool(sink.items), Event())
    assert sink.items[0].outputs[0].token_ids == continued([1], 8)
    bench.assert_all_free()


def test_the_turn_is_free_once_the_call_that_has_it_is_over() -> None:
    turn = _Turn()
    is_asked, is_answered = Event(), Event()

    def call() -> FrameType:
        frame = sys._getframe()
        assert turn.take(frame)
        is_asked.set()
        assert is_answered.wait(10)
        return frame  # as an interrupt in its last line leaves it

    calls: list[FrameType] = []
    thread = Thread(target=lambda: calls.append(call()))
    thread.start()
    assert is_asked.wait(10)
    assert not turn.take(sys._getframe())
    is_answered.set()
    thread.join()
    assert turn.take(sys._getframe())
    turn.give_back(calls[0])
    assert turn.take(sys._getframe())


def ended() -> FrameType:
    """The frame of a call that is over."""
    return sys._getframe()


def alive(turn: _Turn, frames: list[FrameType]) -> list[FrameType]:
    """Of these calls those that have the turn."""
    return [frame for frame in frames if turn.take(frame)]


def test_two_calls_never_have_the_turn_whatever_comes_between() -> None:
    """Beside a call that takes it: the one that has it gives it back and ends, another takes it."""
    here = sys._getframe()

    def contend() -> None:
        others.append(sys._getframe())
        turn.give_back(holder)
        results.append(turn.take(others[0]))
        is_asked.set()
        assert is_over.wait(10)

    def beside() -> None:
        threads.append(Thread(target=contend))
        threads[0].start()
        assert is_asked.wait(10)

    turn = _Turn()
    for moment in moments({_Turn.take.__code__}, beside):
        turn, holder = _Turn(), ended()
        assert turn.take(holder)
        is_asked, is_over = Event(), Event()
        others: list[FrameType] = []
        results: list[bool] = []
        threads: list[Thread] = []
        with moment.watched():
            mine = turn.take(here)
        if moment.has_come:
            assert [mine, *results].count(True) == 1, "nobody has it, or two"
            assert alive(turn, [here, *others]) == ([here] if mine else others)
            is_over.set()
            threads[0].join()
            turn.give_back(here)
            assert turn.take(here)  # the other call has ended
        turn.give_back(here)


def test_a_call_that_is_interrupted_while_it_takes_the_turn_does_not_keep_it() -> None:
    """From one that has ended without giving it back: at whatever line the interrupt comes."""

    def take(moment: Moment) -> None:
        frame = sys._getframe()
        try:
            with moment.watched():
                assert turn.take(frame)
        except KeyboardInterrupt:
            pass  # and another one comes before it gives the turn back

    turn = _Turn()
    for moment in moments({_Turn.take.__code__}, interrupt):
        for holds in (True, False):
            turn = _Turn()
            if holds:
                assert turn.take(ended())
            take(moment)
            frame = sys._getframe()
            for _ in range(3):
                assert turn.take(frame), "nobody can have it any more"
                turn.give_back(frame)
            assert len(turn._claims) <= 2  # frames of calls that are over are not kept


def test_many_threads_that_end_without_giving_it_back() -> None:
    turn, inside, overlaps, count_of = _Turn(), [0], [0], [0]

    def call() -> bool:
        frame = sys._getframe()
        if not turn.take(frame):
            return False
        inside[0] += 1
        overlaps[0] += inside[0] > 1
        for _ in range(20):
            count_of[0] += 1
        overlaps[0] += inside[0] > 1
        inside[0] -= 1
        if count_of[0] % 3:
            turn.give_back(frame)
        return True

    def work() -> None:
        left = 2000
        while left:
            left -= call()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not any(thread.is_alive() for thread in threads)
    assert (overlaps[0], count_of[0]) == (0, 4 * 2000 * 20)
    assert len(turn._claims) <= 2
