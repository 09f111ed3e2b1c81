"""Packed checkpoints give the decoder of the numbers that their codes stand for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pyengine.attention.cpu import CpuBackend
from pyengine.cpu import CpuAttention
from pyengine.cpu.threads import kernel_threads
from pyengine.errors import ModelLoadError
from pyengine.models.decoder.cpu_kernels import CpuKernels
from pyengine.models.decoder.cpu_products import OrderedWeight
from pyengine.models.decoder.loading import open_model
from pyengine.models.decoder.torch_kernels import TorchKernels
from tests.unit.models import test_packed_bytes as eight_bits
from tests.unit.models import test_packed_checkpoints as four_bits
from tests.unit.models.decoder.steps import CPU, Runner
from tests.unit.models.decoder.test_divided import check as check_ranks

_TOKENS = [9, 44, 3, 71, 5, 5, 90, 12]
_FOUR = four_bits.CASES
_EIGHT = eight_bits.CASES


def logits(folder: Path, kernels: Any, *backend: Any) -> torch.Tensor:
    runner = Runner(open_model(folder).decoder(kernels), *backend)
    sequence = runner.add(_TOKENS)
    runner.step((sequence, len(_TOKENS)))
    return torch.stack(sequence.logits)


def as_floats(folder: Path, target: Path, weights: dict[str, torch.Tensor]) -> Path:
    """The same model with floats: those of the file, and `weights` of packed layers."""
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    packed = tuple(f"{layer}." for layer in weights)
    floats = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(packed) or name.endswith(".bias")
    }
    floats |= {f"{layer}.weight": weight.contiguous() for layer, weight in weights.items()}
    save_file(floats, target / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    del settings["quantization_config"]
    (target / "config.json").write_text(json.dumps(settings))
    return target


def test_ranks_divide_the_floats_of_packed_weights(tmp_path: Path) -> None:
    four_bits.save(tmp_path, four_bits.AWQ, four_bits.Layer.awq)
    check_ranks(tmp_path, 2, "torch", [_TOKENS[:5]])


@pytest.mark.skipif(not CpuAttention.is_fast(), reason="no AVX2 with FMA")
def test_groups_with_inputs_in_another_order_stay_packed(tmp_path: Path) -> None:
    settings = four_bits.GPTQ | {"desc_act": True}
    four_bits.save(tmp_path, settings, four_bits.Layer.gptq, is_ordered=False)
    decoder = open_model(tmp_path).decoder(CpuKernels(kernel_threads(1)))
    layer: Any = decoder._layers[0]
    assert isinstance(layer._mixer._out.product.packed, OrderedWeight)
    joined = layer._mixer._qkv.product.products
    assert [type(weight.packed) for weight in joined] == [OrderedWeight] * 3


def check(folder: Path, tmp_path: Path, weights: dict[str, torch.Tensor], limit: float) -> None:
    kernels = TorchKernels(CPU, torch.float32)
    expected = logits(as_floats(folder, tmp_path / "floats", weights), kernels)
    actual = logits(folder, kernels)
    assert (actual - expected).norm() <= 1e-4 * expected.norm()
    if CpuAttention.is_fast():
        for dtype, more in (("float32", 0.0), ("bfloat16", 0.02)):
            ours = CpuKernels(kernel_threads(1), dtype=dtype)
            packed = logits(folder, ours, CpuBackend, getattr(torch, dtype))
            assert (packed.float() - expected).norm() <= (limit + more) * expected.norm()


@pytest.mark.parametrize(("settings", "pack", "layer"), _FOUR)
def test_four_bits(settings: Any, pack: Any, layer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    weights = four_bits.save(folder, settings, pack, **layer)
    check(folder, tmp_path, weights, 0.05)


@pytest.mark.parametrize(("settings", "tensors_of", "family"), _EIGHT)
def test_eight_bits(settings: Any, tensors_of: Any, family: str, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    weights = eight_bits.save(folder, settings, tensors_of, family)
    check(folder, tmp_path, weights, 0.05)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop(f"{four_bits.UP}.scales"), r"lack .*up_proj\.scales"),
        (lambda tensors: tensors.pop(f"{four_bits.UP}.qweight"), r"lack .*up_proj\.weight"),
        (
            lambda tensors: tensors.update({f"{four_bits.UP}.qzeros": torch.zeros(3, 32).int()}),
            r"up_proj\.qzeros .* \[3, 32\], and config\.json asks for \[4, 32\]",
        ),
        (lambda tensors: tensors.update({f"{four_bits.UP}.codes": torch.zeros(3)}), "codes"),
    ],
)
def test_tensors_of_packed_layers_are_accounted_for(
    change: Any, named: str, tmp_path: Path
) -> None:
    four_bits.save(tmp_path, four_bits.AWQ, four_bits.Layer.awq)
    open_model(tmp_path)
    four_bits.damaged(tmp_path, change)
    with pytest.raises(ModelLoadError, match=named):
        open_model(tmp_path)


def test_an_order_of_groups_that_the_configuration_denies_is_refused(tmp_path: Path) -> None:
    four_bits.save(tmp_path, four_bits.GPTQ, four_bits.Layer.gptq)
    open_model(tmp_path)
    up = four_bits.UP
    four_bits.damaged(tmp_path, lambda tensors: tensors[f"{up}.g_idx"][:40].fill_(1))
    with pytest.raises(ModelLoadError, match=r"up_proj\.g_idx .* desc_act=false"):
        open_model(tmp_path)
