"""Bias, barred stop tokens and penalties by numbers worked out by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.sampling.sampler import Adjustments
from pyengine.sampling.state import SamplingState
from pyengine.sampling_params import SamplingParams
from tests.support.logits import in_type

ROW = [2.0, -2.0, 4.0, -1.0, 0.5]
INF = float("inf")


def state(
    params: SamplingParams,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    stop_ids: tuple[int, ...] = (),
    bad_words: Sequence[tuple[int, ...]] = (),
) -> SamplingState:
    state = SamplingState(
        params, prompt, seed=0, vocab_size=len(ROW), stop_ids=stop_ids, bad_words=bad_words
    )
    for token in output:
        state.append(token)
    return state


def floats(rows: Any) -> Any:
    return np.array(rows, dtype=np.float32)


def adjusted_logits(logits: Any, states: Sequence[SamplingState]) -> Any:
    return Adjustments(states).apply(logits, [state.num_output for state in states])


CASES = {
    "repetition divides above 0 and multiplies below, in prompt and output": (
        state(SamplingParams(repetition_penalty=2), prompt=(0, 1, 1), output=(3, 3)),
        [1.0, -4.0, 4.0, -2.0, 0.5],
    ),
    "presence counts once, and not the prompt": (
        state(SamplingParams(presence_penalty=1.5), prompt=(0,), output=(1, 1, 2)),
        [2.0, -3.5, 2.5, -1.0, 0.5],
    ),
    "frequency counts each time, and not the prompt": (
        state(SamplingParams(frequency_penalty=0.5), prompt=(0,), output=(1, 1, 2)),
        [2.0, -3.0, 3.5, -1.0, 0.5],
    ),
    "negative penalties reward": (
        state(SamplingParams(presence_penalty=-1, frequency_penalty=-0.5), output=(1, 1)),
        [2.0, 0.0, 4.0, -1.0, 0.5],
    ),
    "repetition before the others": (
        state(
            SamplingParams(repetition_penalty=2, presence_penalty=1, frequency_penalty=0.25),
            prompt=(4,),
            output=(2, 2),
        ),
        [2.0, -2.0, 4.0 / 2 - 1 - 0.5, -1.0, 0.25],
    ),
    "bias is added": (
        state(SamplingParams(logit_bias={0: -100.0, 4: 3.0})),
        [-98.0, -2.0, 4.0, -1.0, 3.5],
    ),
    "bias before repetition": (
        state(SamplingParams(logit_bias={1: 6.0}, repetition_penalty=2), prompt=(1,)),
        [2.0, 2.0, 4.0, -1.0, 0.5],
    ),
    "stop tokens are barred, whatever the bias": (
        state(
            SamplingParams(min_tokens=2, stop_token_ids=[0], logit_bias={2: 50.0}),
            output=(1,),
            stop_ids=(2,),
        ),
        [-INF, -2.0, -INF, -1.0, 0.5],
    ),
    "stop tokens are free after min_tokens": (
        state(SamplingParams(min_tokens=2), output=(1, 1), stop_ids=(2,)),
        ROW,
    ),
    "only allowed tokens are left": (
        state(SamplingParams(allowed_token_ids=[1, 3, 3], logit_bias={0: 9.0, 1: 1.0})),
        [-INF, -1.0, -INF, -1.0, -INF],
    ),
    "a bad word of one token is barred": (
        state(SamplingParams(logit_bias={2: 9.0}), bad_words=[(2,), (4, 0)]),
        [2.0, -2.0, -INF, -1.0, 0.5],
    ),
    "a bad word may not be completed": (
        state(SamplingParams(), prompt=(3,), output=(1, 4), bad_words=[(4, 0), (1, 4, 2), (3, 1)]),
        [-INF, -2.0, -INF, -1.0, 0.5],
    ),
    "a bad word that has not begun bars nothing": (
        state(SamplingParams(), prompt=(4, 4), output=(4,), bad_words=[(1, 4, 2), (4, 4, 0)]),
        ROW,
    ),
    "bad words outside the vocabulary bar nothing": (
        state(SamplingParams(), output=(4,), bad_words=[(7,), (4, 5), (4, -1), (-1,)]),
        ROW,
    ),
    "nothing asked": (state(SamplingParams(), prompt=(0,), output=(1,)), ROW),
}


@pytest.mark.parametrize("name", CASES)
def test_by_hand(name: str) -> None:
    actual, expected = CASES[name]
    np.testing.assert_allclose(adjusted_logits(floats([ROW]), [actual])[0], expected, rtol=1e-6)


def test_a_batch_of_all_cases_at_once() -> None:
    logits = floats([ROW] * len(CASES))
    states, expected = zip(*CASES.values(), strict=True)
    np.testing.assert_allclose(adjusted_logits(logits, states), floats(expected), rtol=1e-6)
    assert logits.tolist() == [ROW] * len(CASES), "the model's logits were written to"


def test_logits_that_nothing_changes_are_passed_on() -> None:
    logits = in_type(floats([ROW]), "bfloat16")
    assert adjusted_logits(logits, [state(SamplingParams())]) is logits


def test_low_precision_and_strided_logits_are_computed_in_float32() -> None:
    logits = np.asfortranarray(in_type(floats([ROW, ROW]), "bfloat16"))
    states = [state(SamplingParams(logit_bias={0: 0.001})), state(SamplingParams())]
    got = adjusted_logits(logits, states)
    assert got.dtype == np.float32
    assert got[0, 0].item() == pytest.approx(2.001)
    assert got[1].tolist() == ROW


def test_tokens_beyond_the_requests_vocabulary_stay() -> None:
    logits = floats([[*ROW, 9.0]] * 2)
    states = [state(SamplingParams(logit_bias={4: 1.0})) for _ in range(2)]
    assert adjusted_logits(logits, states)[:, 4:].tolist() == [[1.5, 9.0]] * 2


def test_a_stop_token_outside_the_vocabulary_bars_nothing_in_other_rows() -> None:
    params = SamplingParams(min_tokens=1)
    outside = [state(params, stop_ids=(len(ROW) + 1, -2)) for _ in range(3)]
    assert adjusted_logits(floats([ROW] * 3), outside).tolist() == [ROW] * 3


@pytest.mark.parametrize("penalty", [1.2e-38, 1e38])
def test_the_largest_bias_and_penalty_give_no_nan(penalty: float) -> None:
    params = SamplingParams(
        logit_bias={0: 3.4e38, 1: -3.4e38, 2: 3.4e38}, repetition_penalty=penalty, min_tokens=1
    )
    sampling_state = state(params, prompt=(0, 1, 2, 3, 4), stop_ids=(2, 4))
    got = adjusted_logits(floats([[3.4e38, -3.4e38, 3.4e38, 0.0, 1.0]]), [sampling_state])[
        0
    ].tolist()
    assert got[2] == got[4] == -INF
    assert all(value < INF for value in got)  # false for NaN too


def one_by_one(
    logits: Any, sampling_state: SamplingState, bad_words: list[tuple[int, ...]]
) -> list[float]:
    """The changes to one row, token by token."""
    row, params, output = logits.tolist(), sampling_state.params, sampling_state.token_ids
    for token in range(len(row)):
        allowed = params.allowed_token_ids
        completes = any(
            token == word[-1] and (len(word) == 1 or output[1 - len(word) :] == list(word[:-1]))
            for word in bad_words
        )
        is_early = len(output) < params.min_tokens and token in params.stop_token_ids
        if (allowed is not None and token not in allowed) or completes or is_early:
            row[token] = -INF
            continue
        row[token] += (params.logit_bias or {}).get(token, 0.0)
        times = output.count(token)
        if times:  # these requests have no prompt
            factor = params.repetition_penalty
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        row[token] -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
    return row


tokens = st.integers(0, len(ROW) - 1)
requests = st.tuples(
    st.builds(
        SamplingParams,
        repetition_penalty=st.sampled_from([1.0, 0.5, 2.0]),
        presence_penalty=st.sampled_from([0.0, 1.5]),
        frequency_penalty=st.sampled_from([0.0, -0.5]),
        logit_bias=st.none() | st.dictionaries(tokens, st.sampled_from([-3.0, 0.5, 100.0])),
        min_tokens=st.integers(0, 3),
        stop_token_ids=st.lists(st.integers(0, 1), max_size=2),
        allowed_token_ids=st.none() | st.lists(tokens, min_size=1).map(lambda ids: [*ids, 4]),
    ),
    st.lists(tokens, max_size=6),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=3),
)


@given(batch=st.lists(requests, min_size=1, max_size=6), steps=st.integers(1, 3))
@settings(max_examples=300)
def test_batches_against_one_token_at_a_time(batch: list[Any], steps: int) -> None:
    states = [
        state(params, output=tuple(output), bad_words=words) for params, output, words in batch
    ]
    adjustments = Adjustments(states)
    for step in range(steps):
        logits = np.roll(floats([ROW] * len(states)), step, 1)
        got = adjustments.apply(logits, np.array([item.num_output for item in states]))
        expected = [
            one_by_one(row, item, words)
            for row, item, (_, _, words) in zip(logits, states, batch, strict=True)
        ]
        np.testing.assert_allclose(got, floats(expected), rtol=1e-5, atol=1e-6)
        for item in states:
            item.append((7 * step + item.num_output) % len(ROW))


def test_ids_beyond_the_logits_are_refused() -> None:
    sampling_state = state(SamplingParams(logit_bias={4: 1.0}))
    with pytest.raises(ValueError, match="token ids 4 to 4 in rows of 4 logits"):
        adjusted_logits(floats([ROW[:4], ROW[:4]]), [sampling_state, sampling_state])
