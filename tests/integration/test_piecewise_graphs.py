"""A real model whose steps run in pieces gives the same tokens and log-probabilities."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from pyengine import LLM, RequestOutput, SamplingParams
from pyengine.executor.model_runner import ModelRunner
from tests.support.checkpoints import save_tiny
from tests.support.graphs import EagerRecorder

SIZES: dict[str, Any] = {
    "attention_backend": "gather",  # layers of the CPU's attention are shortened
    "num_blocks": 64,
    "block_size": 4,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
}


class CountingRecorder(EagerRecorder):
    """Counts replays."""

    def __init__(self) -> None:
        self.replays = 0

    def pieces(self, compute: Any) -> Callable[[], torch.Tensor]:
        replay = super().pieces(compute)

        def counted() -> torch.Tensor:
            self.replays += 1
            return replay()

        return counted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(
        folder, hidden_size=32, vocab_size=97, max_position_embeddings=256, initializer_range=0.5
    )
    return folder


def answers(llm: LLM) -> list[RequestOutput]:
    """Prompts of up to 100 tokens that repeat, some with log-probabilities of all tokens."""
    random = Random(2)
    prompts = [[3 + at % random.randint(2, 9) for at in range(random.randint(1, 100))]] * 2
    prompts += [[random.randrange(3, 9) for _ in range(random.randint(1, 60))] for _ in range(30)]
    params = [
        SamplingParams(
            n=random.choice([1, 1, 2]),
            temperature=random.choice([0, 1]),
            seed=at,
            max_tokens=random.randint(1, 16),
            logprobs=random.choice([None, 2]),
            prompt_logprobs=random.choice([None, None, 1]),
        )
        for at in range(len(prompts))
    ]
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async_scheduling": True},
        {"speculation": "ngram", "num_speculative_tokens": 3},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_the_answers_are_those_of_whole_steps(folder: Path, settings: dict[str, Any]) -> None:
    with LLM(folder, device="cpu", dtype="float32", **SIZES, **settings) as llm:
        expected = answers(llm)
    with LLM(folder, device="cpu", dtype="float32", **SIZES, **settings) as llm:
        runner, recorder = llm._engine._executor.runner, CountingRecorder()
        assert isinstance(runner, ModelRunner)
        runner.capture_piecewise(recorder.pieces)
        assert runner.piecewise.sizes == [16, 32, 48]
        found = answers(llm)
        assert recorder.replays > 50
    for item, other in zip(found, expected, strict=True):
        assert item.prompt_token_ids == other.prompt_token_ids
        close(item.prompt_logprobs, other.prompt_logprobs)
        for answer, same in zip(item.outputs, other.outputs, strict=True):
            assert answer.token_ids == same.token_ids
            assert answer.finish_reason == same.finish_reason
            close(answer.logprobs, same.logprobs)


def close(found: Any, expected: Any) -> None:
    """The same tokens with the same log-probabilities, up to rounding."""
    if expected is None:
        assert found is None
        return
    for entry, other in zip(found, expected, strict=True):
        if other is None:
            assert entry is None
            continue
        assert entry.keys() == other.keys()
        for token, item in entry.items():
            assert item.logprob == pytest.approx(other[token].logprob, abs=1e-4)
