"""Two steps in the queue: the same tokens, and no output of a step without requests."""

from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from pyengine.sampling_params import SamplingParams
from tests.support.engines import EOS, GREEDY, Bench, make_bench
from tests.support.fake_runner import Fault, continued


def ahead(**settings: Any) -> Bench:
    return make_bench(depth=2, **settings)


def test_the_second_step_is_planned_before_the_first_is_known() -> None:
    bench = ahead()
    bench.submit({"a": [1, 2, 3], "b": [4, 5]})
    bench.engine.step()
    assert bench.runner.computed == [5]  # the device has done one step, and a second one waits
    assert bench.engine.stats().counters["committed_steps"] == 1
    assert bench.engine._queue
    done = bench.run()
    for name, prompt in {"a": [1, 2, 3], "b": [4, 5]}.items():
        assert done[name].outputs[0].token_ids == continued(prompt, 8)
    assert bench.runner.pending == 14  # all but the first token of each
    assert bench.runner.computed == [5, *[2] * 7]  # nothing was computed in vain
    bench.assert_all_free()


def drawn(random: Random, waits: float) -> tuple[list[int], SamplingParams]:
    """`waits`: how often a request needs its tokens before it can go on."""
    params = SamplingParams(
        n=3 if random.random() < waits else 1,
        temperature=random.choice([0, 0, 1.2]),
        top_k=random.choice([0, 5]),
        seed=random.randrange(9),
        max_tokens=random.randint(1, 12),
        min_tokens=random.choice([0, 0, 1]),
        ignore_eos=random.random() < 0.5,
        stop_token_ids=random.sample(range(97), random.choice([0, 0, 8])),
        repetition_penalty=1.5 if random.random() < waits else 1,
        logprobs=random.choice([None, None, 2]),
        prompt_logprobs=1 if random.random() < waits else None,
    )
    return [random.randrange(6) for _ in range(random.randint(1, 30))], params


@pytest.mark.parametrize(("num_blocks", "waits"), [(20, 0.01), (400, 0), (400, 0.05)])
def test_500_random_requests_give_the_same_with_and_without(num_blocks: int, waits: float) -> None:
    random = Random(num_blocks)
    asked = {str(name): drawn(random, waits) for name in range(500)}
    outputs, benches = [], []
    for depth in (1, 2):
        bench = make_bench(num_blocks, 4, max_num_batched_tokens=48, max_num_seqs=12, depth=depth)
        for name, (prompt, params) in asked.items():
            bench.submit({name: prompt}, params)
        outputs.append(bench.run())
        benches.append(bench)
        bench.assert_all_free()
    plain, overlapped = outputs
    assert plain.keys() == overlapped.keys() == asked.keys()
    for name, item in plain.items():
        other = overlapped[name]
        assert item.outputs == other.outputs
        assert item.prompt_logprobs == other.prompt_logprobs
    assert benches[0].runner.pending == 0
    assert benches[1].runner.pending > (300 if waits else 2000)
    if num_blocks == 20:
        assert min(bench.scheduler.num_preemptions for bench in benches) > 0


def test_a_sequence_that_has_ended_is_dropped_from_the_step_that_runs() -> None:
    prompt = next([first, 7] for first in range(97) if EOS in continued([first, 7], 6)[1:4])
    tokens = continued(prompt, 8)
    length = tokens.index(EOS) + 1
    bench = ahead()
    bench.submit({"a": prompt}, SamplingParams(temperature=0, max_tokens=8))
    bench.submit({"b": [4, 5]})
    done = bench.run()
    assert done["a"].outputs[0].token_ids == tokens[:length]
    assert done["a"].outputs[0].finish_reason == "stop"
    assert done["b"].outputs[0].token_ids == continued([4, 5], 8)
    assert bench.runner.computed == [4, *[2] * length, *[1] * (7 - length)]
    bench.assert_all_free()


