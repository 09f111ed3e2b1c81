"""The vectorised sampler against one row at a time in plain Python."""

import math
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.errors import BrokenLogitsError
from pyengine.sampling.sampler import sample
from pyengine.sampling.state import SamplingState, uniforms
from pyengine.sampling_params import SamplingParams
from pyengine.utils.dtypes import widened
from tests.support.logits import in_type, normal

VOCAB = 1200  # more than the head in which a nucleus is looked for first


def floats(rows: list[Any]) -> Any:
    return np.array(rows, dtype=np.float32)


def state(
    params: SamplingParams, *, seed: int = 0, num_output: int = 0, vocab_size: int = VOCAB
) -> SamplingState:
    state = SamplingState(params, (), seed=seed, vocab_size=vocab_size)
    for _ in range(num_output):
        state.append(0)
    return state


def kept_weights(row: list[float], params: SamplingParams) -> dict[int, float]:
    """Token ids that the filters leave, with their weights; equal logits stay or go alike."""
    peak = max(row)
    weights = {i: math.exp((x - peak) / params.temperature) for i, x in enumerate(row)}
    weights = {i: w for i, w in weights.items() if w >= params.min_p}
    if 0 < params.top_k < len(row):
        floor = sorted(row, reverse=True)[params.top_k - 1]
        weights = {i: w for i, w in weights.items() if row[i] >= floor}
    if params.top_p < 1:
        target, reached, floor = params.top_p * math.fsum(weights.values()), 0.0, -math.inf
        for i in sorted(weights, key=lambda i: -row[i]):
            reached += weights[i]
            floor = row[i]
            if reached >= target:
                break
        weights = {i: w for i, w in weights.items() if row[i] >= floor}
    return weights


def reference(row: list[float], params: SamplingParams, seed: int, position: int) -> int:
    if params.is_greedy:
        return row.index(max(row))
    weights = kept_weights(row, params)
    target = float(uniforms([seed], [position])[0]) * math.fsum(weights.values())
    reached = 0.0
    for token in sorted(weights):
        reached += weights[token]
        if reached > target:
            return token
    raise AssertionError("the draw lies beyond the distribution")


settings_of_a_row = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, -1, 1, 3, 50, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


@given(
    batch=st.lists(settings_of_a_row, min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.2, 1.0, 5.0]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
@settings(max_examples=120, deadline=None)
def test_every_row_as_if_it_were_alone(
    batch: list[SamplingParams], seed: int, scale: float, dtype: str
) -> None:
    logits = in_type(normal(seed, len(batch), VOCAB) * np.float32(scale), dtype)
    states = [state(params, seed=seed + i, num_output=i) for i, params in enumerate(batch)]
    together = sample(logits, states).wait().token_ids.tolist()
    alone = [int(sample(logits[[i]], [item]).wait().token_ids[0]) for i, item in enumerate(states)]
    assert together == alone
    rows = widened(logits).tolist()
    assert together == [
        reference(row, params, seed + i, i)
        for i, (row, params) in enumerate(zip(rows, batch, strict=True))
    ]


def test_the_order_of_the_batch_makes_no_difference() -> None:
    logits = normal(0, 40, VOCAB)
    choices = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_k=20),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.9999, temperature=3),
    ]
    states = [state(choices[i % 5], seed=i) for i in range(40)]
    expected = sample(logits, states).wait().token_ids
    order = np.random.default_rng(0).permutation(40)
    shuffled = sample(logits[order], [states[i] for i in order.tolist()]).wait().token_ids
    assert np.array_equal(shuffled, expected[order])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5, top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=2, min_p=0.3),
        SamplingParams(top_k=6, top_p=0.9, min_p=0.02),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    row = [0.0, 2.0, -1.0, 1.0, 1.0, -8.0, 0.5, 1.5]
    count = 20_000
    states = [state(params, seed=seed, vocab_size=len(row)) for seed in range(count)]
    logits = np.tile(np.array(row, dtype=np.float32), (count, 1))
    drawn = Counter(sample(logits, states).wait().token_ids.tolist())
    weights = kept_weights(row, params)
    assert set(drawn) <= set(weights)
    total = math.fsum(weights.values())
    chi_square = sum(
        (drawn[i] - count * w / total) ** 2 / (count * w / total) for i, w in weights.items()
    )
    assert chi_square < 24.3  # at most 7 degrees of freedom, p = 0.001


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_a_number_on_a_border_belongs_to_the_token_above(
    monkeypatch: pytest.MonkeyPatch, number: float, token: int
) -> None:
    monkeypatch.setattr("pyengine.sampling.sampler.uniforms", lambda *_args: np.array([number]))
    logits = floats([[-1.0, 2.0, -1.0, 2.0, -1.0]])  # top-k leaves the tokens 1 and 3
    sampling_state = state(SamplingParams(top_k=2), vocab_size=5)
    assert int(sample(logits, [sampling_state]).wait().token_ids[0]) == token


