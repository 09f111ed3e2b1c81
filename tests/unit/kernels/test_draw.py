"""The Triton kernels of the draw: the tokens of the draw on the CPU, seed by seed, without a GPU.

Triton's interpreter computes them; `make gpu-tests` compiles them for absent GPUs.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from pyengine.sampling.sampler import draw
from pyengine.sampling.state import uniforms
from pyengine.sampling.tensor_operations import draw_by_kernels
from pyengine.sampling_params import SamplingParams
from tests.support.cases import check_cases
from tests.support.kernels import in_interpreter
from tests.support.logits import batch_of, requests, tensor_of
from tests.support.logits import make_logits as logits_of


def make_logits(*arguments: Any) -> torch.Tensor:
    return tensor_of(logits_of(*arguments))


def by_kernels(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list:
    draws = batch_of(params, logits.shape[1]).draws
    assert draws is not None
    numbers = uniforms(draws.seeds, np.asarray(positions)[draws.rows])
    return draw_by_kernels(logits, draws, numbers).tolist()


def compare(
    params: list[SamplingParams],
    kind: str,
    vocab_size: int,
    dtype: torch.dtype,
    greedy: set[int],
    seed: int,
) -> None:
    """In the interpreter: the kernels draw what the CPU draws."""
    params = [
        SamplingParams(temperature=0) if at in greedy else param for at, param in enumerate(params)
    ]
    params.append(SamplingParams(temperature=1))
    logits = make_logits(kind, len(params), vocab_size, seed).to(dtype)
    positions = list(range(seed, seed + len(params)))
    draws = batch_of(params, vocab_size).draws
    assert draws is not None
    assert by_kernels(logits, params, positions) == draw(logits, draws, positions).tolist()


@pytest.mark.parametrize("count", [30, pytest.param(1500, marks=pytest.mark.soak)])
@in_interpreter
def test_the_kernels_draw_what_the_cpu_draws(count: int) -> None:
    check_cases(
        compare,
        count,
        params=st.lists(requests, min_size=1, max_size=4),
        kind=st.sampled_from(["peaked", "flat", "ties", "equal", "barred"]),
        vocab_size=st.sampled_from([2, 100, 4096, 4097, 20_000]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        greedy=st.sets(st.integers(0, 5)),
        seed=st.integers(0, 2**20),
    )


@in_interpreter
def test_a_row_has_the_token_that_it_has_alone() -> None:
    """In the interpreter: a row has the token that it has alone."""
    params = [
        SamplingParams(temperature=1),
        SamplingParams(temperature=0.7, top_k=40),
        SamplingParams(temperature=2, min_p=0.05),
        SamplingParams(temperature=1, top_k=50, top_p=0.8),
        SamplingParams(temperature=1, top_p=0.8),
    ]
    logits = make_logits("flat", len(params), 9000, 7)
    draws = batch_of(params, 9000).draws
    assert draws is not None
    numbers = np.linspace(0.1, 0.9, len(params))
    together = draw_by_kernels(logits, draws, numbers).tolist()
    for row, param in enumerate(params):
        alone = batch_of([param], 9000).draws
        assert alone is not None
        own = draw_by_kernels(logits[row : row + 1], alone, numbers[row : row + 1])
        assert own.tolist() == [together[row]]


@in_interpreter
def test_rows_without_a_choice() -> None:
    """In the interpreter: a row without a choice gives a token that shows it."""
    rows = torch.randn(4, 9000)
    rows[0, 8000] = math.nan
    rows[1] = -math.inf
    rows[2, 5000] = math.inf
    for params in (
        SamplingParams(temperature=1),
        SamplingParams(temperature=1, min_p=0.1),
        SamplingParams(temperature=1, top_k=5),
    ):
        tokens = by_kernels(rows, [params] * 4, [0, 1, 2, 3])
        assert all(0 <= token < 9000 for token in tokens)
        chosen = [float(rows[row, token]) for row, token in enumerate(tokens)]
        assert math.isnan(chosen[0]) and chosen[1:3] == [-math.inf, math.inf]
        assert math.isfinite(chosen[3])
