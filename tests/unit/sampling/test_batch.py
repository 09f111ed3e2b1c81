"""A batch that is reused gives what new ones give."""

import numpy as np
import pytest

from pyengine.sampling.sampler import SamplingBatch, sample
from pyengine.sampling.state import SamplingState
from pyengine.sampling_params import SamplingParams
from tests.support.logits import normal

VOCAB = 200
MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.5),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.5, top_p=0.8, logprobs=2),
    SamplingParams(temperature=1, min_tokens=3, stop_token_ids=[7]),
    SamplingParams(temperature=0, logit_bias={5: 100.0}),
]


def states(params: list[SamplingParams]) -> list[SamplingState]:
    return [SamplingState(param, [1], seed=at, vocab_size=VOCAB) for at, param in enumerate(params)]


def test_a_batch_follows_its_requests_from_step_to_step() -> None:
    random = np.random.default_rng(0)
    kept, fresh = states(MIXED), states(MIXED)
    batch = SamplingBatch(kept)
    for _ in range(8):
        logits = random.standard_normal((len(MIXED), VOCAB), dtype=np.float32)
        ours, expected = sample(logits, batch).wait(), sample(logits, fresh).wait()
        assert ours.token_ids.tolist() == expected.token_ids.tolist()
        assert ours.logprobs == expected.logprobs
        for entry, other, token in zip(kept, fresh, ours.token_ids.tolist(), strict=True):
            assert entry.append(token) == other.append(token) == entry.num_output


def test_positions_stand_for_tokens_that_the_states_do_not_have_yet() -> None:
    known, pending = states(MIXED), states(MIXED)
    for item in known:
        item.append(3)
        item.append(3)
    for number in (0, 2, 3, 4, 5):  # the penalty needs the tokens themselves
        logits = normal(number, 1, VOCAB)
        expected = sample(logits, [known[number]]).wait()
        assert sample(logits, [pending[number]], [2]).wait().token_ids == expected.token_ids
    assert [item.depends_on_output for item in known] == [
        False,
        True,
        False,
        False,
        False,
        False,
    ]
    assert SamplingBatch(known).depends_on_output
    assert not SamplingBatch(known[2:]).depends_on_output


def test_what_is_known_of_a_batch() -> None:
    batch = SamplingBatch(states(MIXED))
    assert (len(batch.states), batch.vocab_size) == (6, VOCAB)
    assert batch.draws is not None
    assert batch.draws.rows.tolist() == [2, 3, 4]
    assert SamplingBatch(states(MIXED[:2])).draws is None
    assert batch.num_logprobs == {3: 2}
    assert batch.adjustments is not None
    assert SamplingBatch(states([MIXED[0], MIXED[2]])).adjustments is None


def test_settings_that_no_row_asks_for_are_left_out() -> None:
    torch = pytest.importorskip("torch", reason="tensors are the settings")
    draws = SamplingBatch(states([MIXED[2], SamplingParams(top_k=9)])).draws
    assert draws is not None
    settings = draws.columns(slice(0, 2), torch.device("cpu"))
    assert settings.min_p is None
    assert settings.top_p is None
    assert settings.top_k is not None
    assert (settings.top_k.flatten().tolist(), settings.largest_k) == ([5, 9], 9)
    assert draws.columns(slice(0, 2), torch.device("cpu")) is settings
