"""The operations on arrays against those on tensors: the same requests, the same logits."""

import math
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest

from pyengine.cpu import limit_threads
from pyengine.errors import BrokenLogitsError
from pyengine.sampling import sampler
from pyengine.sampling.operations import largest
from pyengine.sampling.sampler import Sampled, SamplingBatch, draw, sample
from pyengine.sampling.state import SamplingState
from pyengine.sampling.token_masks import MaskFiller, TokenMasks
from pyengine.sampling_params import SamplingParams
from tests.support.logits import KINDS, batch_of, in_type, make_logits, normal, tensor_of

torch = pytest.importorskip("torch", reason="tensors are the reference")

TOLERANCE = 1e-5


class Mask:
    """Allows every third token; stands for a `TokenMatcher`."""

    seconds_per_mask = 1e-5
    base = None
    error = ""

    def may_come(self, token: int) -> bool:
        return token % 3 == 0

    def fill(self, masks: Any, row: int, begin: float) -> float:
        bits = np.zeros(masks.shape[1] * 32, dtype=np.uint8)
        bits[::3] = 1
        masks[row] = np.packbits(bits, bitorder="little").view(np.int32)
        return begin


def random_params(random: np.random.Generator, vocab_size: int) -> SamplingParams:
    """A request with a few settings of every kind."""

    def chosen_from(*values: Any) -> Any:
        return values[random.integers(len(values))]

    ids = random.integers(vocab_size, size=3).tolist()
    return SamplingParams(
        temperature=chosen_from(0, 0, 0.1, 0.8, 1.0, 3.0, 1e-30, 1e30),
        top_k=chosen_from(0, 0, 1, 2, 50, 64, 400, 2**40),
        top_p=chosen_from(1.0, 1.0, 0.9, 0.5, 0.999999, 1e-9),
        min_p=chosen_from(0.0, 0.0, 0.05, 0.9, 1.0, 1e-12),
        logprobs=chosen_from(None, 0, 1, min(5, vocab_size), min(40, vocab_size)),
        logit_bias=chosen_from(None, None, {ids[0]: 2.5, ids[1]: -9.0}),
        frequency_penalty=chosen_from(0.0, 0.0, 0.5),
        repetition_penalty=chosen_from(1.0, 1.0, 1.3),
        min_tokens=chosen_from(0, 0, 9),
        stop_token_ids=[ids[2] % (vocab_size - 1)] if vocab_size > 1 else None,
    )


def random_states(random: np.random.Generator, count: int, vocab_size: int) -> list[SamplingState]:
    states = []
    for _ in range(count):
        params = random_params(random, vocab_size)
        seed, prompt = int(random.integers(2**40)), random.integers(vocab_size, size=4).tolist()
        states.append(SamplingState(params, prompt, seed=seed, vocab_size=vocab_size))
        for token in random.integers(vocab_size, size=random.integers(6)).tolist():
            states[-1].append(token)
    return states


def compare(actual: Sampled, expected: Sampled) -> None:
    """Equal tokens, ranks and most probable ids; close log-probabilities."""
    assert isinstance(actual.token_ids, np.ndarray)
    assert actual.token_ids.dtype == expected.token_ids.dtype == np.int64
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    for entry, other in zip(actual.logprobs, expected.logprobs, strict=True):
        if entry is None or other is None:
            assert entry is other
            continue
        assert (entry.token_id, entry.rank) == (other.token_id, other.rank)
        assert entry.top_ids == other.top_ids
        figures = [entry.logprob, *entry.top_logprobs]
        np.testing.assert_allclose(
            figures, [other.logprob, *other.top_logprobs], rtol=0, atol=TOLERANCE
        )


def test_ten_thousand_requests_have_the_same_tokens_and_log_probabilities() -> None:
    random, seen = np.random.default_rng(0), Counter[str]()
    for number in range(150):
        vocab_size, kind = (2, 40, 1025, 3001)[number % 4], KINDS[number % len(KINDS)]
        states = random_states(random, 70, vocab_size)
        logits = make_logits(kind, len(states), vocab_size, number)
        before = logits.copy()
        actual = sample(logits, SamplingBatch(states)).wait()
        assert np.array_equal(logits, before), "the model's logits were written to"
        compare(actual, sample(torch.from_numpy(logits), SamplingBatch(states)).wait())
        seen["rows"] += len(states)
        seen["drawn"] += sum(state.is_drawn for state in states)
        seen["changed"] += sum(state.may_change_logits for state in states)
        seen["reported"] += sum(entry is not None for entry in actual.logprobs)
    assert seen["rows"] >= 10_000
    assert min(seen["drawn"], seen["changed"], seen["reported"]) >= 4000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("vocab_size", [1, 40, 49_152, 262_144])
