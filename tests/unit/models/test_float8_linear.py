"""Layers in 8-bit floats: torch's product against float64, which layers stay, and who cannot."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from pyengine.errors import ConfigurationError
from pyengine.models.float8_linear import (
    DTYPE,
    Float8Linear,
    Float8SquareLinear,
    quantise_linears_to_fp8,
    quantise_rows,
    take_over_fp8,
)
from pyengine.models.grouped_experts import experts_of, use_grouped_experts
from pyengine.models.linear import FusedLinear
from pyengine.models.quantization import quantise_model
from tests.gpu.answers import prompts
from tests.gpu.models import random_model
from tests.gpu.test_quantization import NEAR
from tests.support.kernels import needs_triton, run_apart
from tests.unit.kernels.test_grouped_linear import exact_rows

CUDA = torch.device("cuda:0")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: (9, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_is_quantised_by_its_largest_number(dtype):
    torch.manual_seed(0)
    rows = (torch.randn(9, 64) * torch.logspace(-3, 3, 9)[:, None]).to(dtype)
    rows[4] = 0
    codes, scales = quantise_rows(rows)
    assert codes.dtype == DTYPE and scales.shape == (9, 1)
    error = (codes.float() * scales - rows.float()).abs()
    # Four bits of precision, and a fixed point below 2^-6 of the scale.
    assert (error <= rows.float().abs() / 16 + scales * 2**-10).all()
    assert codes.float().abs().amax(1).tolist() == [448] * 4 + [0] + [448] * 4


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_layer_multiplies_by_its_weight(with_bias):
    torch.manual_seed(0)
    linear = nn.Linear(96, 48, bias=with_bias, dtype=torch.bfloat16)
    codes, scales = quantise_rows(linear.weight.detach())
    layer = Float8Linear(codes, scales.flatten(), linear.bias)
    assert layer.weight.shape == (48, 96)
    for shape in ((1, 7, 96), (1, 96)):
        rows = torch.randn(shape).bfloat16()
        got = layer(rows)
        assert got.dtype == torch.bfloat16 and got.shape == (*shape[:-1], 48)
        digits, units = quantise_rows(rows)
        exact = (digits.double() * units) @ (codes.double() * scales).T
        if with_bias:
            exact += linear.bias.double()
        torch.testing.assert_close(got.double(), exact, rtol=2**-7, atol=2**-7)
        near = linear(rows).double()
        assert (got.double() - near).norm() < 0.06 * near.norm()


def test_products_are_summed_in_the_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    product = Mock(wraps=torch._scaled_mm)
    monkeypatch.setattr(torch, "_scaled_mm", product)
    layer = Float8Linear(torch.randn(32, 64).to(DTYPE), torch.tensor(0.25))
    layer(torch.randn(5, 64).bfloat16())
    assert product.call_args.kwargs["use_fast_accum"] is True


@pytest.mark.parametrize("inputs", [4096, 14336])
def test_sums_of_14_bits_add_little_to_the_error_of_8_bit_floats(inputs: int) -> None:
    """As on Hopper: each instruction adds the products of 32 inputs to sums that it truncates."""
    torch.manual_seed(0)
    rows, weight = torch.randn(8, inputs), torch.randn(64, inputs)
    (digits, units), (codes, scales) = quantise_rows(rows), quantise_rows(weight)
    sums = torch.zeros(8, 64, dtype=torch.float64)
    for part in range(0, inputs, 32):
        of_part = (item[:, part : part + 32].double() for item in (digits, codes))
        left, right = of_part
        mantissas, exponents = torch.frexp(sums + left @ right.T)
        sums = torch.ldexp(torch.trunc(mantissas * 2**14) / 2**14, exponents)
    exact = rows.double() @ weight.double().T
    rounded = digits.double() @ codes.double().T
    errors = [
        float((found * units * scales.T - exact).norm() / exact.norm()) for found in (rounded, sums)
    ]
    assert 0.03 < errors[0] < errors[1] < 1.05 * errors[0]


def test_one_scale_is_that_of_every_output():
    torch.manual_seed(0)
    codes, rows = torch.randn(32, 64).to(DTYPE), torch.randn(5, 64).bfloat16()
    whole = Float8Linear(codes, torch.tensor(0.25))
    each = Float8Linear(codes, torch.full((32,), 0.25))
    assert torch.equal(whole(rows), each(rows))


def test_head_and_embedding_stay():
    model = random_model("qwen3", tie_word_embeddings=False)
    head, embedding = model.lm_head, model.get_input_embeddings()
    assert quantise_linears_to_fp8(model) == 7 * 3
    assert model.lm_head is head and type(head) is nn.Linear
    assert model.get_input_embeddings() is embedding
    attention = model.model.layers[0].self_attn
    assert isinstance(attention.q_proj, FusedLinear)
    assert type(attention.o_proj) is Float8Linear
    linears = [name for name, item in model.named_modules() if type(item) is nn.Linear]
    assert linears == ["lm_head"]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_get_scales_and_routers_stay(family):
    model = random_model(family)
    block = model.model.layers[0].mlp
    experts, before = block.experts, block.experts.down_proj.detach()
    if experts.is_transposed:
        before = before.transpose(1, 2)
    others = [item for item in model.modules() if "Router" in type(item).__name__]
    weights = [item.weight for item in others]
    assert quantise_linears_to_fp8(model) == 3 + 4 * 3
    assert [item.weight for item in others] == weights and len(others) == 3
    assert experts.down_proj.dtype == DTYPE and not experts.is_transposed
    after = experts.down_proj.float() * experts.down_proj_scales
    assert (after - before.float()).norm() < 0.04 * before.float().norm()


def log_probs(model: Any) -> torch.Tensor:
    """Of the next token at each position of a prompt, by torch's own attention."""
    model.set_attn_implementation("eager")
    tokens = torch.tensor([prompts()[1]])
    with torch.inference_mode():
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
    return logits.double().log_softmax(-1).gather(1, tokens[0, 1:, None])


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
def test_the_bound_of_the_check_on_a_gpu_is_between_right_and_wrong_weights(family):
    exact, wrong, model = (random_model(family) for _ in range(3))
    quantise_linears_to_fp8(model)
    for experts, own in zip(experts_of(model), experts_of(wrong), strict=True):
        for name in ("gate_up_proj", "down_proj"):  # by torch: in floats again
            weight = (
                getattr(experts, name).float() * getattr(experts, f"{name}_scales")
            ).bfloat16()
            weight = weight.mT.contiguous() if own.is_transposed else weight
            setattr(experts, name, nn.Parameter(weight, requires_grad=False))
        experts.is_transposed = own.is_transposed
    for item in wrong.modules():
        if type(item) is nn.Linear:
            item.weight.data = item.weight.roll(1, 0)
    expected = log_probs(exact.float())
    assert (log_probs(model) - expected).abs().mean() * 1.5 < NEAR
    assert (log_probs(wrong) - expected).abs().mean() > NEAR * 1.5


