"""Logits processors on arrays and tensors, of each element type."""

import math
from typing import Any

import numpy as np
import pytest

from pyengine.sampling.logits_processors import LogitsProcessors
from pyengine.sampling.sampler import sample
from pyengine.sampling.state import SamplingState
from pyengine.sampling.thinking_budget import ThinkingBudget, ThinkingMarkers
from pyengine.sampling_params import LogitsProcessor, SamplingParams
from pyengine.utils.dtypes import widened
from tests.support.logits import in_type, make_logits, tensor_of
from tests.support.without_torch import needs_torch

VOCAB = 200
DTYPES = ["float32", "float16", "bfloat16"]
MODES = ["array", pytest.param("tensor", marks=needs_torch)]


def reverse(output: list[int], logits: Any) -> Any:
    return -logits


def without_output(output: list[int], logits: Any) -> None:
    logits[output] = -math.inf


def state(
    processors: tuple[LogitsProcessor, ...], output: tuple[int, ...] = (), **params: Any
) -> SamplingState:
    made = SamplingState(SamplingParams(**params), (), seed=7, vocab_size=VOCAB)
    if processors:
        made.process_with(LogitsProcessors(processors, (1, 2, 3)))
    for token in output:
        made.append(token)
    return made


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0, 1])
def test_rows_are_changed_and_others_are_not(mode: str, dtype: str, temperature: int) -> None:
    logits = in_type(make_logits("flat", 4, VOCAB, seed=3), dtype)
    wide = widened(logits).copy()
    top = int(wide[2].argmax())
    rows = logits if mode == "array" else tensor_of(logits)
    seen: list[Any] = []

    def look(output: list[int], row: Any) -> Any:
        seen.append(row)
        return row

    states = [
        state((), temperature=temperature),
        state((reverse,), temperature=temperature),
        state((look, without_output), output=(top,), temperature=temperature),
        state((), temperature=temperature),
    ]
    drawn = sample(rows, states).wait().token_ids.tolist()
    changed = wide.copy()
    changed[1] *= -1
    changed[2, top] = -math.inf
    for row, one in enumerate(states):
        free = state((), output=tuple(one.token_ids), temperature=temperature)
        expected = changed[row : row + 1]
        chosen = sample(expected if mode == "array" else tensor_of(expected), [free])
        assert drawn[row] == chosen.wait().token_ids[0]
    assert (widened(logits) == wide).all()
    (row,) = seen
    assert tuple(row.shape) == (VOCAB,)
    assert str(row.dtype).removeprefix("torch.") == "float32"
    assert isinstance(row, np.ndarray) is (mode == "array")


@pytest.mark.parametrize("mode", MODES)
def test_an_array_is_no_tensor(mode: str) -> None:
    logits = make_logits("flat", 1, VOCAB, seed=3)
    rows = logits if mode == "array" else tensor_of(logits)

    def other(output: list[int], row: Any) -> Any:
        return row.tolist() if mode == "array" else np.array(row.tolist())

    failing = state((other,), temperature=0)
    sample(rows, [failing]).wait()
    assert failing.processors is not None
    assert "TypeError" in str(failing.processors.error)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_forced_end_of_thinking(mode: str, dtype: str) -> None:
    logits = in_type(make_logits("flat", 3, VOCAB, seed=3), dtype)
    states = [state((), temperature=0), state((), temperature=1), state((), temperature=0)]
    for limited in states[:2]:
        limited.limit_thinking(ThinkingBudget(0, ThinkingMarkers((5,), (9,)), [5]))
    sampled = sample(logits if mode == "array" else tensor_of(logits), states).wait()
    assert sampled.token_ids.tolist() == [9, 9, int(widened(logits)[2].argmax())]
