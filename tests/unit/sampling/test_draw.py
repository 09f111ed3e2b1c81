"""The draw from arrays against the simple one, from tensors."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.cpu import BufferError, draw_tokens, largest_logits, token_logprobs
from pyengine.cpu.threads import kernel_threads
from pyengine.sampling.sampler import draw
from pyengine.sampling_params import SamplingParams
from tests.support.logits import KINDS, batch_of, in_type, make_logits, requests, tensor_of


@given(
    params=st.lists(requests, min_size=1, max_size=6),
    kind=st.sampled_from(KINDS),
    vocab_size=st.sampled_from([2, 5, 100, 1024, 1025, 3001, 20_000]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    greedy=st.sets(st.integers(0, 8)),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=400)
def test_the_same_tokens_as_the_simple_draw(
    params: list[SamplingParams],
    kind: str,
    vocab_size: int,
    dtype: str,
    greedy: set[int],
    seed: int,
) -> None:
    pytest.importorskip("torch", reason="tensors are the reference")
    rows = [
        SamplingParams(temperature=0) if at in greedy else param for at, param in enumerate(params)
    ]
    batch = batch_of([*rows, params[0]], vocab_size)
    logits = in_type(make_logits(kind, len(batch.states), vocab_size, seed), dtype)
    for position in range(3):
        positions = np.full(len(batch.states), seed + position)
        assert batch.draws is not None
        expected = draw(tensor_of(logits), batch.draws, positions)
        assert draw(logits, batch.draws, positions).tolist() == expected.tolist()


def test_arrays_that_do_not_fit_are_refused() -> None:
    """And then writes nothing."""
    threads, logits = kernel_threads(1), np.zeros((2, 8), dtype=np.float32)
    rows, out = np.arange(2), np.full(2, 7)
    settings_of_rows, numbers = np.ones((4, 2)), np.zeros(2)

    def refused(call: Any, *arguments: Any, match: str) -> None:
        with pytest.raises(BufferError, match=match):
            call(threads, *arguments)
        assert out.tolist() == [7, 7]

    refused(largest_logits, logits.astype(np.float64), out, match="not that of f32")
    refused(largest_logits, logits.T, out, match="not contiguous")
    refused(largest_logits, logits, out[:1], match="out has 1 elements")
    refused(largest_logits, logits, out.astype(np.int32), match="not that of i64")
    shared = out.view(np.float32)[:, None]
    refused(largest_logits, shared, out[:2], match="share memory|out has 2 elements")
    drawn = (rows, settings_of_rows, numbers, out)
    refused(draw_tokens, logits, rows + 1, *drawn[1:], match=r"rows\[1\]=2 is not in 0\.\.2")
    refused(draw_tokens, logits, rows, np.ones((3, 2)), numbers, out, match=r"must be \[4, 2\]")
    refused(draw_tokens, logits, rows, settings_of_rows, numbers[:1], out, match="numbers has 1")
    refused(draw_tokens, logits, out, settings_of_rows, numbers, out, match="out and rows share")
    figures = np.zeros(2, dtype=np.float32), out, np.zeros(2, dtype=np.int64)
    arguments = (rows, rows, np.ones(2, dtype=np.int64)), (*figures, np.zeros(2, dtype=np.float32))
    refused(token_logprobs, logits, (rows, rows + 7, rows), arguments[1], match=r"token_ids\[1\]=8")
    refused(token_logprobs, logits, (rows, rows, rows), arguments[1], match="top_ids has 2")
    same = (figures[0], out, out, figures[0])
    refused(token_logprobs, logits, arguments[0], same, match="share memory")
