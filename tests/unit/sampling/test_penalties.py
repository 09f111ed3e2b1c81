"""Penalties step after step against penalties computed from scratch, and the uploads of a step."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.sampling import penalties
from pyengine.sampling.penalties import Penalties
from pyengine.sampling.state import SamplingState
from pyengine.sampling_params import SamplingParams
from tests.support.logits import normal, tensor_of

VOCAB = 12
PARAMS = (
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.25),
    SamplingParams(),
    SamplingParams(frequency_penalty=-0.7),
    SamplingParams(repetition_penalty=0.5),
)


def states(prompts: list[list[int]]) -> list[SamplingState]:
    return [
        SamplingState(params, prompt, seed=0, vocab_size=VOCAB)
        for params, prompt in zip(PARAMS, prompts, strict=True)
    ]


def reference(logits: Any, rows: list[SamplingState]) -> Any:
    """One token after the other, by hand."""
    expected = logits.copy()
    for row, state in enumerate(rows):
        if state.counts is None:
            continue
        params = state.params
        for token, count in zip(state.counts.ids, state.counts.counts, strict=True):
            value = expected[row, token]
            repetition = np.float32(params.repetition_penalty)
            value = value / repetition if value > 0 else value * repetition
            offset = np.float32(params.frequency_penalty) * count
            offset += np.float32(params.presence_penalty) * (count > 0)
            expected[row, token] = value - offset
    return expected


class Uploads:
    """Copies uploads, as a device does, and records their sizes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, array: Any, _device: Any) -> Any:
        self.sizes.append(array.size)
        return tensor_of(array.copy())


def apply(followed: Penalties, logits: Any, *, is_copied: bool) -> None:
    """Change an array, or a tensor over the same memory."""
    flat = logits.reshape(-1)
    followed.apply(tensor_of(flat) if is_copied else flat, logits.shape[1])


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=30)


@given(prompts=st.lists(tokens, min_size=4, max_size=4), answers=st.lists(tokens, max_size=8))
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("is_copied", [False, True])
def test_step_after_step(
    is_copied: bool, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    if is_copied:
        pytest.importorskip("torch", reason="tensors have a table of their own")
    rows, uploads, chance = states(prompts), Uploads(), np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        if is_copied:
            patch.setattr(penalties, "upload", uploads)
        followed = Penalties(dict(enumerate(rows)))
        for answer in [[], *answers]:  # a step may add none, one, or several
            for at, token in enumerate(answer):
                rows[at % len(rows)].append(token)
            logits = chance.standard_normal((len(rows), VOCAB), dtype=np.float32)
            expected = reference(logits, rows)
            apply(followed, logits, is_copied=is_copied)
            assert logits.tolist() == expected.tolist()


def test_a_step_uploads_what_changed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="arrays upload nothing")
    uploads = Uploads()
    monkeypatch.setattr(penalties, "upload", uploads)
    rows = states([[1, 2, 3, 4, 5]] * 4)
    followed = Penalties(dict(enumerate(rows)))
    followed.apply(tensor_of(normal(0, 4 * VOCAB)), VOCAB)
    assert len(uploads.sizes) == 1
    for token in (1, 7):
        for state in rows:
            state.append(token)
        followed.apply(tensor_of(normal(0, 4 * VOCAB)), VOCAB)
        assert uploads.sizes.pop() == 3 * 3  # three penalised rows, three numbers for each
    assert len(uploads.sizes) == 1
    followed.apply(tensor_of(normal(0, 4 * VOCAB)), VOCAB)
    assert len(uploads.sizes) == 1


def test_rows_of_another_length_are_another_table() -> None:
    rows = states([[1], [1], [1], [11]])
    followed = Penalties(dict(enumerate(rows)))
    for width in (VOCAB, 2 * VOCAB, VOCAB):
        logits = normal(width, 4, width)
        expected = reference(logits, rows)
        followed.apply(logits.reshape(-1), width)
        assert logits.tolist() == expected.tolist()
    for _again in range(2):
        with pytest.raises(ValueError, match="token ids 1 to 11 in rows of 10 logits"):
            followed.apply(normal(0, 40), 10)
