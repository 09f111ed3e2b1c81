"""Weights that are rounded to 4 or 8 bits at loading."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from pyengine.attention.cpu import CpuBackend
from pyengine.cpu import CpuAttention
from pyengine.cpu.threads import kernel_threads
from pyengine.errors import ConfigurationError
from pyengine.models.decoder.cpu_kernels import CpuKernels
from pyengine.models.decoder.cpu_products import CpuProduct
from pyengine.models.decoder.loading import open_model
from tests.unit.models.decoder.steps import Runner
from tests.unit.models.decoder.tiny_models import Tiny, save

_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
_EXPERTS = {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
_TOKENS = [9, 44, 3, 71, 5, 5, 90, 12, 33, 8]

pytestmark = pytest.mark.skipif(not CpuAttention.is_fast(), reason="no AVX2 with FMA")


def logits(folder: Path, quantization: Literal["none", "int4", "int8"]) -> torch.Tensor:
    kernels = CpuKernels(kernel_threads(1), quantization)
    runner = Runner(open_model(folder).decoder(kernels), CpuBackend)
    sequence = runner.add(_TOKENS)
    runner.step((sequence, len(_TOKENS)))
    return torch.stack(sequence.logits)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_fewer_bits_are_less_exact(family: str, tmp_path: Path) -> None:
    save(Tiny(family, family, _EXPERTS if family == "mixtral" else _SIZES), tmp_path)
    exact = logits(tmp_path, "none")
    eight, four = (
        (logits(tmp_path, "int8") - exact).norm() / exact.norm(),
        (logits(tmp_path, "int4") - exact).norm() / exact.norm(),
    )
    assert 0 < eight < 0.15
    assert eight < four < 0.5


def test_the_head_keeps_eight_bits_beside_four(tmp_path: Path) -> None:
    save(Tiny("llama", "llama", _SIZES), tmp_path)
    decoder = open_model(tmp_path).decoder(CpuKernels(kernel_threads(1), "int4"))
    head = decoder._head
    assert isinstance(head, CpuProduct)
    assert getattr(head.packed, "format", "") == "Q8_0"


def test_inputs_that_are_not_whole_groups_are_refused_by_name(tmp_path: Path) -> None:
    save(Tiny("llama", "llama", {"hidden_size": 48}), tmp_path)
    with pytest.raises(ConfigurationError, match=r"lm_head\.weight has 48: leave quantization"):
        open_model(tmp_path).decoder(CpuKernels(kernel_threads(1), "int8"))
