"""Every tensor of a file is part of the model, known to have no effect, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pyengine.cpu.threads import kernel_threads
from pyengine.errors import ModelLoadError
from pyengine.models.decoder.checkpoint import Checkpoint
from pyengine.models.decoder.cpu_kernels import CpuKernels
from pyengine.models.decoder.families import TABLE
from pyengine.models.decoder.loading import open_model
from pyengine.models.decoder.torch_kernels import TorchKernels
from tests.support.processes import run_python
from tests.unit.models.decoder.steps import CPU, Runner
from tests.unit.models.decoder.test_families import Saved
from tests.unit.models.decoder.tiny_models import MODELS, Tiny, configuration_in

Tensors = dict[str, torch.Tensor]
_BY_NAME = {tiny.name: tiny for tiny in MODELS}
_TOKENS = [9, 44, 3, 71]


@pytest.fixture
def edited(saved: Saved, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a model's folder, whose tensors and configuration a function has changed."""

    def copied(name: str, change: Callable[[Tensors], object], **values: Any) -> Path:
        folder, _ = saved(_BY_NAME[name])
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            tmp_path / "model.safetensors",
        )
        settings = {**configuration_in(folder), **values}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        return tmp_path

    return copied


def logits(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    runner = Runner(open_model(folder).decoder(TorchKernels(CPU, dtype)), dtype=dtype)
    sequence = runner.add(_TOKENS)
    runner.step((sequence, len(_TOKENS)))
    return torch.stack(sequence.logits)


@pytest.mark.parametrize("family", sorted(TABLE))
def test_each_tensor_that_is_missing_is_named(
    family: str, edited: Callable[..., Path], first_of_family: list[Tiny], saved: Saved
) -> None:
    tiny = next(tiny for tiny in first_of_family if tiny.family == family)
    tensors = load_file(saved(tiny)[0] / "model.safetensors")
    names = [name for name in tensors if ".visual." not in name]
    for name in {names[0], names[len(names) // 3], names[-1]}:
        folder = edited(tiny.name, lambda tensors, name=name: tensors.pop(name))
        with pytest.raises(ModelLoadError) as caught:
            open_model(folder)
        assert "lack" in str(caught.value), name


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "gpt2", "gpt_oss"])
def test_a_tensor_of_another_shape_is_named(name: str, edited: Callable[..., Path]) -> None:
    def cut(tensors: Tensors) -> None:
        last = sorted(tensors)[-1]
        tensors[last] = tensors[last][:-1]

    with pytest.raises(ModelLoadError, match=r"have the shape \[.*config.json asks for \["):
        open_model(edited(name, cut))


@pytest.mark.parametrize("family", sorted(TABLE))
def test_a_tensor_that_no_model_of_the_family_has_is_named(
    family: str, edited: Callable[..., Path], first_of_family: list[Tiny]
) -> None:
    tiny = next(tiny for tiny in first_of_family if tiny.family == family)
    base = TABLE[family].names.layer.format(0)
    unknown = f"{base}self_attn.temperature"
    folder = edited(tiny.name, lambda tensors: tensors.update({unknown: torch.ones(3)}))
    with pytest.raises(ModelLoadError, match="temperature"):
        open_model(folder)


def test_layers_and_biases_that_the_configuration_leaves_out_are_named(
    edited: Callable[..., Path],
) -> None:
    with pytest.raises(ModelLoadError, match=r"layers\.2\."):
        open_model(edited("llama", lambda _: None, num_hidden_layers=2))
    with pytest.raises(ModelLoadError, match=r"bias"):
        open_model(edited("llama-biases", lambda _: None, attention_bias=False))
    with pytest.raises(ModelLoadError, match=r"k_norm"):
        open_model(edited("glm4_moe-norms", lambda _: None, use_qk_norm=False))


def test_tensors_without_effect_are_accepted(edited: Callable[..., Path]) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)

    open_model(edited("llama", add))


def test_layers_for_speculation_are_left_to_it(edited: Callable[..., Path]) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(2, 2)

    open_model(edited("deepseek_v3", add, num_nextn_predict_layers=1))
    with pytest.raises(ModelLoadError, match=r"layers\.3\.eh_proj"):
        open_model(edited("deepseek_v3", add, num_nextn_predict_layers=0))


