"""The draw on the CPU against the simple one, which devices use."""

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.cpu import limit_threads
from pyengine.sampling import draw_cpu
from pyengine.sampling.sampler import SamplingBatch, draw, draw_on_device
from pyengine.sampling.state import SamplingState, uniforms
from pyengine.sampling_params import SamplingParams

requests = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.1, 0.8, 1.0, 3.0, 1e-30, 1e30]),
    top_k=st.sampled_from([0, 0, 1, 2, 50, 63, 64, 65, 400, 2**63]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.999999, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.9, 1.0, 1e-12]),
)


def batch_of(params: list[SamplingParams], vocab_size: int) -> SamplingBatch:
    return SamplingBatch(
        [
            SamplingState(param, (), seed=seed, vocab_size=vocab_size)
            for seed, param in enumerate(params)
        ]
    )


def simple(logits: torch.Tensor, batch: SamplingBatch, positions: Any) -> list[int]:
    assert batch.draws is not None
    numbers = uniforms(batch.draws.seeds, np.asarray(positions)[batch.draws.rows])
    tokens: list[int] = draw_on_device(
        logits[batch.draws.rows].float(), batch.draws, numbers
    ).tolist()
    return tokens


def make_logits(kind: str, rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator)
    if kind == "peaked":
        logits += 12 * (torch.rand(rows, vocab_size, generator=generator) < 20 / vocab_size)
    elif kind == "ties":
        logits = (logits * 2).round()
    elif kind == "equal":
        logits = torch.zeros(rows, vocab_size)
    elif kind == "barred":
        logits[torch.rand(rows, vocab_size, generator=generator) < 0.97] = -math.inf
        logits[:, -1] = 0.5
    return logits * 3


@given(
    params=st.lists(requests, min_size=1, max_size=6),
    kind=st.sampled_from(["peaked", "flat", "ties", "equal", "barred"]),
    vocab_size=st.sampled_from([2, 5, 100, 1024, 1025, 3001, 20_000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    greedy=st.sets(st.integers(0, 8)),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=400)
def test_the_same_tokens_as_the_simple_draw(
    params: list[SamplingParams],
    kind: str,
    vocab_size: int,
    dtype: torch.dtype,
    greedy: set[int],
    seed: int,
) -> None:
    rows = [
        SamplingParams(temperature=0) if at in greedy else param for at, param in enumerate(params)
    ]
    batch = batch_of([*rows, params[0]], vocab_size)
    logits = make_logits(kind, len(batch.states), vocab_size, seed).to(dtype)
    for position in range(3):
        positions = np.full(len(batch.states), seed + position)
        assert batch.draws is not None
        assert draw(logits, batch.draws, positions).tolist() == simple(logits, batch, positions)


def test_a_filtered_row_of_a_large_vocabulary_is_not_drawn_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widths = []
    pick = draw_cpu._pick

    def watched(values: Any, *others: Any) -> Any:
        widths.append(values.shape[1])
        return pick(values, *others)

    monkeypatch.setattr(draw_cpu, "_pick", watched)
    vocab_size = 32_000
    logits = make_logits("peaked", 4, vocab_size, 0)
    for params in (
        SamplingParams(top_k=50),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.1),
        SamplingParams(top_k=50, top_p=0.9, min_p=0.01),
    ):
        widths.clear()
        batch = batch_of([params] * 4, vocab_size)
        assert batch.draws is not None
        draw(logits, batch.draws, np.zeros(4, dtype=np.int64))
        assert len(widths) == 1
        assert widths[0] < 1100
    widths.clear()
    batch = batch_of([SamplingParams(top_p=0.9, temperature=100)] * 4, vocab_size)
    assert batch.draws is not None
    draw(logits, batch.draws, np.zeros(4, dtype=np.int64))
    assert max(widths) == vocab_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_several_threads_are_those_of_one(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    vocab_size, names = 32_000, set()
    logits = make_logits("peaked", 19, vocab_size, 0).to(dtype)
    kinds = [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 3.0, "top_p": 0.99}]
    batch = batch_of([SamplingParams(**kinds[row % 4]) for row in range(19)], vocab_size)
    draws, positions = batch.draws, np.arange(19)
    draw_whole = draw_cpu._draw

    def watched(*arguments: Any) -> Any:
        names.add(threading.current_thread().name)
        return draw_whole(*arguments)

    monkeypatch.setattr(draw_cpu, "_draw", watched)
    assert draws is not None
    found = []
    for num_threads in (1, 2, 3):
        before = limit_threads(num_threads)
        names.clear()
        found.append(draw(logits, draws, positions).tolist())
        limit_threads(before)
        assert 1 <= len(names) <= num_threads
        assert (len(names) > 1) == (num_threads > 1)
    assert found == [simple(logits, batch, positions)] * 3
