"""A request on which the forward pass fails ends alone; the others get their tokens."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from pyengine.engine.recovery import FaultFinder, LimitRecovery, Verdict
from pyengine.errors import RequestFailedError
from pyengine.executor.model_runner import StepLogits
from pyengine.request.prompts import Prompt
from pyengine.scheduler.scheduler import SchedulerLimits
from tests.support.engines import GREEDY, Bench, Sink, add_request, make_bench
from tests.support.fake_runner import Fault, continued

POISON = 96


class PoisonError(ValueError):
    """The model's error about a token."""


def poisoned(is_bad: Callable[[Any], bool] = lambda ids: POISON in ids, **settings: Any) -> Bench:
    """An engine whose forward pass fails whenever the token is among its inputs."""
    bench = make_bench(512, 4, max_num_seqs=64, **settings)
    run = bench.runner.run

    def failing(sizes: tuple[int, int, int], *rest: Any) -> StepLogits:
        if is_bad(bench.runner.arrays["input_ids"][: sizes[0]]):
            raise PoisonError("no such token")
        return run(sizes, *rest)

    bench.runner.run = failing  # type: ignore[method-assign]
    return bench


_HARMLESS = [[at, at + 1, 3] for at in range(90) if POISON not in continued([at, at + 1, 3], 8)]
PROMPTS = {str(at): prompt for at, prompt in enumerate(_HARMLESS[:31])}


@pytest.mark.parametrize("depth", [1, 2])
def test_one_that_comes_to_31_fails_within_3_steps_and_alone(depth: int) -> None:
    bench = poisoned(depth=depth)
    bench.submit(PROMPTS)
    for _ in range(3):
        bench.engine.step()
    bench.submit({"bad": [POISON, 1, 2]})
    request = bench.requests["bad"]
    steps, failures = 0, bench.engine.recovery.faults._failures
    while not failures[request]:  # with overlap it joins the step after the one that runs
        bench.engine.step()
        steps += 1
    assert steps <= depth
    for _ in range(2):
        bench.engine.step()
    assert request.result.finished_time is not None
    done = bench.run()
    assert done["bad"].error == "PoisonError: no such token"
    assert done["bad"].outputs[0].finish_reason == "error"
    assert done["bad"].outputs[0].token_ids == []
    for name, prompt in PROMPTS.items():
        assert done[name].outputs[0].token_ids == continued(prompt, 8)
    bench.assert_all_free()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("place", [0, 13, 31])
def test_one_of_32_that_come_together_is_found_by_halves(depth: int, place: int) -> None:
    bench = poisoned(depth=depth)
    names = list(PROMPTS)
    names.insert(place, "bad")
    bench.submit({name: PROMPTS.get(name, [POISON]) for name in names})
    steps = 0
    while bench.requests["bad"].result.finished_time is None:
        bench.engine.step()
        steps += 1
    assert steps <= 7 + depth  # log2(32) + 2
    done = bench.run()
    assert done["bad"].error is not None
    for name, prompt in PROMPTS.items():
        assert done[name].outputs[0].token_ids == continued(prompt, 8)
    bench.assert_all_free()


def test_several_at_fault_all_end_and_nobody_else() -> None:
    bench = poisoned()
    bad = {f"bad {at}": [at, POISON] for at in range(3)}
    bench.submit(dict(list(PROMPTS.items())[:9]))
    bench.submit(bad)
    bench.submit(dict(list(PROMPTS.items())[9:]))
    done = bench.run()
    assert {name for name, item in done.items() if item.error is not None} == set(bad)
    for name, prompt in PROMPTS.items():
        assert done[name].outputs[0].token_ids == continued(prompt, 8)
    bench.assert_all_free()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("moment", range(1, 8))
@pytest.mark.parametrize("place", [0, 4, 9])
def test_one_at_fault_that_comes_during_the_search_proves_nothing_about_others(
    place: int, moment: int, depth: int
) -> None:
    bench = poisoned(depth=depth)
    names = list(PROMPTS)[:9]
    names.insert(place, "bad")
    bench.submit({name: PROMPTS.get(name, [POISON]) for name in names})
    for _ in range(moment):
        bench.engine.step()
    worse = add_request(bench, "worse", Prompt(token_ids=[3, POISON]), GREEDY, priority=-1)
    requests = bench.requests | {"worse": worse}
    bench.run()
    at_fault = {name for name, request in requests.items() if request.result.error is not None}
    assert at_fault == {"bad", "worse"}
    for name in names:
        if name != "bad":
            assert requests[name].output().outputs[0].token_ids == continued(PROMPTS[name], 8)
    bench.assert_all_free()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_fails_by_chance_is_not_held_against_who_was_in_it(depth: int) -> None:
    """The next one fails too, on a request that has arrived since."""
    bench = poisoned(depth=depth)
    bench.submit({"good": PROMPTS["0"]})
    bench.engine.step()
    bench.runner.fault = Fault(len(bench.runner.computed), ValueError("by chance"))
    request, failures = bench.requests["good"], bench.engine.recovery.faults._failures
    while not failures[request]:
        bench.engine.step()
    bench.submit({"bad": [POISON]})
    done = bench.run()
    assert done["good"].error is None
    assert done["good"].outputs[0].token_ids == continued(PROMPTS["0"], 8)
    assert done["bad"].error is not None
    bench.assert_all_free()


