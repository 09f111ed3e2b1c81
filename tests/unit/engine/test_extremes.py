"""Every field of `SamplingParams` at its extremes: served, or refused in a sentence at once."""

import math
from fractions import Fraction
from time import process_time
from typing import Any

import numpy as np
import pytest

from pyengine.errors import InvalidRequestError
from pyengine.sampling_params import SamplingParams
from tests.support.callers import FakeModel
from tests.support.fake_runner import VOCAB_SIZE
from tests.support.tokenizers import Fast, byte_level
from tests.support.without_torch import tensors

MILLION, HUGE = 10**6, 10**30
NUMBERS: list[Any] = [
    0, 1, -1, 2**31, 2**63, 2**64, -(2**63), MILLION, HUGE, -HUGE, 1e-300, -1e-300, 1e300, 5e-324,
    math.nan, math.inf, -math.inf, 0.1, True, None, "1", b"1", [1], (), {}, Fraction(1, 3),
    np.float32(0.5), np.float64("nan"), np.int8(1), np.uint64(2**64 - 1), np.bool_(True),
    *tensors(1, 0.5), 1j,
]  # fmt: skip
NUMBER_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
    "truncate_prompt_tokens",
)  # fmt: skip
LARGE: dict[str, Any] = {
    "stop": [f"no {at} such text" for at in range(10**5)],
    "stop_token_ids": range(MILLION),
    "bad_words": [f"word{at}" for at in range(10**4)],
    "logit_bias": {at: 1.0 for at in range(MILLION)},
    "allowed_token_ids": range(MILLION),
}
ODD: list[Any] = [
    "", [""], "a", [5], [-1], [VOCAB_SIZE], [HUGE], [1.5], [None], [[1]], 5, -1, math.nan, {},
    {1: 1}, {-1: 1.0}, {HUGE: 1.0}, {VOCAB_SIZE: 1.0}, {1: math.nan}, {1: math.inf}, {1: 1e300},
    {1: 1e-300}, {1: "a"}, {"1": 1.0}, {1: None}, ["\ud800"], ["\0"], "a" * 10**6, b"a",
    np.array([1, 2]), np.array([0.5]), *tensors([1, 2]), [True],
]  # fmt: skip


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    return FakeModel(
        monkeypatch,
        num_blocks=64,
        max_num_seqs=16,
        max_model_len=40,
        tokenizer=Fast(byte_level(260)),
    )


def served(model: FakeModel, **settings: Any) -> bool:
    """Whether it is; if it is not, that it was said in a sentence."""
    kept = {"max_tokens": 3, **settings}
    try:
        outputs = model.llm().generate([[1, 2, 3]], SamplingParams(**kept), use_tqdm=False)
    except InvalidRequestError as error:
        assert len(str(error)) < 2000, "a wall of text is no sentence"
        assert model.bench.runner.computed == []
        return False
    finally:
        model.bench.assert_all_free()
    (output,) = outputs
    assert output.finished
    assert output.error is None
    for each_output in output.outputs:
        assert all(0 <= token < VOCAB_SIZE for token in each_output.token_ids)
        assert each_output.finish_reason in ("stop", "length")
    return True


@pytest.mark.parametrize("name", NUMBER_FIELDS)
@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_a_number_is_served_or_refused(name: str, value: Any, model: FakeModel) -> None:
    served(model, **{name: value})


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:20])
def test_a_collection_is_served_or_refused(name: str, value: Any, model: FakeModel) -> None:
    served(model, **{name: value})


@pytest.mark.parametrize("name", LARGE)
def test_as_many_as_there_can_be(name: str, model: FakeModel) -> None:
    """In seconds, not in minutes."""
    began = process_time()
    assert served(model, **{name: LARGE[name]}) == (name in ("stop", "bad_words"))
    assert process_time() - began < 30


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**64 - 1, 2**63, np.int32(5), np.uint64(7)])
def test_a_seed_of_any_size_gives_the_same_again(seed: Any, model: FakeModel) -> None:
    params = SamplingParams(n=3, temperature=1.5, seed=seed, max_tokens=6, ignore_eos=True)
    llm = model.llm()
    first, again = (llm.generate([[1, 2]], params, use_tqdm=False)[0] for _ in range(2))
    assert [output.token_ids for output in first.outputs] == [
        output.token_ids for output in again.outputs
    ]
    assert len({tuple(output.token_ids) for output in first.outputs}) > 1


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-30, 1e-5])
def test_next_to_no_temperature_is_greedy(temperature: float, model: FakeModel) -> None:
    llm = model.llm()
    found = [
        llm.generate([[1, 2]], SamplingParams(temperature=item, max_tokens=6), use_tqdm=False)[0]
        for item in (0, temperature)
    ]
    assert found[0].outputs[0].token_ids == found[1].outputs[0].token_ids