def test_a_head_beside_a_tied_embedding_counts_if_it_differs(
    edited: Callable[..., Path], saved: Saved
) -> None:
    before = logits(saved(_BY_NAME["llama-tied"])[0])

    def add(tensors: Tensors, factor: float) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * factor

    same = edited("llama-tied", lambda tensors: add(tensors, 1.0))
    assert torch.equal(logits(same), before)
    other = edited("llama-tied", lambda tensors: add(tensors, 2.0))
    assert torch.allclose(logits(other), 2 * before)


def test_names_may_lack_their_base(edited: Callable[..., Path], saved: Saved) -> None:
    def strip(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)

    assert torch.equal(logits(edited("gpt2", strip)), logits(saved(_BY_NAME["gpt2"])[0]))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "granitemoe"])
def test_experts_may_be_in_one_tensor(name: str, edited: Callable[..., Path], saved: Saved) -> None:
    folder, model = saved(_BY_NAME[name])

    def stack(tensors: Tensors) -> None:
        tensors.clear()
        tensors.update({key: value.clone() for key, value in model.state_dict().items()})

    assert torch.equal(logits(edited(name, stack)), logits(folder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_converted(
    dtype: torch.dtype, edited: Callable[..., Path], saved: Saved
) -> None:
    def convert(tensors: Tensors) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    actual = logits(edited("gpt_oss", convert))
    expected = logits(saved(_BY_NAME["gpt_oss"])[0])
    assert (actual - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value: float, edited: Callable[..., Path]) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value

    folder = edited("llama", spoil)
    open_model(folder)  # headers are right
    for kernels in (TorchKernels(CPU, torch.float32), CpuKernels(kernel_threads(1))):
        with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj.*NaN or infinity"):
            open_model(folder).decoder(kernels)


def test_integers_are_refused(edited: Callable[..., Path]) -> None:
    def pack(tensors: Tensors) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.int8)

    with pytest.raises(ModelLoadError, match=r"up_proj.weight .* are I8"):
        open_model(edited("llama", pack))


@pytest.mark.parametrize("settings", [{"quant_method": "awq"}, {"quant_method": "x"}, 3])
def test_packing_that_the_file_has_not_is_refused_by_name(
    settings: object, edited: Callable[..., Path]
) -> None:
    folder = edited("llama", lambda _: None, quantization_config=settings)
    with pytest.raises(ModelLoadError, match="quantization_config"):
        open_model(folder)


_PEAK = """
import sys
from pathlib import Path
import torch
from pyengine.models.decoder.loading import open_model, open_model
from pyengine.models.decoder.ranks import Rank
from pyengine.models.decoder.torch_kernels import TorchKernels

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

folder = Path(sys.argv[1])
open_model(folder)
torch.ones(4) @ torch.ones(4)
before = memory("VmRSS")
kernels = TorchKernels(torch.device("cpu"), torch.float32)
decoder = open_model(folder).decoder(kernels, Rank(0, int(sys.argv[2])))
print(memory("VmHWM") - before)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_takes_the_model_and_one_tensor(ranks: int, tmp_path: Path) -> None:
    """A rank's part of the model, if it is divided."""
    hidden, middle, layers = 256, 4096, 12
    tensors = {
        "model.embed_tokens.weight": torch.ones(16, hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(hidden)
        for name in "qkvo":
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = torch.ones(hidden, hidden)
        for name in ("gate", "up"):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = torch.ones(middle, hidden)
        tensors[f"{prefix}mlp.down_proj.weight"] = torch.ones(hidden, middle)
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {
        "model_type": "llama",
        "vocab_size": 16,
        "hidden_size": hidden,
        "intermediate_size": middle,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    process = run_python(_PEAK, tmp_path, ranks)
    largest, own = middle * hidden * 4, num_bytes / ranks
    assert own * 0.9 < int(process.stdout) < own + 4 * largest


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_floats_without_scales_are_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    save_file({"model.x": codes.reshape(16, 16)}, tmp_path / "model.safetensors")
    actual = torch.from_numpy(Checkpoint(tmp_path).take("model.x", (16, 16)).read())
    assert torch.equal(actual.nan_to_num(7e7), codes.reshape(16, 16).float().nan_to_num(7e7))
