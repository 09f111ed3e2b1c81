"""Log-probabilities by Triton kernels: tokens, ranks and figures as on the CPU."""

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import strategies as st

from pyengine.sampling import tensor_operations
from pyengine.sampling.logprobs import PendingLogprobs, TokenLogprobs
from pyengine.sampling.sampler import sample
from pyengine.sampling_params import SamplingParams
from tests.support.cases import check_cases
from tests.support.kernels import LoadedBytes, in_compiler, in_interpreter
from tests.support.logits import batch_of
from tests.unit.kernels.test_draw import make_logits


def by_kernels(*arguments: object) -> list[TokenLogprobs]:
    with patch.object(tensor_operations, "has_kernels", lambda _device: True):
        return PendingLogprobs(*arguments).result()  # type: ignore[arg-type]


def assert_same(got: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    """Equal except for the last bit of a logarithm."""
    for actual, wanted_value in zip(got, expected, strict=True):
        assert replace(actual, logprob=0, top_logprobs=()) == replace(
            wanted_value, logprob=0, top_logprobs=()
        )
        assert actual.logprob == pytest.approx(wanted_value.logprob, abs=8e-6)
        assert actual.top_logprobs == pytest.approx(wanted_value.top_logprobs, abs=8e-6)


def compare(top: list[int], kind: str, vocab_size: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = len(top)
    logits = make_logits(kind, count + 2, vocab_size, seed).to(dtype)
    logits[:, seed % vocab_size] = -0.0  # equal to 0
    tokens = torch.randint(vocab_size, (count,), generator=generator)
    top = [min(count, vocab_size) if count >= 0 else vocab_size for count in top]
    expected = PendingLogprobs(logits[1:-1], tokens, top).result()
    assert_same(by_kernels(logits[1:-1], tokens, top), expected)
    assert_same(by_kernels(logits, tokens, top, torch.arange(1, count + 1)), expected)


@pytest.mark.parametrize("count", [15, pytest.param(1000, marks=pytest.mark.soak)])
@in_interpreter
def test_log_probabilities_are_those_of_the_cpu(count: int) -> None:
    check_cases(
        compare,
        count,
        top=st.lists(st.sampled_from([0, 1, 5, 20, 300, -1]), min_size=1, max_size=3),
        kind=st.sampled_from(["peaked", "flat", "ties", "equal", "barred"]),
        vocab_size=st.sampled_from([2, 256, 257, 4097, 6001]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        seed=st.integers(0, 2**20),
    )


@in_interpreter
def test_chunks_of_rows() -> None:
    """In the interpreter: many rows, a few at a time, have the bits that each has alone."""
    logits = make_logits("ties", 30, 1000, 5).to(torch.bfloat16)
    tokens, top = torch.arange(30), [3] * 10 + [0] * 10 + [20] * 10
    whole = by_kernels(logits, tokens, top)
    with patch.object(tensor_operations, "_KERNEL_ELEMENTS", 7000):
        assert by_kernels(logits, tokens, top) == whole
    alone = [
        by_kernels(logits[row : row + 1], tokens[row : row + 1], top[row : row + 1])[0]
        for row in range(0, 30, 7)
    ]
    assert alone == whole[::7]


@in_interpreter
def test_some_rows_of_a_step() -> None:
    """In the interpreter: rows with log-probabilities beside others."""
    params = [SamplingParams(temperature=0, logprobs=2), SamplingParams(temperature=0)] * 3
    logits = make_logits("flat", 6, 700, 9)
    expected = sample(logits, batch_of(params, 700)).wait()
    with patch.object(tensor_operations, "has_kernels", lambda _device: True):
        got = sample(logits, batch_of(params, 700)).wait()
    assert [entry is None for entry in got.logprobs] == [False, True] * 3
    assert_same(
        [entry for entry in got.logprobs if entry], [entry for entry in expected.logprobs if entry]
    )


@in_interpreter
def test_rows_without_a_distribution() -> None:
    """In the interpreter: rows without a distribution end, and have no figures."""
    logits = torch.randn(3, 2000)
    logits[0, 1500] = math.nan
    logits[1] = -math.inf
    logits[2, 3] = math.inf
    entries = by_kernels(logits, torch.tensor([0, 1, 2]), [5] * 3)
    assert [len(entry.top_ids) for entry in entries] == [5] * 3
    assert all(not math.isfinite(entry.logprob) for entry in entries)


@in_interpreter
def test_logits_are_read_once() -> None:
    """In the interpreter: the logits are read once, and a tenth of them again at most."""
    vocab_size = 151_936
    logits = make_logits("flat", 1, vocab_size, 1).to(torch.bfloat16)
    whole = vocab_size * 2
    for count in (0, 1, 20):
        with LoadedBytes(logits) as loaded:
            by_kernels(logits, torch.tensor([5]), [count])
        assert whole <= loaded.count <= (1.2 if count else 1.001) * whole, loaded.count / whole


@in_compiler
def test_the_kernel_is_not_compiled_again_for_another_number_of_tokens() -> None:
    from pyengine.kernels.best_tokens import _best_kernel

    free = {parameter.name for parameter in _best_kernel.params if parameter.do_not_specialize}
    assert free == {"num_logprobs"}
