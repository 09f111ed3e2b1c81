"""Linear layers in 4 and 8 bits: close, smaller, and refused where they are impossible."""

import numpy as np
import pytest
import torch

from pyengine.config import EngineSettings
from pyengine.cpu import CpuAttention
from pyengine.errors import ConfigurationError
from pyengine.models.decoder.kernel_sets import KernelSettings, kernel_set
from pyengine.models.integer_linear import GROUP, int4, q8_0
from tests.support.models import as_loaded
from tests.unit.executor.hand_made import Entry, PagedRun, random_model


def restored(weight, quantise=int4):
    floats = torch.empty(weight.shape)
    packed = quantise(weight.numpy(), CpuAttention(2))
    packed.gather(np.arange(len(weight)), floats.numpy())
    return floats


@pytest.mark.parametrize("size", [1.0, 1e-7, 1e6])
def test_an_error_is_at_most_a_step_and_zeros_stay(size):
    torch.manual_seed(0)
    weight = torch.randn(5, 4 * GROUP) * size
    weight[1, :GROUP] = 0
    weight[2, :GROUP].abs_()
    weight[3, :GROUP].abs_().neg_()
    groups = weight.view(5, -1, GROUP)
    step = (groups.amax(-1).clamp_min(0) - groups.amin(-1).clamp_max(0)) / 15
    error = (restored(weight) - weight).view(5, -1, GROUP)
    assert (error.abs().mean(-1) <= 0.5 * step).all()
    assert (error.abs().amax(-1) <= 1.6 * step).all()
    assert (restored(weight)[1, :GROUP] == 0).all()


def test_the_best_of_several_spans_is_no_worse_than_the_whole_span():
    torch.manual_seed(0)
    weight = torch.randn(64, 8 * GROUP)
    groups = weight.view(64, -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    plain = (((groups / scale) + zero).round().clamp(0, 15) - zero) * scale
    ours = (restored(weight) - weight).square().sum()
    assert ours < (plain.flatten(1) - weight).square().sum()


def test_8_bits_are_within_half_a_step():
    weight = torch.randn(7, 3 * GROUP)
    actual = restored(weight, q8_0)
    step = weight.view(7, 3, GROUP).abs().amax(-1, keepdim=True) / 127
    assert ((actual - weight).view(7, 3, GROUP).abs() <= 0.51 * step + 1e-3 * step * 127).all()


@pytest.mark.parametrize(("quantization", "error"), [("int4", 0.1), ("int8", 0.02)])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_model_answers_nearly_as_before(is_tied, quantization, error):
    settings = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.02}
    model = random_model("llama", tie_word_embeddings=is_tied, **settings)
    tokens = [3, 9, 27, 81, 50]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    run = PagedRun(model, kernels=KernelSettings(quantization=quantization))
    ((actual,), _) = run.step([Entry(tokens, 0, len(tokens), run.tables(len(tokens)))])
    assert 0 < (actual.float().log_softmax(-1) - expected).abs().max() < error


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_layers_that_are_not_whole_groups_are_refused(quantization):
    model = random_model("llama", hidden_size=64, intermediate_size=80)
    with pytest.raises(ConfigurationError, match=r"groups of 32 inputs, and .*down_proj.* has 80"):
        as_loaded(model, kernels=KernelSettings(quantization=quantization))


def test_it_is_for_the_cpu_and_one_process():
    with pytest.raises(ConfigurationError, match="runs on cpu, the device is cuda"):
        kernel_set(torch.device("cuda"), "float32", KernelSettings(quantization="int8"))
    with pytest.raises(
        ConfigurationError,
        match=r"quantization='int3' is not known: did you mean int8\? Use one of int8,",
    ):
        EngineSettings(quantization="int3")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="quantization='int8' cannot be combined"):
        EngineSettings(quantization="int8", tensor_parallel_size=2)
