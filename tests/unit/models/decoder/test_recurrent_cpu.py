"""Families with states on the CPU: transformers' logits, and the same bits in every step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pyengine.attention.cpu import CpuBackend
from pyengine.cpu import CpuAttention
from pyengine.cpu.threads import kernel_threads
from pyengine.models.decoder.cpu_kernels import CpuKernels
from pyengine.models.decoder.cpu_numbers import Dtype
from pyengine.models.decoder.loading import open_model
from pyengine.models.decoder.torch_kernels import TorchKernels
from tests.support.processes import run_python
from tests.unit.models.decoder.steps import CPU, Runner, Running
from tests.unit.models.decoder.tiny_models import RECURRENT, Tiny

Saved = Callable[[Tiny], tuple[Path, Any]]
pytestmark = pytest.mark.skipif(
    not CpuAttention.is_fast(), reason="this processor has no AVX2 with FMA"
)
every_model = pytest.mark.parametrize("tiny", RECURRENT, ids=lambda tiny: tiny.name)


def runner_of(tiny: Tiny, saved: Saved, dtype: Dtype = "float32", threads: int = 2) -> Runner:
    kernels = CpuKernels(kernel_threads(threads), dtype=dtype)
    decoder = open_model(saved(tiny)[0]).decoder(kernels)
    return Runner(decoder, CpuBackend, getattr(torch, dtype))


def bits(sequence: Running, first: int = 0) -> torch.Tensor:
    return torch.stack(sequence.logits[first:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_model
def test_a_row_has_the_same_bits_however_tokens_are_divided_into_steps(
    tiny: Tiny, dtype: Dtype, saved: Saved, prompts: list[list[int]]
) -> None:
    tokens, whole = prompts[0], []
    for threads, chunk in ((1, 64), (2, 1), (2, 3)):
        runner = runner_of(tiny, saved, dtype, threads)
        sequence, others = runner.add(tokens), [runner.add(prompt) for prompt in prompts[1:]]
        while left := len(tokens) - sequence.computed:
            beside = [(other, 1) for other in others if other.computed < len(other.tokens)]
            runner.step(*beside, (sequence, min(left, chunk)))
        whole.append(bits(sequence))
    assert torch.equal(whole[0], whole[1]) and torch.equal(whole[0], whole[2])


@every_model
def test_a_sequence_continues_from_a_copied_state_with_the_same_bits(
    tiny: Tiny, saved: Saved, prompts: list[list[int]]
) -> None:
    runner, first = runner_of(tiny, saved), prompts[0]
    whole, cut = runner.add(first), runner.add(first)
    runner.step((whole, len(first)))
    runner.step((cut, 9))
    snapshot = runner.new_slot()
    runner.states.copy([(cut.slot, snapshot)])
    runner.step((cut, 1))  # the live state moves on
    forks = [runner.add(first) for _ in range(2)]
    for fork in forks:
        fork.computed, fork.source, fork.tables = 9, snapshot, cut.tables
    for fork in forks:
        runner.step((fork, len(first) - 9))
        assert torch.equal(bits(fork), bits(whole, 9))


@every_model
def test_bfloat16_is_as_close_to_float32_as_with_torch(tiny: Tiny, saved: Saved) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 101, (60,), generator=generator).tolist() for _ in range(4)]
    folder, kind, logits = saved(tiny)[0], torch.bfloat16, []
    by_torch = Runner(open_model(folder).decoder(TorchKernels(CPU, kind)), dtype=kind)
    exact = Runner(open_model(folder).decoder(TorchKernels(CPU, torch.float32)))
    for runner in (exact, by_torch, runner_of(tiny, saved, "bfloat16")):
        running = [runner.add(prompt) for prompt in prompts]
        runner.step(*((sequence, len(sequence.tokens)) for sequence in running))
        logits.append(torch.stack([row for sequence in running for row in sequence.logits]))
    right, theirs, ours = logits
    # Medians: of rows whose experts change, errors say nothing.
    torch_error, error = ((rows.float() - right).norm(dim=1).median() for rows in (theirs, ours))
    assert error <= 1.15 * torch_error


_IMPORTS = """
import sys
import pyengine.models.decoder.cpu_kernels
import pyengine.models.decoder.loading
import pyengine.kv_cache.states
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def test_states_on_cpus_need_no_torch() -> None:
    run_python(_IMPORTS)