def test_layers_of_other_sizes_stay():
    """torch's product has multiples of 16 only."""
    model = random_model("llama", intermediate_size=504)
    assert quantise_linears_to_fp8(model) == 4 * 3
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear


def test_a_model_of_other_sizes_is_refused_by_name(hopper):
    model: Any = random_model("llama", hidden_size=72, head_dim=10, intermediate_size=40)
    with pytest.raises(ConfigurationError, match="'fp8': LlamaForCausalLM has no linear layer"):
        quantise_model(model, CUDA, "fp8")


def test_weights_that_are_none_of_a_linear_layer_are_refused_by_name(hopper):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=4, vocab_size=96))
    with pytest.raises(ConfigurationError, match=r"c_attn.weight are those of a Conv1D"):
        quantise_model(model, CUDA, "fp8")


def test_devices_that_do_not_multiply_8_bit_floats_are_refused(monkeypatch):
    model = random_model("llama")
    with pytest.raises(ConfigurationError, match=r"8\.9 or later, the device is cpu: take 'int8'"):
        quantise_model(model, torch.device("cpu"), "fp8")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: (8, 6))
    with pytest.raises(ConfigurationError, match=r"8\.9 or later, cuda:0 has 8\.6: leave quant"):
        quantise_model(model, CUDA, "fp8")
    with pytest.raises(ConfigurationError, match="'int8' runs on cpu, the device is cuda:0: take"):
        quantise_model(model, CUDA, "int8")


def test_a_device_that_does_is_asked(hopper):
    assert quantise_model(random_model("llama"), CUDA, "fp8") == 21


