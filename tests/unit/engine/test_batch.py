"""What the engine keeps from step to step, and that it notices when it must not."""

import pytest

from pyengine.core import SamplingParams
from tests.support.engines import GREEDY, make_bench
from tests.support.fake_runner import continued


def test_one_batch_serves_as_long_as_the_same_requests_decode() -> None:
    bench = make_bench()
    bench.submit({"a": [1, 2, 3], "b": [4, 5]})
    bench.engine.step()
    bench.engine.step()
    batch = bench.engine._batch
    assert batch is not None
    positions = batch.positions.tolist()
    assert len(batch.completions) == 2
    bench.engine.step()
    following = bench.engine._batch
    assert following is not None
    assert following.completions is batch.completions
    assert following.positions.tolist() == [one + 1 for one in positions]
    bench.submit({"c": [7]})
    bench.engine.step()
    assert bench.engine._batch is not None
    assert bench.engine._batch.completions is not batch.completions
    for name, tokens in {"a": [1, 2, 3], "b": [4, 5], "c": [7]}.items():
        (output,) = [one for one in [bench.engine.output(name)] if not one.finished]
        expected = continued(tokens, 8)
        assert output.outputs[0].token_ids == expected[: len(output.outputs[0].token_ids)]
    bench.run()


def test_nothing_that_has_ended_is_kept() -> None:
    bench = make_bench()
    bench.generate([[1, 2, 3], [4, 5]])
    assert bench.engine._batch is None
    bench.submit({"a": [1]})
    bench.engine.step()
    bench.engine.step()
    bench.engine.abort(["a"])
    assert bench.engine._batch is None
    bench.assert_all_free()


def test_a_name_used_again_is_another_request() -> None:
    bench = make_bench()
    bench.submit({"a": [1, 2, 3]})
    for _ in range(3):
        bench.engine.step()
    bench.engine.abort(["a"])
    bench.submit({"a": [9, 8]})
    assert bench.run()["a"].outputs[0].token_ids == continued([9, 8], 8)


@pytest.mark.parametrize("n", [1, 3])
def test_progress_names_each_request_once_and_no_ended_one(n: int) -> None:
    bench = make_bench()
    params = SamplingParams(n=n, temperature=0, ignore_eos=True, max_tokens=3)
    bench.submit({"a": [1, 2]}, params)
    bench.submit({"b": [3]}, GREEDY)
    seen = []
    while bench.engine.has_work:
        result = bench.engine.step()
        seen.append((result.progressed, [one.request_id for one in result.finished]))
    assert seen[:3] == [(["a", "b"], []), (["a", "b"], []), (["a", "b"], ["a"])]
    assert seen[3:] == [(["b"], [])] * 4 + [(["b"], ["b"])]


def test_times_are_those_of_the_first_token_and_the_end() -> None:
    bench = make_bench(max_num_batched_tokens=4, max_num_seqs=4)
    bench.submit({"a": [1] * 10})
    bench.engine.step()
    assert bench.engine.output("a").metrics.first_token_time is None  # a chunk gives no token
    metrics = bench.run()["a"].metrics
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time < metrics.finished_time
    bench.submit({"b": [1]})
    (aborted,) = bench.engine.abort(["b"])
    assert aborted.metrics.first_token_time is None
    assert aborted.metrics.finished_time is not None
