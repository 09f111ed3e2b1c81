"""The floors of top-k and top-p against a sort of each row, and the bytes that a draw reads."""

import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from pyengine.sampling.state import uniforms
from pyengine.sampling.tensor_operations import draw_by_kernels
from pyengine.sampling_params import SamplingParams
from tests.support.cases import check_cases
from tests.support.kernels import LoadedBytes, in_interpreter
from tests.support.logits import batch_of, requests
from tests.support.operators import Sorts
from tests.unit.kernels.test_draw import by_kernels, make_logits


def sorted_floor(row: torch.Tensor, params: SamplingParams) -> float:
    """The lowest logit that stays, by a sort; -inf for a row without a distribution."""
    ranked = row.double().sort(descending=True).values
    if not torch.isfinite(ranked[0]):
        return -math.inf
    weights = ((ranked - ranked[0]) / params.temperature).exp()
    weights *= weights >= params.min_p
    floor = -math.inf
    if 0 < params.top_k < len(ranked):
        floor = float(ranked[params.top_k - 1])
        weights *= ranked >= floor
    if params.top_p < 1:
        reached = weights.cumsum(0)
        end = int((reached < params.top_p * reached[-1]).sum())
        floor = max(floor, float(ranked[min(end, len(ranked) - 1)]))
    return floor


def kernel_floors(logits: torch.Tensor, params: list[SamplingParams]) -> list[float]:
    from pyengine.kernels.draw import Draws, weight_sums
    from pyengine.kernels.floors import rank_floors

    batch = batch_of(params, logits.shape[1]).draws
    assert batch is not None
    cpu = torch.device("cpu")
    draws = Draws(logits, batch.row_ids.on(cpu), batch.table.on(cpu))
    floors: list[float] = rank_floors(draws, weight_sums(draws)[0]).floors.tolist()
    return floors


def compare(
    params: list[SamplingParams], kind: str, vocab_size: int, dtype: torch.dtype, seed: int
) -> None:
    logits = make_logits(kind, len(params), vocab_size, seed).to(dtype)
    if kind == "peaked":
        logits[0, seed % vocab_size] = -math.inf
    expected = [sorted_floor(row, param) for row, param in zip(logits, params, strict=True)]
    assert kernel_floors(logits, params) == expected


@pytest.mark.parametrize("count", [20, pytest.param(1500, marks=pytest.mark.soak)])
@in_interpreter
def test_floors_are_those_of_a_sort(count: int) -> None:
    check_cases(
        compare,
        count,
        params=st.lists(requests, min_size=1, max_size=3),
        kind=st.sampled_from(["peaked", "flat", "ties", "equal", "barred"]),
        vocab_size=st.sampled_from([2, 255, 256, 257, 4096, 4097, 20_011]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        seed=st.integers(0, 2**20),
    )


@in_interpreter
def test_exact_limits() -> None:
    """In the interpreter: a cumulated weight equal to the limit ends the nucleus, as on the CPU."""
    logits = torch.arange(20_000, dtype=torch.float32).flip(0)
    levels = torch.zeros(20_000)
    levels[::2] = 1
    rows = torch.stack([logits, logits, logits, levels, levels, -levels])
    params = [
        SamplingParams(temperature=1e30, top_p=0.5),  # all weights are 1
        SamplingParams(temperature=1e30, top_p=0.5 + 1e-12),
        SamplingParams(temperature=1e30, top_p=1 - 2**-53),
        SamplingParams(temperature=1e-30, top_p=0.999),  # all but the largest are 0
        SamplingParams(temperature=1e30, top_p=0.25, top_k=9000),
        SamplingParams(temperature=1, top_p=1e-300),
    ]
    expected = [sorted_floor(row, param) for row, param in zip(rows, params, strict=True)]
    assert expected == [10_000, 9999, 0, 1, 1, 0]
    assert kernel_floors(rows, params) == expected


@in_interpreter
def test_rows_without_a_distribution() -> None:
    """In the interpreter: they end the search, and stay as they are."""
    rows = torch.randn(5, 3000)
    rows[0, 2900] = math.nan
    rows[1] = -math.inf
    rows[2, 77] = math.inf
    rows[3, 1:] = -math.inf
    for param in (
        SamplingParams(temperature=1, top_p=0.9),
        SamplingParams(temperature=1, top_k=5, top_p=0.9, min_p=0.1),
    ):
        floors = kernel_floors(rows, [param] * 5)
        assert floors[:3] == [-math.inf] * 3
        assert floors[3:] == [sorted_floor(row, param) for row in rows[3:]]
        tokens = by_kernels(rows, [param] * 5, [0] * 5)
        chosen = [float(row[token]) for row, token in zip(rows, tokens[:5], strict=True)]
        assert math.isnan(chosen[0])
        assert chosen[1:3] == [-math.inf, math.inf]
        assert tokens[3] == 0


@in_interpreter
def test_strided_rows() -> None:
    """In the interpreter: logits inside wider rows, and in columns."""
    wide = make_logits("flat", 4, 5000, 3)
    params = [SamplingParams(temperature=1, top_p=0.7), SamplingParams(temperature=1, top_k=9)] * 2
    draws = batch_of(params, 3000).draws
    assert draws is not None
    numbers = uniforms(draws.seeds, np.arange(4))
    part = wide[:, :3000]
    expected = draw_by_kernels(part.contiguous(), draws, numbers).tolist()
    assert draw_by_kernels(part, draws, numbers).tolist() == expected
    assert draw_by_kernels(part.t().contiguous().t(), draws, numbers).tolist() == expected


@in_interpreter
def test_no_filter_sorts() -> None:
    """In the interpreter: no filter puts the vocabulary in order."""
    logits = torch.randn(4, 3000)
    params = [
        SamplingParams(temperature=1, top_p=0.9),
        SamplingParams(temperature=1, top_k=5),
        SamplingParams(temperature=1, top_k=5, top_p=0.9, min_p=0.1),
        SamplingParams(temperature=1),
    ]
    with Sorts() as sorts:
        by_kernels(logits, params, [0] * 4)
    assert sorts.seen == []


@in_interpreter
def test_bytes_read() -> None:
    """In the interpreter: filters read less than a tenth of likely rows again, flat rows twice."""
    vocab_size = 151_936
    flat = make_logits("flat", 1, vocab_size, 1)
    likely = flat.clone()
    likely[:, 1000:1040] = torch.linspace(14, 22, 40)
    for logits, params, limit in (
        (likely, SamplingParams(temperature=1), 1.01),
        (likely, SamplingParams(temperature=1, top_p=0.9), 1.1),
        (likely, SamplingParams(temperature=1, top_k=20), 1.1),
        (likely, SamplingParams(temperature=0.7, top_k=20, top_p=0.8, min_p=0.01), 1.1),
        (flat / 3, SamplingParams(temperature=1, top_p=0.9), 3.01),
    ):
        half = logits.to(torch.bfloat16)
        with LoadedBytes(half) as loaded:
            by_kernels(half, [params], [0])
        passes = loaded.count / (vocab_size * 2)
        assert 1 <= passes <= limit, (params, passes)
