"""Families with states by the kernel set of CUDA, whose kernels Triton's interpreter runs."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pyengine.models.decoder.cuda_kernels import CudaKernels
from pyengine.models.decoder.loading import open_model
from pyengine.models.decoder.torch_kernels import TorchKernels
from tests.support.kernels import interpreted, needs_triton, run_apart
from tests.unit.models.decoder.steps import CPU, Runner, Running
from tests.unit.models.decoder.tiny_models import RECURRENT, save

TOKENS = [9, 44, 3, 71, 5, 90, 12, 33, 60, 7, 18, 25, 81, 4]
KERNELS = {
    "qwen3_next": {"short_conv", "gated_delta", "gated_norm"},
    "kimi_linear": {"short_conv", "gated_delta", "gated_norm"},
    "olmo_hybrid": {"short_conv", "gated_delta", "gated_norm"},
    "granitemoehybrid": {"short_conv", "state_space", "gated_norm"},
    "falcon_h1": {"short_conv", "state_space"},
    "jamba": {"short_conv", "state_space"},
    "lfm2": {"short_conv"},
}
"""The kernels of one family for each kind of recurrent layer."""


def answers(folder: Path, kernels: TorchKernels) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of a prompt in chunks, beside others that decode and fork; and all states."""
    runner = Runner(open_model(folder).decoder(kernels))
    first, second = runner.add(TOKENS), runner.add(TOKENS[:3])
    runner.step((first, 2))
    runner.step((first, 10), (second, 1))
    fork = Running(TOKENS, first.tables, first.computed, first.source, runner.new_slot())
    unkept = runner.add(TOKENS[:1])
    unkept.slot = -1
    runner.step((second, 1), (fork, 1), (unkept, 1))
    runner.step((first, 2), (second, 1))
    running = (first, second, fork, unkept)
    logits = torch.stack([row for sequence in running for row in sequence.logits])
    states = [array for layer in runner.states.tensors for array in (layer.conv, layer.recurrent)]
    return logits, [array for array in states if array is not None]


def compare(*families: str) -> None:
    """In the interpreter: logits and states by both sets; and the kernels were launched."""
    from pyengine.kernels import delta_rule, gated_norm, short_conv, state_space

    launched: set[str] = set()

    def counted(module: Any, name: str) -> Any:
        function = getattr(module, name)

        def call(*arguments: Any, **named: Any) -> Any:
            launched.add(name)
            return function(*arguments, **named)

        return patch.object(module, name, call)

    functions = (
        (short_conv, "short_conv"),
        (delta_rule, "gated_delta"),
        (state_space, "state_space"),
        (gated_norm, "gated_norm"),
    )
    first = {tiny.family: tiny for tiny in reversed(RECURRENT)}
    for family in families:
        launched.clear()
        with tempfile.TemporaryDirectory() as path, ExitStack() as stack:
            folder = Path(path)
            save(first[family], folder)
            expected, expected_states = answers(folder, TorchKernels(CPU, torch.float32))
            stack.enter_context(interpreted())
            for module, name in functions:
                stack.enter_context(counted(module, name))
            actual, states = answers(folder, CudaKernels(CPU, torch.float32))
        assert expected.std() > 0.01, family
        torch.testing.assert_close(actual, expected, rtol=3e-4, atol=3e-4, msg=family)
        torch.testing.assert_close(states, expected_states, rtol=3e-4, atol=3e-4, msg=family)
        assert launched == KERNELS[family], family


@needs_triton
@pytest.mark.parametrize("family", KERNELS)
def test_decoders_are_those_of_torch(family: str) -> None:
    run_apart(__name__, "compare", family, TRITON_INTERPRET="1")