def test_one_at_fault_in_the_middle_of_its_answer_keeps_what_it_has() -> None:
    prompt = next([at, 5] for at in range(90) if 50 in continued([at, 5], 8)[2:6])
    tokens = continued(prompt, 8)
    assert len(PROMPTS) == 31
    bench = poisoned(lambda ids: 50 in ids)
    others = {
        name: item for name, item in PROMPTS.items() if 50 not in [*item, *continued(item, 7)]
    }
    bench.submit({"bad": prompt, **others})
    done = bench.run()
    assert done["bad"].outputs[0].token_ids == tokens[: tokens.index(50) + 1]
    assert done["bad"].outputs[0].finish_reason == "error"
    for name, item in others.items():
        assert done[name].outputs[0].token_ids == continued(item, 8)
    bench.assert_all_free()


def test_one_that_streams_is_told_by_its_sink() -> None:
    bench, sink = poisoned(), Sink()
    add_request(bench, "bad", Prompt(token_ids=[POISON]), GREEDY, sink=sink)
    bench.submit({"good": [1]})
    assert bench.run()["good"].outputs[0].token_ids == continued([1], 8)
    assert isinstance(sink.error, RequestFailedError)
    assert "'bad' failed: PoisonError: no such token" in str(sink.error)
    assert isinstance(sink.error.__cause__, PoisonError)
    assert sink.items == []


def test_where_every_step_fails_it_is_nobodys_fault(caplog: pytest.LogCaptureFixture) -> None:
    bench = poisoned(lambda ids: True)
    bench.submit(PROMPTS)
    with caplog.at_level(logging.WARNING), pytest.raises(PoisonError):
        bench.run()
    assert "tried again" in caplog.text
    assert sum(request.result.error is not None for request in bench.requests.values()) <= 4
    bench.engine.abort(list(bench.requests.values()))
    bench.assert_all_free()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("num_first", "num_last"), [(4, 0), (6, 0), (20, 0), (4, 2), (0, 6)])
def test_many_bad_requests_at_once_leave_those_that_come_with_them(
    num_first: int, num_last: int, depth: int
) -> None:
    bench = poisoned(depth=depth)
    good = dict(list(PROMPTS.items())[:8])
    bench.submit({f"bad {at}": [POISON, at] for at in range(num_first)})
    bench.submit(good)
    bench.submit({f"worse {at}": [POISON, at] for at in range(num_last)})
    done = bench.run()
    assert sum(item.error is not None for item in done.values()) == num_first + num_last
    for name, prompt in good.items():
        assert done[name].outputs[0].token_ids == continued(prompt, 8)
    bench.assert_all_free()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_good", [1, 20])
def test_bad_requests_hours_apart_each_fail_alone(num_good: int, depth: int) -> None:
    bench = poisoned(depth=depth)
    for round in range(8):
        bench.submit({f"bad {round}": [POISON, round]})
        assert bench.run()[f"bad {round}"].error == "PoisonError: no such token"
        for at in range(num_good):
            bench.submit({"good": PROMPTS[str(at)]})
            assert bench.run()["good"].outputs[0].token_ids == continued(PROMPTS[str(at)], 8)
    bench.assert_all_free()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_first", [True, False])
