"""Ranks that divide a model compute what one process computes; each reads its part only."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pyengine.attention.cpu import CpuBackend
from pyengine.cpu import CpuAttention
from pyengine.cpu.threads import kernel_threads
from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.models.decoder.cpu_kernels import CpuKernels
from pyengine.models.decoder.cpu_numbers import Dtype
from pyengine.models.decoder.loading import open_model, spec_of
from pyengine.models.decoder.ranks import Rank, divided
from pyengine.models.decoder.stored_weight import Weight
from pyengine.models.decoder.torch_kernels import TorchKernels
from pyengine.utils.tensors import array_of, tensor_of
from tests.unit.models.decoder.steps import CPU, Runner, Running, generate
from tests.unit.models.decoder.test_families import SETS, TOLERANCE, Saved
from tests.unit.models.decoder.tiny_models import MODELS, RECURRENT, Tiny

_EVEN = {
    "gemma4-keys": {"num_global_key_value_heads": 2},
    "mimo_v2_flash": {"num_attention_heads": 8, "num_key_value_heads": 2},
}
"""Settings of models that two ranks cannot divide unchanged."""


class Meeting:
    """Threads of one process that meet as ranks do."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.rows: list[Any] = [None] * size

    def exchanged(self, number: int, rows: Any) -> list[Any]:
        """The rows of all ranks."""
        self.rows[number] = rows
        self.barrier.wait()
        parts = list(self.rows)
        self.barrier.wait()
        return parts


@dataclass(frozen=True, slots=True)
class ThreadRank(Rank):
    """A rank that is a thread of this process."""

    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def sum(self, rows: Any) -> Any:
        parts = [tensor_of(part) for part in self.meeting.exchanged(self.number, rows)]
        whole = torch.stack(parts).sum(0)
        return whole if isinstance(rows, torch.Tensor) else array_of(whole)

    def gather(self, rows: Any, width: int) -> Any:
        cat: Any = torch.cat if isinstance(rows, torch.Tensor) else np.concatenate
        whole = cat(self.meeting.exchanged(self.number, rows), 1)
        assert whole.shape[1] == width
        return whole

    def _of_all(self, words: str | None) -> list[str | None]:
        return self.meeting.exchanged(self.number, words)


def ranks(size: int) -> list[Rank]:
    meeting = Meeting(size)
    return [ThreadRank(number, size, meeting) for number in range(size)]


def on_all_ranks(size: int, run: Callable[[Rank], Any]) -> list[Any]:
    """The results of `run` on every rank, at the same time."""
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def work(rank: Rank) -> None:
        try:
            results[rank.number] = run(rank)
        except BaseException as error:
            failures.append(error)
            rank.meeting.barrier.abort()  # type: ignore[attr-defined]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def answers(
    folder: Path, kernels: str, prompts: list[list[int]], rank: Rank | None = None
) -> list[Running]:
    make_kernels, backend = SETS[kernels]
    opened = open_model(folder)
    decoder = opened.decoder(make_kernels(), *(() if rank is None else (rank,)))
    return generate(Runner(decoder, backend), prompts, 4)


def even(tiny: Tiny) -> Tiny:
    if tiny.name not in _EVEN:
        return tiny
    return Tiny(f"{tiny.name}-even", tiny.family, {**tiny.settings, **_EVEN[tiny.name]})


def check(folder: Path, size: int, kernels: str, prompts: list[list[int]]) -> None:
    whole = answers(folder, kernels, prompts)
    for running in on_all_ranks(size, lambda rank: answers(folder, kernels, prompts, rank)):
        for expected, actual in zip(whole, running, strict=True):
            assert actual.tokens == expected.tokens
            difference = torch.stack(actual.logits) - torch.stack(expected.logits)
            assert difference.abs().max() <= TOLERANCE


_BY_NAME = {tiny.name: tiny for tiny in MODELS}
_DIVISIBLE = [
    tiny
    for tiny in MODELS
    if tiny.name != "phi3-partial" and tiny not in RECURRENT  # 3 KV heads; states are not divided
]
_BY_TORCH = (
    *("llama-biases", "qwen2_moe", "gpt_oss", "deepseek_v3-yarn", "olmo2", "cohere2-biases"),
    *("gemma4", "gpt2", "phi3"),
)
needs_kernel = pytest.mark.skipif(
    not CpuAttention.is_fast(), reason="this processor has no AVX2 with FMA"
)


@needs_kernel
@pytest.mark.parametrize("tiny", _DIVISIBLE, ids=lambda tiny: tiny.name)
def test_two_ranks_compute_what_one_process_computes(
    tiny: Tiny, saved: Saved, prompts: list[list[int]]
) -> None:
    check(saved(even(tiny))[0], 2, "cpu", prompts)


