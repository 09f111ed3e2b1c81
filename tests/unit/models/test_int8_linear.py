"""8-bit layers: exact products of integers, the same bits in every batch, and who cannot."""

import gc
import os
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from pyengine.config import EngineSettings
from pyengine.errors import ConfigurationError
from pyengine.models import int8_linear as encodings
from pyengine.models.int8_linear import (
    HALVES,
    SIGNED,
    UNSIGNED,
    Int8Embedding,
    Int8Linear,
    choose_encoding,
    digits,
    is_exact,
    quantise,
)
from pyengine.models.quantization import quantise_model
from tests.unit.executor.hand_made import random_model

pytestmark = [
    pytest.mark.levels,
    pytest.mark.skipif(
        not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
    ),
]
CPU = torch.device("cpu")


def integers(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Written out: the numbers in int64, the scales in float64."""
    scales = [max(*map(abs, row), 1e-12) / 127 for row in rows.float().tolist()]
    numbers = [
        [round(x / s) for x in row] for row, s in zip(rows.float().tolist(), scales, strict=True)
    ]
    return torch.tensor(numbers), torch.tensor(scales, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_quantised_by_its_largest_number(dtype):
    torch.manual_seed(0)
    rows = (torch.randn(9, 40) * torch.logspace(-6, 6, 9)[:, None]).to(dtype)
    rows[4] = 0
    numbers, scales = quantise(rows)
    expected, exact = integers(rows)
    assert numbers.dtype == torch.int8
    assert (numbers - expected).abs().max() <= 1  # a half, up to the last bit of the scale
    torch.testing.assert_close(scales.double(), exact, rtol=1e-6, atol=0)
    assert numbers.abs().amax(1).tolist() == [127] * 4 + [0] + [127] * 4
    error = (numbers * scales - rows.float()).abs().amax(1)
    assert (error <= 0.5001 * scales.flatten()).all()


def number_of(encoding, numbers):
    """The value of encoded digits, in int64."""
    return sum(part.long() - encoding.zero for part in numbers.chunk(encoding.parts))


@pytest.fixture(params=[None, HALVES, UNSIGNED, SIGNED], ids=["chosen", "halves", "full", "signed"])
def encoding(request, monkeypatch):
    """The one that is chosen, halves, and the others where their products are exact."""
    if request.param is None:
        return choose_encoding()
    if request.param is not HALVES and not is_exact(request.param):
        pytest.skip(f"products of {request.param.name} digits saturate at this level")
    monkeypatch.setattr("pyengine.models.int8_linear.choose_encoding", lambda: request.param)
    return request.param


@pytest.mark.parametrize("encoding", [SIGNED, UNSIGNED, HALVES], ids=lambda item: item.name)
def test_every_digit_has_a_code_and_pairs_of_halves_fit_16_bits(encoding):
    every = torch.arange(-127, 128).float()[None]
    numbers = encoding.encode(every)
    assert numbers.dtype == (torch.uint8 if encoding.zero else torch.int8)
    assert torch.equal(number_of(encoding, numbers), every.long())
    assert HALVES.encode(every).max() * 2 * 127 <= 32_767


def test_largest_digits_times_largest_weights_are_exact():
    """Pairs of products that were added up in 16 bits would saturate: errors of 0.7."""
    encoding = choose_encoding()
    for rows, size, channels in ((1, 24, 17), (5, 576, 200), (64, 1536, 64), (2, 4096, 32)):
        signs = torch.ones(channels, 1)
        signs[::3] = -1
        weights = (127 * signs).expand(-1, size).to(torch.int8)
        both = torch.full((rows, size), 127.0)
        both[rows // 2 :] = -127
        exact = both.double() @ weights.double().T
        prepacked, ones = encodings.pack(weights), torch.ones(channels)
        product = encoding.multiply(encoding.encode(both), prepacked, ones)
        torch.testing.assert_close(product.double(), exact, rtol=2**-23, atol=0)


@pytest.mark.parametrize(
    ("exact", "slow", "expected"),
    [
        ({SIGNED, UNSIGNED, HALVES}, (), SIGNED),  # AMX
        ({SIGNED, UNSIGNED, HALVES}, (SIGNED,), UNSIGNED),  # VNNI
        ({SIGNED, HALVES}, (SIGNED,), HALVES),  # AVX-512 without VNNI
        ({HALVES}, (), HALVES),  # AVX2
        ({SIGNED}, (SIGNED,), SIGNED),
    ],
)
def test_the_fastest_exact_encoding_is_chosen(monkeypatch, exact, slow, expected):
    monkeypatch.setattr(encodings, "is_exact", lambda item: item in exact)
    monkeypatch.setattr(encodings, "_seconds", lambda item: 1.0 if item in slow else 0.001)
    assert choose_encoding.__wrapped__() == expected


def test_a_processor_without_an_exact_product_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(encodings, "is_exact", lambda _: False)
    with pytest.raises(ConfigurationError, match="wrong products of 8-bit integers"):
        choose_encoding.__wrapped__()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_digits_are_sixteen_bits(dtype, encoding):
    torch.manual_seed(0)
    rows = (torch.randn(9, 40) * torch.logspace(-6, 6, 9)[:, None]).to(dtype)
    rows[4] = 0
    numbers, scales = digits(rows, encoding)
    first, second = number_of(encoding, numbers).double().chunk(2)
    assert torch.equal(first, quantise(rows)[0].double())
    found = (first + second / 254) * scales.double()
    error = (found - rows.double()).abs().amax(1, keepdim=True)
    assert (error <= scales / 500).all()
    assert (second.abs().amax(1) > 100).sum() == 8


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 24), (5, 24), (1, 40, 24), (2, 3, 24), (300, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_of_the_integers(shape, bias, dtype, encoding):
    torch.manual_seed(0)
    plain, rows = nn.Linear(24, 17, bias=bias).to(dtype), torch.randn(shape).to(dtype)
    weight, by_channel = quantise(plain.weight.detach())
    numbers, by_row = digits(rows.flatten(0, -2), encoding)
    first, second = (number_of(encoding, numbers) @ weight.long().T).double().chunk(2)
    exact = (first + second / 254) * by_row.double() * by_channel.double().T
    wide = weight.double() * by_channel  # nothing is lost but in the weight
    torch.testing.assert_close(exact, rows.double().flatten(0, -2) @ wide.T, atol=1e-3, rtol=1e-3)
    if bias:
        exact += plain.bias.detach().double()
    with torch.inference_mode():
        found = Int8Linear(plain)(rows)
    assert (found.shape, found.dtype) == ((*shape[:-1], 17), dtype)
    error = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.double().flatten(0, -2), exact, atol=error, rtol=error)


@pytest.mark.parametrize("size", [(64, 48), (576, 200)])
def test_a_row_has_the_same_bits_in_every_batch(size, encoding):
    torch.manual_seed(0)
    layer, rows = Int8Linear(nn.Linear(*size)), torch.randn(70, size[0])
    with torch.inference_mode():
        together = layer(rows)
        for first, count in ((0, 1), (1, 2), (3, 5), (8, 32), (40, 30)):
            assert torch.equal(layer(rows[first : first + count]), together[first : first + count])


@pytest.mark.parametrize("size", [96, 1000])
def test_every_encoding_that_is_exact_gives_the_same_bits(size):
    torch.manual_seed(0)
    layer, rows = Int8Linear(nn.Linear(size, 40)), torch.randn(33, size)
    with torch.inference_mode():
        layer.encoding = HALVES
        halves = layer(rows)
        for encoding in filter(is_exact, (SIGNED, UNSIGNED)):
            layer.encoding = encoding
            assert torch.equal(layer(rows), halves)


def test_no_product_goes_through_loops_in_c():
    layer = """
import torch
from pyengine.models.int8_linear import choose_encoding
from pyengine.models.int8_linear import Int8Linear
layer, rows = Int8Linear(torch.nn.Linear(96, 40)), torch.randn(33, 96)
print("chosen:", layer.encoding.name, flush=True)
with torch.inference_mode():
    layer(rows)
"""
    environment = os.environ | {"ONEDNN_VERBOSE": "1"}
    run = [sys.executable, "-c", layer]
    said = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    (product,) = [line for line in said.partition("chosen:")[2].splitlines() if ",matmul," in line]
    assert ",exec,cpu,matmul," in product
    assert ",ref" not in product


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_model_answers_nearly_as_before_and_gives_its_weights_back(is_tied):
    model: Any = random_model("llama", tie_word_embeddings=is_tied, initializer_range=0.02)
    tokens = torch.tensor([[3, 9, 27, 81, 50]])
    with torch.no_grad():
        expected = model(tokens).logits.log_softmax(-1)
        kept = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
        head = weakref.ref(model.lm_head.weight)
        assert quantise_model(model, CPU, "int8") == 3 * 7 + 1
        gc.collect()
        assert kept() is None
        assert head() is None
        assert isinstance(model.get_input_embeddings(), Int8Embedding) == is_tied
        found = model(tokens).logits.log_softmax(-1)
    error = (found - expected).abs()
    assert 0 < error.max() < 0.02
    assert quantise_model(model, CPU, "int8") == 0


def test_a_graph_gives_the_same_bits():
    torch.manual_seed(0)
    model = nn.Sequential(Int8Linear(nn.Linear(8, 6)), nn.ReLU(), Int8Linear(nn.Linear(6, 4)))
    rows = torch.randn(5, 8)
    torch._dynamo.reset()
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        assert torch.equal(graph(rows), model(rows))


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("gpt2", {}, r"transformer\.h\.0\.attn\.c_attn\.weight are those of a Conv1D"),
        ("qwen3_moe", {"num_experts": 4}, r"are those of a Qwen3Moe\w+"),
    ],
)
def test_other_layers_are_refused_by_name_and_nothing_has_changed(family, settings, words):
    model: Any = random_model(family, **settings)
    before = [type(module) for module in model.modules()]
    with pytest.raises(ConfigurationError, match=words):
        quantise_model(model, CPU, "int8")
    assert [type(module) for module in model.modules()] == before


def test_it_is_for_the_cpu_and_one_process():
    with pytest.raises(ConfigurationError, match="runs on cpu, the device is cuda"):
        quantise_model(nn.Linear(2, 2), torch.device("cuda"), "int8")
    with pytest.raises(
        ConfigurationError,
        match=r"quantization='int3': it must be 'int8' or 'int4' or 'fp8' or 'none' or None",
    ):
        EngineSettings(quantization="int3")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="quantization='int8' does not go together"):
        EngineSettings(quantization="int8", tensor_parallel_size=2)
