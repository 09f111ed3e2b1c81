"""The state that the engine keeps from step to step, and when it discards it."""

from dataclasses import replace

import pytest

from pyengine.request.prompts import Prompt
from pyengine.sampling_params import SamplingParams
from tests.support.engines import GREEDY, Sink, add_request, make_bench
from tests.support.fake_runner import continued


def test_one_batch_serves_as_long_as_the_same_requests_decode() -> None:
    bench = make_bench()
    bench.submit({"a": [1, 2, 3], "b": [4, 5]})
    bench.engine.step()
    bench.engine.step()
    recent = bench.engine._rows
    assert recent._last is not None
    batch, positions = recent._last
    assert len(batch.sequences) == 2
    bench.engine.step()
    assert recent._last is not None
    following, later = recent._last
    assert following is batch
    assert later.tolist() == [position + 1 for position in positions]
    bench.submit({"c": [7]})
    bench.engine.step()
    assert recent._last is not None and recent._last[0] is not batch
    for name, tokens in {"a": [1, 2, 3], "b": [4, 5], "c": [7]}.items():
        output = bench.output(name)
        assert not output.finished
        found = output.outputs[0].token_ids
        assert found == continued(tokens, 8)[: len(found)]
        assert len(found) == (1 if name == "c" else 4)
    bench.run()


def test_tokens_that_nobody_reads_are_kept_together_and_none_is_lost() -> None:
    """Some end, some are aborted, some come and some go on, while others stream."""
    bench, sink = make_bench(), Sink()
    bench.submit({str(at): [at, 7] for at in range(6)}, replace(GREEDY, max_tokens=20))
    request = add_request(bench, "streamed", Prompt(token_ids=[9]), GREEDY, sink=sink)
    for _ in range(5):
        bench.engine.step()
    batch = bench.engine._output._unread
    assert batch is not None
    assert [item.request for item in (batch.sequences[row] for row in batch.streamed)] == [request]
    assert len(bench.requests["0"].sequences[0].token_ids) < 5  # they are with the rows still
    (aborted,) = bench.abort(["3"])
    assert aborted.outputs[0].token_ids == continued([3, 7], 5)
    bench.submit({"late": [1, 1, 1]})
    done = bench.run()
    for at in (0, 1, 2, 4, 5):
        assert done[str(at)].outputs[0].token_ids == continued([at, 7], 20)
    assert done["late"].outputs[0].token_ids == continued([1, 1, 1], 8)
    assert [item.outputs[0].token_ids for item in sink.items] == [[t] for t in continued([9], 8)]


def test_a_stop_token_is_seen_at_its_step_and_not_before_min_tokens() -> None:
    tokens = continued([5, 6], 20)
    stop = tokens[6]
    bench = make_bench()
    stops = replace(GREEDY, max_tokens=20, stop_token_ids=[stop])
    bench.submit({"a": [5, 6]}, stops)
    bench.submit({"b": [5, 6]}, replace(stops, min_tokens=9))
    bench.submit({"c": [5, 6]}, replace(GREEDY, max_tokens=20))
    for _ in range(tokens.index(stop) + 1):
        bench.engine.step()
    assert bench.requests["a"].result.finished_time is not None
    done = bench.run()
    assert done["a"].outputs[0].token_ids == tokens[: tokens.index(stop) + 1]
    assert stop not in done["b"].outputs[0].token_ids[:9]
    assert done["c"].outputs[0].token_ids == tokens


def test_nothing_that_has_ended_is_kept() -> None:
    bench = make_bench()
    bench.generate([[1, 2, 3], [4, 5]])
    assert bench.engine._output._unread is None
    bench.submit({"a": [1]})
    bench.engine.step()
    bench.engine.step()
    bench.abort(["a"])
    assert bench.engine._output._unread is None
    assert bench.engine._rows._recent == []
    bench.assert_all_free()


def test_a_name_used_again_is_another_request() -> None:
    bench = make_bench()
    bench.submit({"a": [1, 2, 3]})
    for _ in range(3):
        bench.engine.step()
    bench.abort(["a"])
    bench.submit({"a": [9, 8]})
    assert bench.run()["a"].outputs[0].token_ids == continued([9, 8], 8)


@pytest.mark.parametrize("n", [1, 3])
def test_news_go_to_whoever_asked_and_hold_what_is_new(n: int) -> None:
    bench = make_bench()
    params = SamplingParams(n=n, temperature=0, ignore_eos=True, max_tokens=3)
    sinks = {"a": Sink(), "b": Sink()}
    add_request(bench, "a", Prompt(token_ids=[1, 2]), params, sink=sinks["a"])
    add_request(bench, "b", Prompt(token_ids=[3]), GREEDY, sink=sinks["b"])
    while bench.engine.has_work:
        bench.engine.step()
    assert {item.request_id for item in sinks["a"].items} == {"a"}
    for item, token in zip(sinks["a"].items, continued([1, 2], 3), strict=True):
        assert [part.token_ids for part in item.outputs] == [[token]] * n
        assert [part.index for part in item.outputs] == list(range(n))
    assert [item.finished for item in sinks["a"].items] == [False, False, True]
    assert [item.outputs[0].token_ids for item in sinks["b"].items] == [
        [token] for token in continued([3], 8)
    ]
    bench.assert_all_free()


def test_times_are_those_of_the_first_token_and_the_end() -> None:
    bench = make_bench(max_num_batched_tokens=4, max_num_seqs=4)
    bench.submit({"a": [1] * 10})
    bench.engine.step()
    assert bench.output("a").metrics.first_token_time is None  # a chunk gives no token
    metrics = bench.run()["a"].metrics
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time < metrics.finished_time
    bench.submit({"b": [1]})
    (aborted,) = bench.abort(["b"])
    assert aborted.metrics.first_token_time is None
    assert aborted.metrics.finished_time is not None