def squares_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in 8-bit floats, and the scales of its squares."""
    rows, columns = weight.shape
    high, wide = -(-rows // 128), -(-columns // 128)
    whole = torch.zeros(high * 128, wide * 128)
    whole[:rows, :columns] = weight.float()
    parts = whole.view(high, 128, wide, 128)
    scales = parts.abs().amax((1, 3)) / 448
    codes = (parts / scales[:, None, :, None]).view(high * 128, wide * 128)[:rows, :columns]
    return codes.to(DTYPE), scales


def as_transformers_has_it(squares: tuple[int, int] | None) -> tuple[Any, dict[str, torch.Tensor]]:
    """A mixture of experts in 8-bit floats, and its weights in float32."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    torch.manual_seed(0)
    sizes = {"hidden_size": 160, "head_dim": 40, "intermediate_size": 144, "num_hidden_layers": 1}
    model = random_model("mixtral", **sizes, num_local_experts=3, num_experts_per_tok=2)
    weights = {}
    for name, weight in model.named_parameters():
        weights[name] = weight.detach().float()
        if weight.ndim > 1:
            parts = 2.0 ** torch.randint(-6, 1, (*weight.shape[:-2], -(-weight.shape[-2] // 72), 1))
            factors = parts.repeat_interleave(72, -2)[..., : weight.shape[-2], :]
            weights[name] *= factors  # scales differ
    settings = FineGrainedFP8Config(weight_block_size=squares)
    replace_with_fp8_linear(model, ["lm_head"], settings, pre_quantized=True)
    state = {}
    for name, item in model.named_parameters():
        if item.dtype == DTYPE:
            scales_name = f"{name}_scale_inv"
            own = weights[name]
            if squares is not None:
                pairs = [squares_of(each) for each in own.reshape(-1, *own.shape[-2:])]
                codes = torch.stack([pair[0] for pair in pairs]).view(own.shape)
                scales = torch.stack([pair[1] for pair in pairs])
                wide = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
                wide = wide[:, : own.shape[-2], : own.shape[-1]].reshape(own.shape)
            else:
                halves = 2 if "gate_up" in name else 1  # gate and up have one each
                parts = own.reshape(-1, halves, own.shape[-2] // halves, own.shape[-1])
                scales = parts.abs().amax((2, 3), keepdim=True) / 448
                codes = (parts / scales).to(DTYPE).view(own.shape)
                wide = scales.expand(parts.shape).reshape(own.shape)
                scales = scales.flatten(2)
            weights[name] = codes.float() * wide
            given = scales if "experts" in name else scales.reshape(scales.shape[1:])
            target = dict(model.named_parameters())[scales_name]
            state[name], state[scales_name] = codes, given.reshape(target.shape)
        elif not name.endswith("scale_inv"):
            state[name] = item.detach()
    model.load_state_dict(state, assign=True, strict=True)
    return model, weights


def take_over(name: str) -> None:
    """In the interpreter: layers and experts multiply by the weights that transformers has."""
    squares = (128, 128) if name == "squares" else None
    model, weights = as_transformers_has_it(squares)
    assert take_over_fp8(model) == 4 + 1
    assert use_grouped_experts(model)
    layer = model.model.layers[0]
    kinds = {None: Float8Linear, (128, 128): Float8SquareLinear}
    assert type(layer.self_attn.o_proj) is kinds[squares]
    rows = exact_rows(5, 160).bfloat16()
    for own in ("q_proj", "k_proj", "v_proj", "o_proj"):
        product = getattr(layer.self_attn, own)
        weight = weights[f"model.layers.0.self_attn.{own}.weight"]
        exact = rows.float() @ weight.T
        assert (product(rows).float() - exact).norm() < 0.05 * exact.norm(), own
    experts = layer.mlp.experts
    chosen, factors = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2]]), torch.rand(5, 2)
    gate_up, down = (
        weights[f"model.layers.0.mlp.experts.{own}"] for own in ("gate_up_proj", "down_proj")
    )
    expected = torch.zeros(5, 160)
    for row in range(5):
        for expert, factor in zip(chosen[row].tolist(), factors[row], strict=True):
            gate, up = (gate_up[expert] @ rows[row].float()).chunk(2)
            expected[row] += factor * (down[expert] @ (nn.functional.silu(gate) * up))
    got = experts(rows, chosen, factors)
    # The interpreter rounds a few of the inner numbers wrongly (triton 3.9).
    assert (got.float() - expected).norm() < 0.2 * expected.norm()


@needs_triton
@pytest.mark.parametrize("scales", ["squares", "wholes"])
def test_layers_of_fp8_checkpoints_are_multiplied_here(scales):
    """transformers would download kernels for them."""
    run_apart(__name__, "take_over", scales, TRITON_INTERPRET="1")


def test_squares_of_other_sizes_are_left_to_transformers():
    from transformers.integrations.finegrained_fp8 import FP8Linear

    model = random_model("llama")
    attention = model.model.layers[0].self_attn
    attention.o_proj = FP8Linear(512, 512, block_size=(64, 64))
    assert take_over_fp8(model) == 0
    assert type(attention.o_proj) is FP8Linear
