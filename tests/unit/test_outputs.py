import dataclasses

import pytest

from pyengine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def test_a_completion_is_finished_when_it_has_a_reason() -> None:
    growing = CompletionOutput(index=0, text="a", token_ids=[1])
    assert not growing.is_finished
    for reason in ("stop", "length", "abort"):
        assert dataclasses.replace(growing, finish_reason=reason).is_finished


def test_results_hold_what_vllm_users_read() -> None:
    output = RequestOutput(
        request_id="7",
        prompt=None,
        prompt_token_ids=[1, 2],
        prompt_logprobs=[None, {2: Logprob(-0.5, 1)}],
        outputs=[CompletionOutput(index=0, text="a", token_ids=[1], finish_reason="stop")],
        finished=True,
        num_cached_tokens=0,
        metrics=RequestMetrics(arrival_time=1.0),
    )
    assert output.outputs[0].stop_reason is None
    assert output.metrics.first_token_time is None
    assert output.metrics.num_preemptions == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.finished = False  # type: ignore[misc]