def test_every_element_type_and_large_vocabularies(vocab_size: int, dtype: str) -> None:
    random = np.random.default_rng(vocab_size)
    for kind in KINDS:
        params = [random_params(random, vocab_size) for _ in range(5)]
        if vocab_size == 1:
            params = [SamplingParams(temperature=param.temperature, logprobs=1) for param in params]
        batch = batch_of(params, vocab_size)
        logits = in_type(make_logits(kind, len(params), vocab_size, 7), dtype)
        compare(sample(logits, batch).wait(), sample(tensor_of(logits), batch).wait())


def test_rows_of_two_vocabularies() -> None:
    random = np.random.default_rng(3)
    states = [*random_states(random, 20, 90), *random_states(random, 20, 120)]
    logits = make_logits("peaked", 40, 120, 0)
    logits[:, 90:] -= 100  # padding for the first ones
    compare(sample(logits, states).wait(), sample(torch.from_numpy(logits), states).wait())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masks(dtype: str, temperature: float) -> None:
    logits = in_type(make_logits("ties", 30, 200, 1), dtype)
    batch = batch_of([SamplingParams(temperature=temperature, logprobs=2)] * 30, 190)
    results = []
    for kind in (logits, tensor_of(logits)):
        masks = TokenMasks(
            {row: Mask() for row in range(0, 30, 2)},  # type: ignore[misc]
            190,
            MaskFiller(),
        )
        results.append(sample(kind, batch, [0] * 30, masks).wait())
    compare(*results)
    assert {token % 3 for token in results[0].token_ids[::2].tolist()} == {0}
    assert {token % 3 for token in results[0].token_ids[1::2].tolist()} == {0, 1, 2}


@pytest.mark.parametrize("number", [0.0, 1 - 1e-12, 1 - 2**-53])
@pytest.mark.parametrize("kind", KINDS)
def test_the_ends_of_the_random_numbers(
    kind: str, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "uniforms", lambda seeds, _: np.full(len(seeds), number))
    params = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for temperature, top_k, top_p, min_p in product(
            (0.5, 2.0), (0, 3, 64), (1.0, 0.8), (0.0, 0.1)
        )
    ]
    logits = make_logits(kind, len(params), 2000, 2)
    batch = batch_of(params, 2000)
    actual = sample(logits, batch).wait()
    if number < 1 - 2**-53:
        compare(actual, sample(torch.from_numpy(logits), batch).wait())
    for token, row, param in zip(actual.token_ids.tolist(), logits, params, strict=True):
        weights = np.exp((row.astype(np.float64) - row.max()) / param.temperature)
        assert weights[token] >= param.min_p
        assert param.top_k == 0 or (row > row[token]).sum() < param.top_k
        skipped = weights[:token] if number == 0 else weights[token + 1 :]
        if param.top_k == 0 and param.top_p == 1 and param.min_p == 0:
            assert skipped.sum() <= 2e-12 * weights.sum()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_without_a_choice(dtype: str) -> None:
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(temperature=1),
        SamplingParams(temperature=1, top_k=5, top_p=0.9),
        SamplingParams(temperature=1, min_p=0.1, logit_bias={3: 1.0}),
    ):
        logits = normal(0, 6, 1200)
        logits[1], logits[4], logits[5, 100], logits[2, 7] = math.nan, -math.inf, math.nan, math.inf
        logits = in_type(logits, dtype)
        batch = batch_of([params] * 6, 1200)
        for kind in (logits, tensor_of(logits)):
            with pytest.raises(BrokenLogitsError) as caught:
                sample(kind, batch).wait()
            assert caught.value.rows == (1, 4, 5)
        good = logits[[0, 2, 3]]
        compare(
            sample(good, batch_of([params] * 3, 1200)).wait(),
            sample(tensor_of(good), batch_of([params] * 3, 1200)).wait(),
        )
        assert int(sample(good, batch_of([params] * 3, 1200)).wait().token_ids[1]) == 7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_largest_logits(dtype: str) -> None:
    logits = in_type(make_logits("ties", 50, 3001, 4), dtype)
    for kind in (logits, logits[::2], np.asfortranarray(logits), logits[:, 5:-7]):
        tensor = tensor_of(np.ascontiguousarray(kind))
        assert largest(kind).tolist() == largest(tensor).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_make_no_difference(dtype: str) -> None:
    logits = in_type(make_logits("peaked", 19, 32_000, 0), dtype)
    kinds: list[dict[str, Any]] = [
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"temperature": 3.0, "top_p": 0.99},
    ]
    batch = batch_of([SamplingParams(**kinds[row % 4], logprobs=3) for row in range(19)], 32_000)
    positions, results = np.arange(19), []
    for num_threads in (1, 2, 3):
        before = limit_threads(num_threads)
        results.append(sample(logits, batch, positions).wait())
        limit_threads(before)
    assert batch.draws is not None
    expected = draw(tensor_of(logits), batch.draws, positions)
    for result in results:
        assert result.token_ids.tolist() == expected.tolist()
        assert result.logprobs == results[0].logprobs