def test_after_bad_requests_long_ago_an_innocent_beside_one_is_served(
    is_first: bool, depth: int
) -> None:
    bench = poisoned(depth=depth)
    for _ in range(3):
        bench.submit({"bad": [POISON]})
        assert bench.run()["bad"].error is not None
        for at in range(50):
            bench.submit({"good": PROMPTS[str(at % 31)]})
            assert bench.run()["good"].error is None
    both = {"bad": [POISON], "innocent": PROMPTS["0"]}
    bench.submit(both if is_first else dict(reversed(both.items())))
    done = bench.run()
    assert done["bad"].error is not None
    assert done["innocent"].outputs[0].token_ids == continued(PROMPTS["0"], 8)
    bench.assert_all_free()


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The errors whose tracebacks were logged."""
    return [
        repr(record.exc_info[1])
        for record in caplog.records
        if record.exc_info and record.exc_info[1]
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_traceback_of_a_failing_step_is_logged_once(
    depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench = poisoned(depth=depth)
    for _ in range(2):  # again for a failure after steps that went well
        caplog.clear()
        bench.submit({"bad": [POISON], **PROMPTS})
        with caplog.at_level(logging.WARNING):
            bench.run()
        assert caplog.text.count("a step failed") > 4  # so often it was tried
        assert caplog.text.count("request 'bad' failed") == 1
        assert tracebacks(caplog) == ["PoisonError('no such token')"]
        assert "in failing" in caplog.text  # the line that raised it
        bench.submit({"good": PROMPTS["0"]})
        bench.run()


def test_another_error_of_the_same_search_has_its_traceback_logged_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = poisoned()
    bench.submit({"good": PROMPTS["0"]})
    bench.engine.step()
    bench.runner.fault = Fault(len(bench.runner.computed), ValueError("by chance"))
    with caplog.at_level(logging.WARNING):
        bench.engine.step()
        bench.submit({"bad": [POISON]})
        bench.run()
    assert tracebacks(caplog) == ["ValueError('by chance')", "PoisonError('no such token')"]


def test_suspects_that_are_aborted_hold_nobody_back() -> None:
    bench = poisoned()
    bench.submit(PROMPTS)
    bench.submit({"bad": [POISON]})
    bench.engine.step()
    bench.abort(["bad", "3"])
    done = bench.run()
    for name, prompt in PROMPTS.items():
        if name != "3":
            assert done[name].outputs[0].token_ids == continued(prompt, 8)
    bench.assert_all_free()


class Search:
    """A fault finder, asked with the samples of requests that have no token yet."""

    def __init__(self, *names: str) -> None:
        self.bench, self.finder = make_bench(), FaultFinder()
        self.bench.submit({name: [1, 2, 3] for name in names})
        self.requests = self.bench.requests

    def fails(self, names: Iterable[str]) -> Verdict:
        return self.finder.failed([self.requests[name].sequences[0] for name in names])

    def goes_well(self, names: Iterable[str]) -> None:
        self.finder.succeeded([self.requests[name].sequences[0] for name in names])

    def held(self) -> str:
        held = self.finder.held(self.requests.values())
        return "".join(name for name, item in self.requests.items() if item.sequences[0] in held)


def test_a_step_that_had_to_take_everybody_proves_nothing_about_one() -> None:
    search = Search(*"abc")
    assert search.fails("a") == Verdict()  # by chance
    assert search.held() == "bc"
    search.finder.release()  # they hold what "a" needs
    assert search.held() == ""
    assert search.fails("abc") == Verdict()  # because of "b"
    assert search.held() == "bc"
    search.goes_well("a")
    assert search.held() == "ac"
    assert search.fails("b") == Verdict()
    assert search.fails("b") == Verdict(search.requests["b"])
    assert not search.finder.suspects


def test_after_a_step_of_all_that_went_well_others_are_left_out_again() -> None:
    search = Search(*"abc")
    search.fails("a")
    search.finder.release()
    search.goes_well("bc")
    assert search.held() == "bc"
    assert search.fails("a") == Verdict(search.requests["a"])


def test_one_who_can_never_be_alone_is_found_all_the_same() -> None:
    search = Search(*"ab")
    verdicts = [search.fails("ab")]
    while verdicts[-1].culprit is None:
        search.finder.release()
        verdicts.append(search.fails("ab"))
        assert len(verdicts) < 8
    assert verdicts[-1].culprit is search.requests["b"]  # the one that came last


def test_who_went_while_the_step_ran_may_have_been_at_fault() -> None:
    search = Search(*"ab")
    search.fails("a")
    search.bench.abort(["b"])
    assert search.fails("ab") == Verdict()
    assert search.fails("a") == Verdict(search.requests["a"])


@pytest.mark.parametrize("num_steps", [0, 1])
def test_what_is_found_in_a_row_without_a_step_that_goes_well_is_not_the_requests(
    num_steps: int,
) -> None:
    search = Search("good", *"abcd")
    verdicts = []
    for name in "abcd":
        search.fails(name)
        verdicts.append(search.fails(name))
        assert not search.finder.suspects
        for _ in range(num_steps):
            search.goes_well(["good"])
    assert [verdict.culprit for verdict in verdicts] == [search.requests[name] for name in "abcd"]
    assert [verdict.is_hopeless for verdict in verdicts] == [False] * 3 + [num_steps == 0]


def test_a_new_search_counts_anew() -> None:
    search = Search(*"abc")
    search.fails("a")
    search.fails("bc")  # without "a", which is no suspect any more
    search.goes_well("b")
    search.goes_well("c")
    assert not search.finder.suspects
    assert search.fails("a") == Verdict()
    assert search.fails("a") == Verdict(search.requests["a"])


def test_limits_are_halved_and_doubled_again_ever_more_slowly() -> None:
    asked = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=32)
    recovery = LimitRecovery(asked)
    limits = recovery.smaller(64)
    assert limits == SchedulerLimits(max_num_batched_tokens=32, max_num_seqs=32)
    calm = []
    for _ in range(3):
        steps = 0
        while limits != asked:
            limits = recovery.after_a_step(limits)
            steps += 1
        calm.append(steps)
        limits = recovery.smaller(64)
        assert limits is not None
    assert calm == [64, 128, 256]
    assert recovery.smaller(1) is None
