"""Products in 8-bit floats: torch's product against float64, checkpoints, and refused devices."""

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.models.decoder import cuda_kernels
from pyengine.models.decoder.cuda_kernels import CudaKernels
from pyengine.models.decoder.float8 import (
    DTYPE,
    Float8Product,
    Float8SquareProduct,
    Float8Weight,
    quantise_rows,
)
from pyengine.models.decoder.kernel_sets import KernelSettings, check_rounded, kernel_set
from pyengine.models.decoder.loading import open_model
from pyengine.models.decoder.spec import Experts
from pyengine.models.decoder.torch_kernels import TorchExperts, TorchKernels, TorchProduct
from tests.support.kernels import interpreted, needs_triton, run_apart
from tests.unit.models import test_packed_bytes as checkpoints
from tests.unit.models.decoder.steps import CPU, Runner
from tests.unit.models.decoder.tiny_models import Tiny, save

CUDA = torch.device("cuda:0")
FP8 = KernelSettings(quantization="fp8")
TOKENS = [9, 44, 3, 71, 5, 5, 90, 12]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: (9, 0))


def float8_kernels(quantization: Any = "none") -> CudaKernels:
    """The kernel set, as if the CPU were a GPU with 8-bit floats."""
    with (
        patch.object(cuda_kernels, "_multiplies_float8", lambda _device: True),
        patch("pyengine.kernels.has_kernels", lambda _device: True),
    ):
        return CudaKernels(CPU, torch.float32, quantization)


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
    layer = Float8Product(Float8Weight(codes, scales), linear.bias)
    for count in (7, 1):
        rows = torch.randn(count, 96).bfloat16()
        got = layer.multiply(rows)
        assert got.dtype == torch.bfloat16 and got.shape == (count, 48)
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
    weight = Float8Weight(torch.randn(32, 64).to(DTYPE), torch.full((32, 1), 0.25))
    Float8Product(weight, None).multiply(torch.randn(5, 64).bfloat16())
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
        float((ours * units * scales.T - exact).norm() / exact.norm()) for ours in (rounded, sums)
    ]
    assert 0.03 < errors[0] < errors[1] < 1.05 * errors[0]


def logits(folder: Path, kernels: TorchKernels) -> torch.Tensor:
    runner = Runner(open_model(folder).decoder(kernels))
    sequence = runner.add(TOKENS)
    runner.step((sequence, len(TOKENS)))
    return torch.stack(sequence.logits)


def as_floats(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    """The same model with the numbers that its codes stand for."""
    target = folder.with_name("floats")
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if "weight_scale" not in name}
    tensors |= {f"{layer}.weight": weight.contiguous() for layer, weight in weights.items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    del settings["quantization_config"]
    (target / "config.json").write_text(json.dumps(settings))
    return target


def compare(name: str) -> None:
    """In the interpreter: a checkpoint's logits are near those of its weights in floats."""
    case = next(item for item in checkpoints.CASES if item.id == name)
    settings, save, family = case.values
    with tempfile.TemporaryDirectory() as path, interpreted():
        folder = Path(path) / "packed"
        weights = checkpoints.save(folder, settings, save, family)
        floats = as_floats(folder, weights)
        expected = logits(floats, TorchKernels(CPU, torch.float32))
        kernels = float8_kernels()
        layer = open_model(folder).decoder(kernels)._layers[0]
        is_square = "blocks" in name or name == "with biases"
        kind = Float8SquareProduct if is_square else Float8Product
        assert type(layer._mixer._qkv.product) is kind  # type: ignore[union-attr]
        actual = logits(folder, kernels)
    assert 0 < (actual - expected).norm() < 0.12 * expected.norm()


@needs_triton
@pytest.mark.parametrize("name", ["with biases", "FP8, one scale", "float-quantized by channels"])
def test_checkpoints_are_multiplied_as_they_are(name: str) -> None:
    run_apart(__name__, "compare", name, TRITON_INTERPRET="1")


def test_squares_of_other_sizes_are_read_as_floats(tmp_path: Path) -> None:
    settings = {**checkpoints.BLOCKS, "weight_block_size": [64, 64]}

    def blocks(outputs: int, inputs: int) -> tuple[int, int]:
        return -(-outputs // 64), -(-inputs // 64)

    checkpoints.save(tmp_path, settings, checkpoints.float8(blocks, "weight_scale_inv", 64))
    sets = (float8_kernels(), TorchKernels(CPU, torch.float32))
    actual, expected = (
        open_model(tmp_path).decoder(kernels)._layers[0]._mixer._out.product for kernels in sets
    )
    assert isinstance(actual, TorchProduct) and isinstance(expected, TorchProduct)
    assert torch.equal(actual.weight, expected.weight)


def test_codes_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, checkpoints.SINGLE, checkpoints.CASES[2].values[1])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{checkpoints.UP}.weight"].view(torch.uint8)[3, 5] = checkpoints.NAN
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"up_proj\.weight.* hold NaN or infinity"):
        open_model(tmp_path).decoder(float8_kernels())


def test_floats_are_rounded_except_those_of_heads_and_routers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    save(Tiny("mixtral", "mixtral", {**sizes, "tie_word_embeddings": False}), tmp_path)
    kernels = float8_kernels("fp8")
    decoder = open_model(tmp_path).decoder(kernels)
    check_rounded(kernels, FP8, "it")
    assert type(decoder._head) is type(decoder._embedding) is TorchProduct
    for layer, spec in zip(decoder._layers, decoder.spec.layers, strict=True):
        assert isinstance(spec.feed_forward, Experts)
        mixer, experts = layer._mixer, layer._feed_forward
        assert type(mixer._out.product) is Float8Product
        assert type(experts._router.product) is TorchProduct  # type: ignore[union-attr]
        own = experts._experts  # type: ignore[union-attr]
        assert isinstance(own, TorchExperts) and own.down.scales is not None
        exact = open_model(tmp_path).decoder(TorchKernels(CPU, torch.float32))
        first: Any = exact._layers[0]._feed_forward
        if layer is decoder._layers[0]:
            error = own.down.weight.float() * own.down.scales - first._experts.down.weight
            assert error.norm() < 0.04 * first._experts.down.weight.norm()


def test_a_model_of_other_sizes_is_refused_by_name(tmp_path: Path) -> None:
    sizes = {"hidden_size": 72, "head_dim": 10, "intermediate_size": 40}
    save(Tiny("llama", "llama", sizes), tmp_path)
    kernels = float8_kernels("fp8")
    open_model(tmp_path).decoder(kernels)
    with pytest.raises(ConfigurationError, match="'fp8': a model has no linear layer"):
        check_rounded(kernels, FP8, "a model")


def test_devices_that_do_not_multiply_8_bit_floats_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigurationError, match="'fp8' needs a CUDA device, the device is cpu"):
        kernel_set(CPU, "float32", FP8)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: (8, 6))
    with pytest.raises(ConfigurationError, match=r"8\.9 or later, cuda:0 has 8\.6: leave quant"):
        kernel_set(CUDA, "bfloat16", FP8)
    with pytest.raises(ConfigurationError, match="'int8' runs on cpu, the device is cuda:0: take"):
        kernel_set(CUDA, "bfloat16", KernelSettings(quantization="int8"))


def test_a_device_that_does_has_them(hopper: None) -> None:
    assert isinstance(kernel_set(CUDA, "bfloat16", FP8), CudaKernels)
