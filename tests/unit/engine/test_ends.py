"""A request ends once: its observer, its reader and its id see one end, whatever comes after it."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pyengine.engine.stats import StepResult
from pyengine.executor.model_runner import StepLogits
from pyengine.request.prompts import Prompt
from pyengine.request.request import Request
from pyengine.sampling_params import SamplingParams
from tests.support.engines import Bench, Sink, add_request, make_bench
from tests.support.fake_runner import continued

LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=30)
MARK = 55


class Ends:
    """Counts how often each request ended."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.reasons: dict[str, set[Any]] = {}

    def on_arrival(self, request: Request) -> None:
        pass

    def on_step(self, result: StepResult) -> None:
        pass

    def on_finish(self, request: Request) -> None:
        self.ends[request.request_id] += 1
        reasons = {sample.output.finish_reason for sample in request.sequences}
        self.reasons.setdefault(request.request_id, set()).update(reasons)


def broken(**settings: Any) -> tuple[Bench, Ends, list[int]]:
    """An engine whose logits are NaN behind the tokens of the list."""
    bench, ends, tokens = make_bench(256, 4, depth=2, **settings), Ends(), list[int]()
    bench.engine.observe(ends)
    run = bench.runner.run

    def breaking(sizes: tuple[int, int, int], *rest: Any) -> StepLogits:
        logits = run(sizes, *rest)
        arrays = bench.runner.arrays
        wanted = arrays["input_ids"][arrays["logits_indices"][: sizes[2]]]
        for row, token in enumerate(wanted):
            if token in tokens:
                logits.sampling[row] = float("nan")
        return logits

    bench.runner.run = breaking  # type: ignore[method-assign]
    return bench, ends, tokens


def add(bench: Bench, name: str, prompt: list[int], params: SamplingParams) -> Sink:
    sink = Sink()
    bench.requests[name] = add_request(bench, name, Prompt(token_ids=prompt), params, sink=sink)
    return sink


@pytest.mark.parametrize("n", [1, 3])
def test_one_that_was_aborted_does_not_fail_in_the_step_that_runs(n: int) -> None:
    bench, ends, tokens = broken()
    gone = add(bench, "gone", [1, 2], replace(LONG, n=n))
    other = add(bench, "other", [3, 5], LONG)
    for _ in range(3):
        bench.engine.step()
    assert bench.engine.is_running  # with the next tokens of both
    tokens[:] = [bench.requests["gone"].sequences[0].token_ids[-1]]
    bench.abort(["gone"])
    request = bench.requests["gone"]
    num_items, ended = len(gone.items), request.result.finished_time
    add(bench, "gone", [5, 6], LONG)  # the id is free again
    bench.engine.step()
    tokens.clear()
    assert {sample.request_id for sample in bench.engine.unfinished} == {"gone", "other"}
    assert (request.result.error, request.result.finished_time, gone.error) == (None, ended, None)
    assert len(gone.items) == num_items
    done = bench.run()
    assert done["gone"].outputs[0].token_ids == continued([5, 6], 30)
    assert done["other"].outputs[0].token_ids == continued([3, 5], 30)
    assert other.error is None
    assert ends.ends == {"gone": 2, "other": 1}  # two requests of that name
    assert ends.reasons["gone"] == {"abort", "length"}
    bench.assert_all_free()


def test_one_that_ended_does_not_fail_in_the_step_that_runs() -> None:
    bench, ends, tokens = broken()
    answer = continued([1, 2], 30)
    stop = next(token for at, token in enumerate(answer) if at > 3 and token not in answer[:at])
    ended = add(bench, "ended", [1, 2], replace(LONG, stop_token_ids=[stop]))
    other = add(bench, "other", [3, 4], LONG)
    tokens[:] = [stop]  # what the step that runs computes for nothing
    assert stop not in continued([3, 4], 30)
    done = bench.run()
    assert done["ended"].outputs[0].finish_reason == "stop"
    assert done["ended"].error is None
    assert (ended.error, other.error) == (None, None)
    assert done["other"].outputs[0].token_ids == continued([3, 4], 30)
    assert ends.ends == {"ended": 1, "other": 1}
    assert [item.finished for item in ended.items].count(True) == 1
    bench.assert_all_free()
