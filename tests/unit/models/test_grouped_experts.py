"""Experts by grouped products: as transformers computes them, for families of every layout."""

import pytest
import torch
from torch import nn

from pyengine.models.grouped_experts import NAME, experts_of, use_grouped_experts
from tests.gpu.models import random_model
from tests.support.kernels import needs_triton, run_apart


def compare(family: str) -> None:
    """In the interpreter: the logits of a model, and of one whose experts are in 8 bits."""
    from pyengine.models.float8_linear import _quantise_experts

    torch.manual_seed(0)
    settings = {"num_experts_per_tok": 2, "num_hidden_layers": 2, "intermediate_size": 128}
    model = random_model(family, hidden_size=128, **settings).float()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    ids = torch.randint(0, 500, (1, 9))
    model.set_experts_implementation("eager")
    expected = model(ids).logits
    assert use_grouped_experts(model)
    assert model.config._experts_implementation == NAME
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    for module in experts_of(model):
        _quantise_experts(module)
    assert use_grouped_experts(model)
    after = model(ids).logits
    assert not torch.equal(after, expected)
    # The interpreter rounds a few numbers wrongly (triton 3.9).
    assert (after - expected).norm() < 0.3 * expected.norm()


@needs_triton
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_model_answers_as_by_transformers(family):
    """Weights as `[experts, N, K]`; transposed, with biases and gates between the outputs."""
    run_apart(__name__, "compare", family, TRITON_INTERPRET="1")


def test_a_model_without_experts_stays():
    model = random_model("llama")
    assert not experts_of(model) and not use_grouped_experts(model)


def test_experts_with_a_norm_behind_each_are_left_to_transformers():
    model = random_model("mixtral")
    for module in experts_of(model):
        module.has_post_expert_norm = True
    assert not use_grouped_experts(model)
    assert model.config._experts_implementation != NAME


def test_packed_experts_are_left_to_transformers():
    model = random_model("mixtral")
    for module in experts_of(model):
        module.down_proj = nn.Parameter(module.down_proj.detach().char(), requires_grad=False)
    assert not use_grouped_experts(model)


def test_without_triton_transformers_computes_them(monkeypatch):
    model = random_model("mixtral")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert not use_grouped_experts(model)