def test_the_last_one_to_end_leaves_no_step_behind() -> None:
    prompts = ([first, second] for first in range(97) for second in range(97))
    prompt = next(each_prompt for each_prompt in prompts if continued(each_prompt, 2)[1] == EOS)
    bench = ahead()
    bench.submit({"a": prompt}, SamplingParams(temperature=0, max_tokens=8))
    done = bench.run()
    assert len(done["a"].outputs[0].token_ids) == 2
    assert not bench.engine._queue
    assert not bench.engine.has_work
    bench.assert_all_free()


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_of_everything_leaves_no_step_behind(depth: int) -> None:
    bench = make_bench(depth=depth)
    bench.submit({"a": [1, 2, 3]})
    for _ in range(3):
        bench.engine.step()
    (output,) = bench.abort(["a"])
    assert output.outputs[0].token_ids == continued([1, 2, 3], 3)
    assert not bench.engine._queue
    bench.assert_all_free()
    bench.submit({"a": [1, 2, 3]})
    assert bench.run()["a"].outputs[0].token_ids == continued([1, 2, 3], 8)


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("error", [RuntimeError("device"), KeyboardInterrupt()])
def test_a_step_that_fails_takes_the_next_one_with_it_and_no_token(
    at: int, error: BaseException
) -> None:
    bench = ahead()
    bench.runner.fault = Fault(at, error)
    bench.submit({"a": [1, 2, 3], "b": [4, 5]})
    failures = 0
    while bench.engine.has_work:
        waiting = bench.runner.fault
        with suppress(KeyboardInterrupt):
            bench.engine.step()
        if waiting is not None and bench.runner.fault is None:  # it has struck in this step
            failures += 1
            assert not bench.engine._queue
            bench.manager.check()
            given = {item: bench.output(item).outputs[0].token_ids for item in ("a", "b")}
            assert given == {"a": continued([1, 2, 3], at), "b": continued([4, 5], at)}
    assert failures == 1
    done = bench.take_finished()
    for name, prompt in {"a": [1, 2, 3], "b": [4, 5]}.items():
        assert done[name].outputs[0].token_ids == continued(prompt, 8)
    bench.assert_all_free()


WAITING = {
    "fork": SamplingParams(n=3, temperature=0, max_tokens=5, ignore_eos=True),
    "penalty": SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, frequency_penalty=0.5),
}


@pytest.mark.parametrize("params", WAITING.values(), ids=WAITING)
def test_what_needs_a_token_waits_for_it(params: SamplingParams) -> None:
    bench, plain = ahead(), make_bench()
    bench.submit({"a": [1, 2, 3]}, params)
    bench.engine.step()
    assert not bench.engine._queue
    plain.submit({"a": [1, 2, 3]}, params)
    assert bench.run()["a"].outputs == plain.run()["a"].outputs


@pytest.mark.parametrize("params", WAITING.values(), ids=WAITING)
def test_nobody_else_waits_for_the_tokens_of_one_who_does(params: SamplingParams) -> None:
    """One request with a penalty, or with several samples, leaves the others their overlap."""
    plain = make_bench()
    plain.submit({"a": [1, 2, 3]}, params)
    expected = plain.run()["a"].outputs
    bench = ahead()
    bench.submit({"b": [4, 5], "c": [6]}, replace(GREEDY, max_tokens=12))
    bench.submit({"a": [1, 2, 3]}, params)
    bench.engine.step()
    assert bench.engine._queue
    assert len(bench.engine._queue[-1].step.sequences) == 2  # without the one that waits
    done = bench.run()
    assert done["a"].outputs == expected
    for name, prompt in {"b": [4, 5], "c": [6]}.items():
        assert done[name].outputs[0].token_ids == continued(prompt, 12)
    assert bench.runner.pending >= 2 * 11  # every token of theirs but the first
    bench.assert_all_free()


def test_log_probabilities_of_a_prompt_make_nobody_wait() -> None:
    params = replace(GREEDY, prompt_logprobs=1)
    bench, plain = ahead(max_num_batched_tokens=32), make_bench(max_num_batched_tokens=32)
    for item in (bench, plain):
        item.submit({"a": [at % 7 for at in range(70)]}, params)
    bench.engine.step()
    assert bench.engine._queue
    found, expected = bench.run()["a"], plain.run()["a"]
    assert found.prompt_logprobs == expected.prompt_logprobs
    assert found.prompt_logprobs is not None and len(found.prompt_logprobs) == 70


def test_a_step_that_samples_nothing_feeds_nothing_forward() -> None:
    bench = ahead(max_num_batched_tokens=32)
    prompt = [at % 7 for at in range(33)]
    bench.submit({"a": prompt})
    assert bench.run()["a"].outputs[0].token_ids == continued(prompt, 8)


def test_a_request_that_comes_meanwhile_joins_the_step_after() -> None:
    bench = ahead()
    bench.submit({"a": [1, 2, 3]}, GREEDY)
    bench.engine.step()
    bench.submit({"b": [4, 5]}, GREEDY)
    bench.engine.step()
    bench.engine.step()
    assert bench.runner.computed == [3, 1, 3]
    done = bench.run()
    assert done["b"].outputs[0].token_ids == continued([4, 5], 8)
