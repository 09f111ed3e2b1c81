"""Layers that multiply the same rows are one product, and give what each gave by itself."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from pyengine.models.linear import (
    ATTENTION,
    GATED,
    FusedLinear,
    concatenated,
    fuse_linears,
    replace_linears,
)
from tests.unit.executor.hand_made import random_model


class Counting(nn.Module):
    """A linear layer that counts its calls."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        linear = concatenated(linears)
        self.in_features = linear.in_features
        self.weight, self.bias, self.calls = linear.weight, linear.bias, 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.linear(rows, self.weight, self.bias)


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear


def attention(bias: tuple[bool, bool, bool] = (False,) * 3, size: int = 8) -> nn.ModuleDict:
    torch.manual_seed(0)
    sizes = (6, 2, 4)
    layers = [
        nn.Linear(8 if out != 2 else size, out, b) for out, b in zip(sizes, bias, strict=True)
    ]
    names = ("q_proj", "k_proj", "v_proj")
    return nn.ModuleDict(dict(zip(names, layers, strict=True)))


def products(model: nn.Module) -> list[Counting]:
    return [module for module in model.modules() if isinstance(module, Counting)]


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_the_first_multiplies_for_all_in_any_order(bias):
    model = attention((bias,) * 3)
    rows = [torch.randn(1, 5, 8), torch.randn(7, 8)]
    expected = [{name: item(row) for name, item in model.items()} for row in rows]
    assert replace_linears(model, is_linear, Counting, (ATTENTION, GATED)) == 3
    (product,) = products(model)
    for number, order in enumerate(
        [("k_proj", "q_proj", "v_proj"), ("v_proj", "k_proj", "q_proj")]
    ):
        for row, right in zip(rows, expected, strict=True):
            for name in order:
                torch.testing.assert_close(model[name](row), right[name])
        assert product.calls == 2 * (number + 1)


@torch.no_grad()
def test_rows_of_others_are_multiplied_anew_and_nothing_is_kept():
    model = attention()
    rows = [torch.randn(5, 8) for _ in range(2)]
    expected = [model["q_proj"](row) for row in rows] + [model["v_proj"](rows[0])]
    replace_linears(model, is_linear, Counting, (ATTENTION, GATED))
    found = [model["q_proj"](row) for row in rows] + [model["v_proj"](rows[0])]
    for match, right in zip(found, expected, strict=True):
        torch.testing.assert_close(match, right)
    fresh = torch.randn(5, 8)
    kept = weakref.ref(fresh)
    for name in model:
        model[name](fresh)
    del fresh
    assert kept() is None


@pytest.mark.parametrize(
    ("model", "num_products"),
    [
        pytest.param(attention((True, False, True)), 2, id="only some have a bias"),
        pytest.param(attention(size=3), 2, id="another input"),
        pytest.param(nn.ModuleDict({"up_proj": nn.Linear(2, 3)}), 1, id="alone"),
        pytest.param(
            nn.ModuleDict(
                {"gate_proj": nn.Linear(2, 3), "up_proj": nn.Linear(2, 3, dtype=torch.float64)}
            ),
            2,
            id="another type",
        ),
    ],
)
def test_only_layers_of_one_kind_are_joined(model, num_products):
    num_layers = len(list(model.children()))
    assert replace_linears(model, is_linear, Counting, (ATTENTION, GATED)) == num_layers
    assert len(products(model)) == num_products
    for layer in model.children():
        assert layer(torch.zeros(2, layer.in_features, dtype=layer.weight.dtype)).shape[0] == 2


def test_a_kind_that_the_caller_names_keeps_layers_apart():
    model = attention()
    kinds = {model["q_proj"]: "Q4_K", model["k_proj"]: "Q4_K", model["v_proj"]: "Q6_K"}
    assert replace_linears(model, is_linear, Counting, (ATTENTION, GATED), kinds.get) == 3
    assert len(products(model)) == 2
    assert [type(layer) for layer in model.children()] == [FusedLinear, FusedLinear, Counting]


@torch.no_grad()
def test_plain_layers_are_joined_for_gpus_and_say_the_same():
    model: Any = random_model("llama")
    tokens = torch.tensor([[3, 9, 27, 81, 50]])
    expected = model(tokens).logits
    assert fuse_linears(model) == 3 * 7 + 1
    assert sum(type(module) is nn.Linear for module in model.modules()) == 3 * 4 + 1
    torch.testing.assert_close(model(tokens).logits, expected)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
@torch.no_grad()
def test_a_model_says_the_same_and_gives_its_weights_back(family):
    model: Any = random_model(family)
    tokens = torch.tensor([[3, 9, 27, 81, 50]])
    expected = model(tokens).logits
    kept = [
        weakref.ref(item.weight) for name, item in model.named_modules() if name.endswith("k_proj")
    ]
    assert replace_linears(model, is_linear, Counting, (ATTENTION, GATED)) == 3 * 7 + 1
    gc.collect()
    assert [entry() for entry in kept] == [None] * 3
    assert len(products(model)) == 3 * 4 + 1
    torch.testing.assert_close(model(tokens).logits, expected)
    assert all(product.calls == 1 for product in products(model))
    layer = model.model.layers[0].self_attn.k_proj
    assert isinstance(layer, FusedLinear)
    assert layer.weight.dtype == torch.float32