def test_equal_logits_at_the_limit_of_top_k_all_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for vocab_size in (6, 6000):
        logits = np.zeros((1, vocab_size), dtype=np.float32)
        logits[0, [1, 2, 4]] = 5, 6, 5
        tokens = set()
        for number in np.linspace(0, 0.999, 50):
            monkeypatch.setattr(
                "pyengine.sampling.sampler.uniforms", lambda *_, u=number: np.array([u])
            )
            sampling_state = state(SamplingParams(top_k=2), vocab_size=vocab_size)
            tokens.add(int(sample(logits, [sampling_state]).wait().token_ids[0]))
        assert tokens == {1, 2, 4}


def test_positions_of_one_request_follow_the_distribution_too() -> None:
    sampling_state = state(SamplingParams(seed=11), seed=11, vocab_size=2)
    ones = 0
    for _ in range(4000):
        logits = floats([[0.0, math.log(3)]])
        token = int(sample(logits, [sampling_state]).wait().token_ids[0])
        sampling_state.append(token)
        ones += token
    assert abs(ones / 4000 - 0.75) < 0.025


def test_a_state_made_again_goes_on_where_it_was() -> None:
    logits = normal(0, 1, VOCAB)
    first, second = (state(SamplingParams(), seed=5, num_output=9) for _ in range(2))
    assert sample(logits, [first]).wait().token_ids == sample(logits, [second]).wait().token_ids
    assert first.num_output == 9, "the sampler must leave the state alone"


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = np.zeros((3, VOCAB), dtype=np.float32)
    logits[0, [700, 900]] = 1
    logits[1, [3, 4, 1199]] = 2
    logits = in_type(logits, "bfloat16")
    assert sample(logits, [state(SamplingParams(temperature=0))] * 3).wait().token_ids.tolist() == [
        700,
        3,
        0,
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_greedy_rows_of_every_precision(dtype: str) -> None:
    logits = in_type(normal(0, 11, VOCAB) * 2, dtype)
    got = sample(logits, [state(SamplingParams(temperature=0))] * 11).wait().token_ids.tolist()
    assert got == [row.index(max(row)) for row in widened(logits).tolist()]
    wide = np.asfortranarray(logits)  # another order of the same in memory
    assert (
        sample(wide, [state(SamplingParams(temperature=0))] * 11).wait().token_ids.tolist() == got
    )


def test_a_greedy_batch_neither_sorts_nor_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_args: object) -> None:
        raise AssertionError("a greedy batch drew")

    greedy = [state(SamplingParams(temperature=0, top_k=3, top_p=0.5)) for _ in range(2)]
    monkeypatch.setattr("pyengine.sampling.sampler.draw", forbidden)
    assert sample(np.eye(2, VOCAB, dtype=np.float32), greedy).wait().token_ids.tolist() == [0, 1]
    with pytest.raises(AssertionError, match="drew"):
        sample(np.eye(2, VOCAB, dtype=np.float32), [greedy[0], state(SamplingParams())]).wait()


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e30])
def test_extreme_temperatures_stay_in_range(temperature: float) -> None:
    logits = floats([[1.0, 3.0, 2.0, -1e30, 3.4e38]] * 50)
    states = [
        state(SamplingParams(temperature=temperature), seed=i, vocab_size=5) for i in range(50)
    ]
    drawn = set(sample(logits, states).wait().token_ids.tolist())
    assert drawn == {4} if temperature < 1 else drawn <= set(range(5))


def test_a_barred_token_is_never_drawn() -> None:
    params = SamplingParams(min_tokens=1, temperature=5.0, top_k=2)
    states = [
        SamplingState(params, (), seed=seed, vocab_size=3, stop_ids=[1]) for seed in range(200)
    ]
    drawn = sample(floats([[0.0, 50.0, 0.0]] * 200), states).wait().token_ids
    assert set(drawn.tolist()) == {0, 2}


EVERY_WAY = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(top_p=0.9, top_k=7),
    SamplingParams(temperature=0, logit_bias={3: 1.0}),
    SamplingParams(min_p=0.5, presence_penalty=1.0),
]


