"""Packed linear layers give what the plain ones give, in a model, outside of it and compiled."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from pyengine.models import linear as packed
from pyengine.models.cpu_kernels import available_products, onednn_supports
from pyengine.models.linear import PrepackedLinear, PrepackedMLP, can_prepack, prepack_linears
from pyengine.models.linear_kernels import LayerShape
from tests.unit.executor.hand_made import random_model

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)
CPU = torch.device("cpu")


EXACT = pytest.param(torch.float32, 1e-5, id="float32")
ROUNDED = pytest.param(
    torch.bfloat16,
    1e-2,
    id="bfloat16",
    marks=pytest.mark.skipif(not can_prepack(CPU, torch.bfloat16), reason="no bfloat16 here"),
)


def always_onednn(_shape: Any, _weights: Any) -> Any:
    return "onednn"


PRODUCTS = ("onednn", "onednn-unpacked", "pyengine")


def skip_without(product, dtype=torch.float32):
    if product not in available_products(dtype):
        pytest.skip(f"no product {product} for {dtype} here")


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 24), (5, 24), (1, 40, 24), (2, 3, 24), (300, 24)])
@pytest.mark.parametrize(("dtype", "error"), [EXACT, ROUNDED])
def test_it_multiplies_as_the_layer_it_replaces(shape, bias, dtype, error, product):
    skip_without(product, dtype)
    torch.manual_seed(0)
    plain, rows = nn.Linear(24, 17, bias=bias).to(dtype), torch.randn(shape).to(dtype)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            found = PrepackedLinear(plain, product)(rows)
            torch.testing.assert_close(found, plain(rows), atol=error, rtol=error)
            assert found.shape == (*shape[:-1], 17)
            assert found.dtype == dtype


@pytest.mark.parametrize("product", ["onednn", "pyengine"])
@pytest.mark.parametrize(("dtype", "_error"), [EXACT, ROUNDED])
def test_every_linear_of_a_model_is_replaced_and_its_weight_given_back(dtype, _error, product):
    skip_without(product, dtype)
    model: Any = random_model("llama")
    tokens = torch.tensor([[3, 9, 27, 81, 50]])
    with torch.no_grad():
        exact = model(tokens).logits
        model.to(dtype)
        plain = (model(tokens).logits - exact).abs().mean()
        kept = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
        embedding = model.get_input_embeddings().weight.clone()
        assert prepack_linears(model, lambda _shape, _weights: product) == 3 * 7 + 1
        gc.collect()
        assert kept() is None
        assert (model(tokens).logits - exact).abs().mean() <= 1.1 * plain + 1e-5  # rounded less
    assert torch.equal(model.get_input_embeddings().weight, embedding)  # it was not tied
    assert model.lm_head.weight.dtype == dtype
    assert model.lm_head.weight.shape == embedding.shape
    assert prepack_linears(model, always_onednn) == 0


@needs_onednn
@pytest.mark.parametrize(
    ("family", "settings", "num_gated"),
    [
        ("llama", {}, 3),
        ("llama", {"mlp_bias": True}, 3),
        ("qwen2", {}, 3),
        ("llama", {"hidden_act": "gelu"}, 0),
        ("gemma2", {}, 3),
        ("gpt2", {}, 0),
    ],
)
def test_gated_mlps_do_all_at_once_where_they_are_the_usual_ones(family, settings, num_gated):
    model: Any = random_model(family, **settings)
    tokens = torch.tensor([[3, 9, 27, 81, 50]])
    with torch.no_grad():
        expected = model(tokens).logits
        prepack_linears(model, always_onednn)
        torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    assert sum(isinstance(module, PrepackedMLP) for module in model.modules()) == num_gated


@needs_onednn
def test_an_mlp_that_does_something_else_stays():
    model: Any = random_model("llama")
    kind = type(model.model.layers[0].mlp)

    class Doubled(kind):
        def forward(self, rows):
            return 2 * super().forward(rows)

    model.model.layers[0].mlp.__class__ = Doubled
    prepack_linears(model, always_onednn)
    mlps = [layer.mlp for layer in model.model.layers]
    assert [isinstance(mlp, PrepackedMLP) for mlp in mlps] == [False, True, True]


@needs_onednn
def test_a_graph_holds_the_layer_by_its_number():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4, bias=False))
    rows = torch.randn(5, 8)
    expected = plain(rows).detach()
    assert prepack_linears(plain, always_onednn) == 2
    torch._dynamo.reset()
    graph = torch.compile(plain, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        torch.testing.assert_close(graph(rows), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_graph_holds_a_gated_mlp_too(product):
    skip_without(product)
    model: Any = random_model("llama")
    mlp, rows = model.model.layers[0].mlp, torch.randn(5, model.config.hidden_size)
    expected = mlp(rows).detach()
    prepack_linears(model, lambda _shape, _weights: product)
    torch._dynamo.reset()
    graph = torch.compile(model.model.layers[0].mlp, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        torch.testing.assert_close(graph(rows), expected, atol=1e-5, rtol=1e-5)


@needs_onednn
def test_layers_are_forgotten_with_their_model():
    gc.collect()
    before = len(packed._layers)
    layer = PrepackedLinear(nn.Linear(3, 3))
    assert len(packed._layers) == before + 1
    del layer
    gc.collect()
    assert len(packed._layers) == before


def test_what_is_no_plain_linear_stays():
    class Own(nn.Linear):
        pass

    model = nn.ModuleList([Own(2, 2), nn.Embedding(2, 2), nn.Linear(2, 2, dtype=torch.float16)])
    before = list(model)
    assert prepack_linears(model, always_onednn) == 0
    assert list(model) == before


def test_the_name_of_an_instruction_set_does_not_decide(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert can_prepack(CPU, torch.float32) == torch.backends.mkldnn.is_available()
    assert can_prepack(CPU, torch.bfloat16) == onednn_supports(torch.bfloat16)
    assert not can_prepack(CPU, torch.float16)
    assert not can_prepack(torch.device("cuda"), torch.float32)


@needs_onednn
def test_layers_use_the_product_that_was_chosen_for_their_shape():
    asked: dict[LayerShape, int] = {}

    def choose(shape, weights):
        asked[shape] = sum(weight.numel() for weight in weights)
        return "torch" if shape.is_gated else "onednn"

    model: Any = random_model("llama", tie_word_embeddings=True)
    hidden, middle = model.config.hidden_size, model.config.intermediate_size
    head = LayerShape(hidden, model.config.vocab_size, torch.float32, is_tied=True)
    tokens = torch.tensor([[3, 9, 27, 81, 50]])
    with torch.no_grad():
        expected = model(tokens).logits
        assert prepack_linears(model, choose) == 3 * 7 + 1
        torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    gated = LayerShape(hidden, middle, torch.float32, is_gated=True)
    assert asked[gated] == 3 * hidden * middle
    assert asked[head] == hidden * model.config.vocab_size
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert type(model.lm_head) is PrepackedLinear


@needs_onednn
def test_a_tied_head_may_keep_the_weight_of_the_embedding():
    model: Any = random_model("llama", tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight
    tokens = torch.tensor([[3, 9, 27, 81, 50]])
    with torch.no_grad():
        expected = model(tokens).logits
        prepack_linears(model, lambda shape, _: "onednn-unpacked" if shape.is_tied else "torch")
        torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    assert type(model.lm_head) is PrepackedLinear
    assert model.lm_head.weight.data_ptr() == embedding.data_ptr()


class Scaled(nn.Embedding):
    """As that of gemma."""

    def __init__(self, *size: int) -> None:
        super().__init__(*size)
        self.embed_scale = nn.Buffer(torch.tensor(3.0), persistent=False)

    def forward(self, input_ids):
        return super().forward(input_ids) * self.embed_scale.to(self.weight.dtype)


class Other(nn.Embedding):
    def forward(self, input_ids):
        return super().forward(input_ids) + 1


@pytest.mark.parametrize(
    ("kind", "is_once"), [(nn.Embedding, True), (Scaled, True), (Other, False)]
)
def test_a_tied_weight_is_in_memory_once_where_the_embedding_only_looks_up(kind, is_once):
    skip_without("pyengine")
    model: Any = random_model("llama", tie_word_embeddings=True)
    size = model.config.vocab_size, model.config.hidden_size
    embedding = kind(*size)
    embedding.weight = model.lm_head.weight
    model.set_input_embeddings(embedding)
    weight = weakref.ref(embedding.weight)
    del embedding
    tokens = torch.tensor([[3, 9, 27, 81, 50]])
    with torch.no_grad():
        expected = model(tokens).logits
        prepack_linears(model, lambda _shape, _weights: "pyengine")
        torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=1e-5)
        looked_up = model.get_input_embeddings()
        torch._dynamo.reset()
        graph = torch.compile(looked_up, fullgraph=True, backend="aot_eager")
        assert torch.equal(graph(tokens), looked_up(tokens))
    gc.collect()
    assert (weight() is None) == is_once
    assert looked_up.weight.shape == size
