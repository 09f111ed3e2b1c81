"""RMSNorm in one pass gives what transformers' gives, and takes the place of that alone."""

from typing import Any

import pytest
import torch
from torch import nn

from pyengine.cpu import BufferError, ConfigError, CpuAttention
from pyengine.models.cpu_kernels import FusedRMSNorm, fuse_norms
from tests.unit.executor.hand_made import random_model

pytestmark = pytest.mark.levels


def usual(size: int, dtype: torch.dtype) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm: Any = LlamaRMSNorm(size, eps=1e-5)
    norm.weight = nn.Parameter(torch.randn(size))
    return norm.to(dtype)


@pytest.mark.parametrize("size", [1, 5, 16, 64, 577])
@pytest.mark.parametrize("rows", [(0,), (1,), (3, 7), (2, 300)])
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)], ids=str
)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_it_computes_what_the_norm_does_that_it_replaces(size, rows, dtype, error, num_threads):
    torch.manual_seed(0)
    norm = usual(size, dtype)
    states = (torch.randn(*rows, size) * torch.logspace(-3, 3, size)).to(dtype)
    with torch.inference_mode():
        found = FusedRMSNorm(norm, CpuAttention(num_threads))(states)
        expected = norm(states)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(found, expected, atol=0, rtol=error)
    if dtype == torch.bfloat16:  # a sum is rounded otherwise here and there
        assert (found != expected).float().mean().nan_to_num() <= 0.02


@pytest.mark.parametrize("size", [1, 16, 577])
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)], ids=str
)
def test_gemmas_weights_are_differences_from_one(size, dtype, error):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    torch.manual_seed(0)
    norm: Any = Gemma3RMSNorm(size)
    nn.init.normal_(norm.weight)
    norm, states = norm.to(dtype), torch.randn(7, size).to(dtype)
    with torch.inference_mode():
        found, expected = FusedRMSNorm(norm, CpuAttention(2), offset=1.0)(states), norm(states)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=error)
    if dtype == torch.bfloat16:  # it is rounded once, after the product
        assert (found != expected).float().mean() <= 0.005


def test_a_row_has_the_same_bits_among_others():
    fused = FusedRMSNorm(usual(96, torch.bfloat16), CpuAttention(2))
    states = torch.randn(1000, 96).bfloat16()
    together = fused(states)
    for row in (0, 1, 500, 999):
        assert torch.equal(fused(states[row]), together[row])
    spread = torch.randn(96, 50).bfloat16().T
    assert torch.equal(fused(spread), fused(spread.contiguous()))


@pytest.mark.parametrize(
    ("family", "num_fused"), [("llama", 5), ("qwen3", 9), ("gemma2", 9), ("gpt2", 0)]
)
def test_the_usual_norms_of_a_model_are_replaced_once(family, num_fused):
    model: Any = random_model(family, num_hidden_layers=2)
    tokens = torch.tensor([[3, 9, 27, 81, 50]])
    with torch.no_grad():
        expected = model(tokens).logits
        assert fuse_norms(model) == (num_fused if CpuAttention.is_fast() else 0)
        torch.testing.assert_close(model(tokens).logits, expected, atol=1e-4, rtol=1e-4)
    assert fuse_norms(model) == 0


def test_a_compiled_graph_has_the_plain_norm():
    fused = FusedRMSNorm(usual(16, torch.float32), CpuAttention(1))
    states = torch.randn(3, 16)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(states), fused.plain(states))


def test_arrays_that_do_not_fit_are_refused():
    threads, rows = CpuAttention(1), torch.ones(2, 3).numpy()
    weight, out = torch.ones(3).numpy(), torch.zeros(2, 3).numpy()
    for wrong in (
        (rows, weight[:2], out),
        (rows, weight, out[:1]),
        (rows[:, :2].copy(), weight, out),
        (rows, weight.astype("float64"), out),
        (rows, weight.astype("uint16"), out),
        (rows, weight, rows),
    ):
        with pytest.raises(BufferError):
            threads.rms_norm(*wrong, 1e-5)
    empty = torch.ones(2, 0).numpy()
    with pytest.raises(ConfigError, match="length of the weight"):
        threads.rms_norm(empty, empty[0], empty.copy(), 1e-5)
    assert not out.any()
