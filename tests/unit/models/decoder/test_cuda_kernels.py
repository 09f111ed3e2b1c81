"""The kernel set of CUDA devices against plain torch: its kernels run in Triton's interpreter."""

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pyengine.models.decoder.cuda_kernels import CudaKernels
from pyengine.models.decoder.loading import open_model
from pyengine.models.decoder.torch_kernels import TorchKernels
from tests.support.kernels import interpreted, needs_triton, run_apart
from tests.unit.models.decoder.steps import CPU, Runner
from tests.unit.models.decoder.tiny_models import MODELS, save

TOKENS = [9, 44, 3, 71, 5, 90, 12]


def logits(folder: Path, kernels: TorchKernels) -> torch.Tensor:
    """Of a prompt in two chunks and a decode, beside another sequence."""
    runner = Runner(open_model(folder).decoder(kernels))
    first, second = runner.add([*TOKENS, 8]), runner.add(TOKENS[:2])
    runner.step((first, 3))
    runner.step((first, 4), (second, 1))
    runner.step((first, 1), (second, 1))
    return torch.stack([*first.logits, *second.logits])


def compare(*families: str) -> None:
    """In the interpreter: the logits of a decoder by both sets; and the kernels were launched."""
    from pyengine.kernels import add_norm, gate, grouped_linear

    launched: set[str] = set()

    def counted(module: Any, name: str) -> Any:
        function = getattr(module, name)

        def call(*arguments: Any) -> Any:
            launched.add(name)
            return function(*arguments)

        return patch.object(module, name, call)

    first = {tiny.family: tiny for tiny in reversed(MODELS)}
    for family in families:
        launched.clear()
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path)
            save(first[family], folder)
            expected = logits(folder, TorchKernels(CPU, torch.float32))
            with (
                interpreted(),
                counted(add_norm, "add_norm"),
                counted(gate, "gated"),
                counted(grouped_linear, "grouped_linear"),
            ):
                actual = logits(folder, CudaKernels(CPU, torch.float32))
        assert expected.std() > 0.01, family
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4, msg=family)
        has_experts = family in ("gpt_oss", "qwen2_moe", "deepseek_v3")
        expected_kernels = {"add_norm", *(["gated"] if family != "gpt2" else [])}
        assert launched == expected_kernels | ({"grouped_linear"} if has_experts else set()), family


@needs_triton
@pytest.mark.parametrize(
    "families", [("gemma3_text", "cohere2", "gpt2"), ("gpt_oss", "qwen2_moe", "deepseek_v3")]
)
def test_decoders_are_those_of_torch(families: tuple[str, ...]) -> None:
    run_apart(__name__, "compare", *families, TRITON_INTERPRET="1")