@pytest.mark.parametrize("params", EVERY_WAY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_without_a_choice_are_named(params: SamplingParams, dtype: str) -> None:
    logits = normal(0, 6, VOCAB)
    logits[1] = math.nan
    logits[4] = -math.inf
    logits[5, 100] = math.nan
    logits = in_type(logits, dtype)
    with pytest.raises(BrokenLogitsError, match="in 3 of 6 rows, the first of which is row 1") as e:
        sample(logits, [state(params)] * 6).wait()
    assert e.value.rows == (1, 4, 5)
    assert pickle.loads(pickle.dumps(e.value)).rows == (1, 4, 5)
    logits[1] = logits[4] = logits[5] = 0
    assert len(sample(logits, [state(params)] * 6).wait().token_ids) == 6


def test_nothing_waits_to_see_whether_a_row_is_broken() -> None:
    pending = sample(np.full((2, VOCAB), math.nan, dtype=np.float32), [state(SamplingParams())] * 2)
    assert pending.token_ids.shape == (2,)
    with pytest.raises(BrokenLogitsError):
        pending.wait()


@pytest.mark.parametrize("params", EVERY_WAY)
def test_an_infinite_logit_is_chosen(params: SamplingParams) -> None:
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, 70] = math.inf
    assert sample(logits, [state(params)]).wait().token_ids.tolist() == [70]


def test_a_request_that_bad_words_leave_no_token_fails_alone() -> None:
    params = SamplingParams(allowed_token_ids=[3])
    stuck = SamplingState(params, (), seed=0, vocab_size=VOCAB, bad_words=[(3, 3)])
    stuck.append(3)
    with pytest.raises(BrokenLogitsError) as caught:
        sample(np.zeros((2, VOCAB), dtype=np.float32), [state(SamplingParams()), stuck]).wait()
    assert caught.value.rows == (1,)


def test_logprobs_are_the_models_own_and_only_for_those_who_ask() -> None:
    row = floats([0.0, 1.0, 2.0])
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logprobs=1, logit_bias={0: 10.0}),
        SamplingParams(temperature=0.1, logprobs=0),
        SamplingParams(temperature=0, logprobs=3),
        SamplingParams(temperature=0, logprobs=-1),
    ]
    states = [state(p, vocab_size=3) for p in params]
    sampled = sample(np.tile(row, (5, 1)), states).wait()
    expected = (row - np.log(np.exp(row).sum())).tolist()
    assert sampled.token_ids.tolist() == [2, 0, 2, 2, 2]
    nothing, biased, bare, all_three, all_requests = sampled.logprobs
    assert nothing is None
    assert biased is not None
    assert (biased.token_id, biased.rank, biased.top_ids) == (0, 3, (2,))
    assert biased.logprob == pytest.approx(expected[0])
    assert biased.top_logprobs == pytest.approx([expected[2]])
    assert bare is not None
    assert (bare.rank, bare.top_ids) == (1, ())
    assert all_three is not None
    assert all_three.top_logprobs == pytest.approx(expected[::-1])
    assert all_requests == all_three


def test_a_top_k_of_more_than_the_vocabulary_is_no_limit() -> None:
    logits = normal(0, 2, VOCAB)
    for top_p in (1.0, 0.9):
        every = [state(SamplingParams(top_p=top_p, top_k=k), seed=3) for k in (2**63, 10**30)]
        none = [state(SamplingParams(top_p=top_p), seed=3)] * 2
        assert np.array_equal(
            sample(logits, every).wait().token_ids, sample(logits, none).wait().token_ids
        )


def test_rows_and_requests_must_correspond() -> None:
    with pytest.raises(ValueError, match=r"\(2, 1200\) for 1 requests"):
        sample(np.zeros((2, VOCAB), dtype=np.float32), [state(SamplingParams())]).wait()
    with pytest.raises(ValueError, match=r"logits of 1199 tokens .* vocabulary of 1200"):
        sample(np.zeros((1, VOCAB - 1), dtype=np.float32), [state(SamplingParams())]).wait()


def test_no_rows_no_tokens() -> None:
    sampled = sample(np.zeros((0, VOCAB), dtype=np.float32), []).wait()
    assert sampled.token_ids.shape == (0,)
    assert sampled.token_ids.dtype == np.int64
    assert sampled.logprobs == []


def test_where_nothing_is_sampled_the_tokens_are_on_the_device_all_the_same():
    """Otherwise that step would have no event to wait for: it is recorded on the device."""
    torch = pytest.importorskip("torch", reason="a device without numbers")
    pending = sample(torch.empty(0, 8, device="meta"), [])
    assert pending.token_ids.device.type == "meta"
    assert len(pending.token_ids) == 0