@needs_kernel
@pytest.mark.parametrize("name", ["llama-biases", "gpt_oss", "deepseek_v3", "gemma3", "olmo2"])
def test_bfloat16_is_as_close_to_float32_as_in_one_process(
    name: str, saved: Saved, prompts: list[list[int]]
) -> None:
    opened = open_model(saved(_BY_NAME[name])[0])

    def logits(dtype: Dtype, rank: Rank) -> torch.Tensor:
        kernels = CpuKernels(kernel_threads(1), dtype=dtype)
        kind: torch.dtype = getattr(torch, dtype)
        runner = Runner(opened.decoder(kernels, rank), CpuBackend, kind)
        sequence = runner.add(prompts[0])
        runner.step((sequence, len(prompts[0])))
        return torch.stack(sequence.logits).float()

    exact = logits("float32", Rank())
    error = (logits("bfloat16", Rank()) - exact).norm()
    for actual in on_all_ranks(2, lambda rank: logits("bfloat16", rank)):
        assert (actual - exact).norm() <= 1.4 * error


@pytest.mark.parametrize("name", _BY_TORCH)
def test_two_ranks_compute_it_by_torch(name: str, saved: Saved, prompts: list[list[int]]) -> None:
    check(saved(_BY_NAME[name])[0], 2, "torch", prompts)


@pytest.mark.parametrize("name", ["phi3-partial", "deepseek_v3", "gpt_oss-three"])
def test_three_ranks_compute_what_one_process_computes(
    name: str, saved: Saved, prompts: list[list[int]]
) -> None:
    three = Tiny(
        "gpt_oss-three",
        "gpt_oss",
        {"head_dim": 8, "num_key_value_heads": 3, "num_local_experts": 4, "attention_bias": True},
    )
    check(saved(_BY_NAME.get(name, three))[0], 3, "torch", prompts)


class Counting(TorchKernels):
    """Kernels that count the numbers that they read."""

    def __init__(self) -> None:
        super().__init__(CPU, torch.float32)
        self.count = 0

    def _fill(self, target: torch.Tensor, weight: Weight) -> None:
        self.count += sum(numbers.size for _, numbers, _ in weight.pieces())
        super()._fill(target, weight)


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_oss", "gpt2", "deepseek_v3"])
def test_a_rank_reads_its_part_and_what_is_whole(name: str, saved: Saved) -> None:
    opened = open_model(saved(_BY_NAME[name])[0])
    counts = []
    for rank in (Rank(), Rank(0, 2), Rank(1, 2)):
        kernels = Counting()
        opened.decoder(kernels, rank)
        counts.append(kernels.count)
    whole, first, second = counts
    assert abs(first - second) < 400  # biases are read once, and the vocabulary is odd
    assert first < 0.66 * whole < first + second


@pytest.mark.parametrize(
    ("values", "size", "words"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 2, ["9 query heads", "3 KV heads"]),
        ({"num_attention_heads": 8, "num_key_value_heads": 4}, 8, ["4 KV heads", "use 2 or 4"]),
        ({"intermediate_size": 90}, 4, ["90 of intermediate_size", "use 2"]),
        ({"num_key_value_heads": 1}, 2, ["1 KV heads", "only tensor_parallel_size=1 does"]),
    ],
)
def test_what_ranks_cannot_divide_is_named(
    values: dict[str, Any], size: int, words: list[str]
) -> None:
    settings = {**_BY_NAME["llama"].configuration, "model_type": "llama", "head_dim": 8, **values}
    spec = spec_of(settings, "config.json")
    with pytest.raises(ConfigurationError, match=f"tensor_parallel_size={size} ") as caught:
        divided(spec, size)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_experts_and_shared_experts_count_too(saved: Saved) -> None:
    spec = open_model(saved(_BY_NAME["qwen2_moe"])[0]).spec
    with pytest.raises(ConfigurationError, match="the shared expert's intermediate size") as caught:
        divided(replace(spec, layers=spec.layers[:1]), 3)
    assert "24 of the experts' intermediate size" in str(caught.value)


def test_a_vocabulary_that_is_odd_is_divided() -> None:
    assert [Rank(number, 3).part(10) for number in range(3)] == [
        slice(0, 4),
        slice(4, 8),
        slice(8, 10),
    ]


def test_a_weight_that_only_one_rank_refuses_fails_on_all(tmp_path: Path, saved: Saved) -> None:
    folder, _ = saved(_BY_NAME["llama"])
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][-1, 3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    opened = open_model(tmp_path)
    results = []

    def load(rank: Rank) -> None:
        with (
            pytest.raises(ModelLoadError, match=r"up_proj.*NaN") as caught,
            rank.failing_together(),
        ):
            opened.decoder(TorchKernels(CPU, torch.float32), rank)
        results.append(str(caught.value))

    on_all_ranks(2, load)
    assert len(results) == 2 and results[0] == results[1]
