"""The engine over arrays gives the answers of the oracle, which computes with torch's tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benches.engine.kernel_sets import Comparison, compare, made_up_models, random_requests
from pyengine.models.decoder.torch_kernels import TorchKernels
from pyengine.sampling import tensor_operations
from pyengine.sampling.tensor_operations import TensorOperations

pytestmark = [pytest.mark.slow, pytest.mark.levels]


def comparison(name: str, count: int) -> Comparison:
    with made_up_models([name]) as models:
        return compare(name, models[name], random_requests(count, 509))


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
def test_random_requests(name: str) -> None:
    result = comparison(name, 200)
    assert (result.requests, result.greedy, result.drawn) == (200, [], [])
    assert result.tokens > 1000
    assert result.logprobs > 5000
    assert result.agrees, (result.largest, result.at)


def _second_best(_: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits.topk(2).indices[:, 1]


def _first_allowed(_: Any, logits: torch.Tensor, draws: Any, numbers: Any) -> torch.Tensor:
    return torch.zeros(len(draws), dtype=torch.int64)


def _shifted(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *arguments: function(*arguments) * 1.0001


def _off(function: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., Any]:
    def changed(*arguments: Any) -> tuple[torch.Tensor, ...]:
        token_ids, logprobs, *rest = function(*arguments)
        return token_ids, logprobs + 3e-5, *rest

    return changed


def test_another_largest_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorOperations, "largest", _second_best)
    result = comparison("llama", 24)
    assert len(result.greedy) > 10
    assert not result.agrees


def test_another_drawn_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorOperations, "draw", _first_allowed)
    result = comparison("llama", 24)
    assert len(result.drawn) > 8
    assert result.greedy == []


def test_other_logprobs_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_operations, "_chunk", _off(tensor_operations._chunk))
    result = comparison("llama", 24)
    assert 2e-5 < result.largest < 5e-5
    assert not result.agrees


def test_other_logits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchKernels, "capped", _shifted(TorchKernels.capped))
    assert not comparison("gemma2", 24).agrees
