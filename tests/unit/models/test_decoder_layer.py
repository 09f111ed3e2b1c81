"""Layers with a short `forward` compute the same bits, and only layers that may get one."""

import pytest
import torch
from torch import nn

from pyengine.models.cpu_kernels import KernelProduct, fuse_norms, instructions_of, kernel_supports
from pyengine.models.decoder_layer import shorten_layers
from pyengine.models.linear import ATTENTION, concatenated, prepack_linears
from pyengine.models.quantized_linear import replace_by_products
from pyengine.models.rotary import take_over_rotations
from tests.unit.executor.hand_made import PagedRun, random_model
from tests.unit.models.test_rotary import logits, random_norms

pytestmark = pytest.mark.skipif(
    not kernel_supports(torch.float32), reason="the processor lacks the kernels' instructions"
)

SHORT = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {"head_dim": 6},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3_moe": {"head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6},
}
UNCHANGED = {"granite": {}, "gpt_oss": {"num_local_experts": 4}}


def prepared(family: str, **settings):
    """A model with the kernels of an engine, and how to run it."""
    model = random_model(family, **settings)
    random_norms(model)
    fuse_norms(model)
    prepack_linears(model, lambda _shape, _weights: "pyengine")
    run = PagedRun(model)
    take_over_rotations(model)
    return model, run


@pytest.mark.parametrize("name", SHORT)
def test_the_bits_are_the_same(name):
    model, run = prepared(name.split()[0], **SHORT[name])
    expected = logits(run)
    assert shorten_layers(model) == model.config.num_hidden_layers
    assert torch.equal(logits(PagedRun(model)), expected)


@pytest.mark.parametrize("alone", ATTENTION)
def test_two_of_three_projections_may_be_one_product(alone):
    model = random_model("gemma3_text", sliding_window=6)
    fuse_norms(model)
    lone = {layer for name, layer in model.named_modules() if name.endswith(alone)}
    replace_by_products(
        model,
        lambda layer: type(layer) is nn.Linear,
        lambda linears: KernelProduct(concatenated(linears).weight),
        lambda linear: linear in lone,
    )
    run = PagedRun(model)
    take_over_rotations(model)
    expected = logits(run)
    assert shorten_layers(model) == model.config.num_hidden_layers
    assert torch.equal(logits(PagedRun(model)), expected)


@pytest.mark.parametrize("family", UNCHANGED)
def test_other_layers_stay_as_they_are(family):
    model, _ = prepared(family, **UNCHANGED[family])
    assert shorten_layers(model) == 0


def test_watched_layers_stay_as_they_are():
    model, run = prepared("llama")
    seen = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    assert shorten_layers(model) == model.config.num_hidden_layers - 1
    logits(run)
    assert seen


def test_layers_with_another_product_stay_as_they_are():
    model = random_model("llama")
    fuse_norms(model)
    PagedRun(model)
    take_over_rotations(model)
    assert shorten_layers(model) == 0


def test_decorated_functions_are_compared_without_their_decorator():
    from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    llama = instructions_of(LlamaDecoderLayer)
    assert llama == instructions_of(Qwen3DecoderLayer)
    assert llama != instructions_of(Gemma2DecoderLayer)
