"""FP8 and W8A8 checkpoints: a layer multiplies by the weights of its checkpoint, in 8 bits."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pyengine.errors import ModelLoadError
from pyengine.models.decoder.packed import packed_layout
from pyengine.models.loader import load_model, model_properties
from pyengine.models.source import resolve_source
from tests.unit.executor.hand_made import random_model

NAN = 0x7F


def compressed(kind, weights, rows=None):
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": rows}
        },
        "ignore": ["lm_head"],
    }


def eight(number, strategy, **more):
    return {"num_bits": 8, "type": number, "symmetric": True, "strategy": strategy, **more}


ROWS = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}
UP = "model.layers.0.mlp.up_proj"
W8A8 = compressed("int-quantized", eight("int", "channel"), ROWS)
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
SINGLE = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def scaled(numbers, scales, block=None):
    """Numbers times their scales, one by one."""
    if block is None:
        return numbers * scales.float().reshape(-1, 1)
    rows, columns = (torch.arange(size) // block for size in numbers.shape)
    return numbers * scales.float()[rows][:, columns]


def float8(shape, name, block=None, dtype=torch.float32):
    """A layer of random floats of 8 bits: tensors and weight."""

    def tensors_of(outputs, inputs):
        codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8)
        codes[(codes & NAN) == NAN] = 0
        weight = codes.view(torch.float8_e4m3fn)
        scales = ((0.5 + torch.rand(shape(outputs, inputs))) / 4096).to(dtype)
        return {"weight": weight, name: scales}, scaled(weight.float(), scales, block)

    return tensors_of


def int8(shape, dtype=torch.bfloat16):
    def tensors_of(outputs, inputs):
        numbers = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
        scales = ((0.5 + torch.rand(shape(outputs, inputs))) / 512).to(dtype)
        return {"weight": numbers, "weight_scale": scales}, scaled(numbers.float(), scales)

    return tensors_of


def save(folder, settings, tensors_of, family="llama", **sizes):
    """A checkpoint of a random model; returns the weights of its packed layers by name."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 160, "intermediate_size": 288, "num_hidden_layers": 2, **sizes}
    model = random_model(family, tie_word_embeddings=False, **sizes)
    model.save_pretrained(folder)
    tensors, weights = load_file(folder / "model.safetensors"), {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name != "lm_head":
            stored, weights[name] = tensors_of(module.out_features, module.in_features)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{own}": tensor for own, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return weights


def channel(outputs, _inputs):
    return outputs, 1


def single(*_sizes):
    return (1,)


def blocks(outputs, inputs):
    return -(-outputs // 128), -(-inputs // 128)


CASES = [
    pytest.param(BLOCKS, float8(blocks, "weight_scale_inv", 128), "llama", id="FP8 in blocks"),
    pytest.param(BLOCKS, float8(blocks, "weight_scale_inv", 128), "qwen2", id="with biases"),
    pytest.param(SINGLE, float8(lambda *_: (), "weight_scale"), "llama", id="FP8, one scale"),
    pytest.param(
        compressed("float-quantized", eight("float", "tensor")),
        float8(single, "weight_scale", dtype=torch.bfloat16),
        "llama",
        id="float-quantized, one scale",
    ),
    pytest.param(
        compressed("float-quantized", eight("float", "channel")),
        float8(channel, "weight_scale", dtype=torch.bfloat16),
        "llama",
        id="float-quantized by channels",
    ),
    pytest.param(
        compressed("float-quantized", eight("float", "block", block_structure=[128, 128])),
        float8(blocks, "weight_scale", 128),
        "llama",
        id="float-quantized in blocks",
    ),
    pytest.param(W8A8, int8(channel), "llama", id="W8A8"),
    pytest.param(W8A8, int8(channel, torch.float32), "qwen2", id="W8A8 with biases"),
    pytest.param(
        compressed("int-quantized", eight("int", "tensor"), ROWS), int8(single), "llama", id="one"
    ),
]


def properties(folder):
    return model_properties(resolve_source(folder), load_model(folder, device="cpu"))


def test_stored_blocks_are_those_of_one_checkpoint(tmp_path):
    """Also where the 8-bit weights are the only difference."""
    save(tmp_path, W8A8, int8(channel))
    first = dict(properties(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{UP}.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    second = dict(properties(tmp_path))
    assert {name for name in first if first[name] != second[name]} == {"weights"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (BLOCKS | {"fmt": "e5m2"}, "FP8 with fmt='e5m2'"),
        (BLOCKS | {"weight_block_size": [128, 0]}, "FP8 with blocks of [128, 0]"),
        (BLOCKS | {"weight_block_size": 128}, "FP8 with blocks of 128"),
        (BLOCKS | {"weight_block_size": [1, 6]}, "FP8 with blocks of [1, 6]"),
        (compressed("float-quantized", eight("float", "group")), "strategy='group'"),
        (compressed("float-quantized", eight("float", "block")), "(FP8) with blocks of None"),
        (compressed("float-quantized", eight("float", "tensor", num_bits=4)), "num_bits=4"),
        (compressed("int-quantized", eight("int", "group"), ROWS), "strategy='group'"),
        (compressed("int-quantized", eight("int", "channel", symmetric=False)), "zero points"),
        (
            compressed("int-quantized", eight("int", "channel"), ROWS | {"num_bits": 4}),
            "activations of num_bits=4",
        ),
    ],
)
def test_other_layouts_are_named(settings, words):
    layout = packed_layout(settings)
    assert isinstance(layout, str) and words in layout


def without_scale(tensors):
    del tensors[f"{UP}.weight_scale_inv"]


def of_nan(tensors):
    tensors[f"{UP}.weight"].view(torch.uint8)[3, 5] = NAN


def of_infinity(tensors):
    tensors[f"{UP}.weight_scale_inv"][2, 1] = np.inf


def of_floats(tensors):
    tensors[f"{UP}.weight"] = torch.zeros(288, 160)


def of_other_blocks(tensors):
    tensors[f"{UP}.weight_scale_inv"] = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without_scale,
            rf"weights {UP}\.weight in .* are F8_E4M3: .*weight_scale_inv, by",
        ),
        (
            of_nan,
            rf"{UP}\.weight in .* are damaged: the weight of output 3 for input 5 is not finite",
        ),
        (
            of_infinity,
            rf"{UP}\.weight in .* are damaged: the scale of output 256 from input 128",
        ),
        (of_floats, rf"weights {UP}\.weight in .* are F32, and config\.json asks for F8_E4M3"),
        (of_other_blocks, rf"{UP}\.weight_scale_inv in .* the shape \[2, 2\], .* for \[3, 2\]"),
    ],
)
def test_damage_is_refused(tmp_path, change, message):
    save(tmp_path, BLOCKS, CASES[0].values[1])
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path, device="cpu")


def test_scales_of_integers_that_are_not_finite_are_refused(tmp_path):
    save(tmp_path, W8A8, int8(channel))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{UP}.weight_scale"][7] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"up_proj\.weight in .* are damaged: .*not finite"):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("case", "inputs", "message"),
    [(0, 270, "270 inputs .* not a multiple of 4"), (6, 272, "272 inputs .* not a multiple of 32")],
)
def test_inputs_of_other_numbers_are_refused(tmp_path, case, inputs, message):
    settings, tensors_of, _ = CASES[case].values
    save(tmp_path, settings, tensors_of, intermediate_size=inputs)
    with pytest.raises(ModelLoadError, match=f"down_proj has {message}"):
        load_model(tmp_path, device="cpu")


def test_mixtures_of_experts_are_refused_by_name(tmp_path):
    save(tmp_path, BLOCKS, CASES[0].values[1], "mixtral", num_local_experts=2)
    tensors = load_file(tmp_path / "model.safetensors")
    experts = [name for name in tensors if "experts" in name]
    assert experts
    for name in experts:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match="experts"):
        load_model(tmp_path, device="cpu")
