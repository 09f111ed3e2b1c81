"""AWQ, GPTQ and compressed-tensors: a layer multiplies by the weights of its checkpoint."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.models.decoder.kernel_sets import KernelSettings
from pyengine.models.decoder.packed import packed_layout
from pyengine.models.loader import load_model
from tests.unit.executor.hand_made import random_model

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
            },
            "input_activations": None,
        }
    },
    "ignore": ["lm_head"],
}
AWQ_POSITIONS = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs in the order of their bits
POSITIONS = range(8)


def weights_of(**changes):
    """The settings of compressed-tensors with other weights."""
    group = W4A16["config_groups"]["group_0"]
    return W4A16 | {"config_groups": {"g": group | {"weights": group["weights"] | changes}}}


def words(codes, positions=POSITIONS):
    """Codes `[R, 8 * C]` in words `[R, C]`."""
    eight = codes.reshape(len(codes), -1, 8).astype(np.int64)
    packed = sum(eight[:, :, position] << (4 * number) for number, position in enumerate(positions))
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32).copy())


class Layer:
    """Codes, scales and zero points of a random layer, and its weight."""

    def __init__(self, rng, outputs, inputs, size, *, is_symmetric=False, is_ordered=True):
        size = inputs if size == -1 else size
        groups = inputs // size
        self.codes = rng.integers(0, 16, (outputs, inputs)).astype(np.uint8)
        self.scales = (0.01 + 0.01 * rng.random((outputs, groups))).astype(np.float16)
        zeros = (
            np.full_like(self.scales, 8) if is_symmetric else rng.integers(1, 16, self.scales.shape)
        )
        self.zeros = zeros.astype(np.uint8)
        self.index = np.arange(inputs) // size
        if not is_ordered:
            rng.shuffle(self.index)
        group = self.index
        self.weight = (self.codes.astype(np.float32) - self.zeros[:, group]) * self.scales[:, group]

    def awq(self):
        scales = torch.from_numpy(self.scales.T.copy())
        codes, zeros = words(self.codes.T, AWQ_POSITIONS), words(self.zeros.T, AWQ_POSITIONS)
        return {"qweight": codes, "qzeros": zeros, "scales": scales}

    def gptq(self, zero_offset=1):
        return {
            "qweight": words(self.codes).T.contiguous(),
            "qzeros": words((self.zeros - np.uint8(zero_offset)).T),
            "scales": torch.from_numpy(self.scales.T.copy()),
            "g_idx": torch.from_numpy(self.index.astype(np.int32)),
        }

    def compressed(self, *, is_symmetric=True, has_order=False):
        options = {
            "weight_packed": words(self.codes),
            "weight_scale": torch.from_numpy(self.scales),
            "weight_shape": torch.tensor(self.weight.shape),
        }
        if not is_symmetric:
            options["weight_zero_point"] = words(self.zeros.T).T.contiguous()
        if has_order:
            options["weight_g_idx"] = torch.from_numpy(self.index.astype(np.int32))
        return options


def save(folder, settings, pack, *, family="llama", size=32, **layer):
    """A checkpoint of a random model; returns the weights of its packed layers by name."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    model = random_model(family, tie_word_embeddings=False, **sizes)
    model.save_pretrained(folder)
    rng, weights = np.random.default_rng(0), {}
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name != "lm_head":
            layer_of = Layer(rng, module.out_features, module.in_features, size, **layer)
            weights[name] = torch.from_numpy(layer_of.weight)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{own}": tensor for own, tensor in pack(layer_of).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return weights


CASES = [
    pytest.param(AWQ, Layer.awq, {}, id="AWQ"),
    pytest.param(AWQ | {"group_size": 64}, Layer.awq, {"size": 64}, id="AWQ, 64"),
    pytest.param(AWQ, Layer.awq, {"family": "qwen2"}, id="AWQ with biases"),
    pytest.param(GPTQ, Layer.gptq, {}, id="GPTQ"),
    pytest.param(GPTQ | {"group_size": 128}, Layer.gptq, {"size": 128}, id="GPTQ, 128"),
    pytest.param(GPTQ | {"group_size": -1}, Layer.gptq, {"size": -1}, id="GPTQ, one group"),
    pytest.param(
        GPTQ | {"desc_act": True}, Layer.gptq, {"is_ordered": False}, id="GPTQ in another order"
    ),
    pytest.param(
        GPTQ | {"checkpoint_format": "gptq_v2"}, lambda made: made.gptq(0), {}, id="GPTQ, format 2"
    ),
    pytest.param(W4A16, Layer.compressed, {"is_symmetric": True}, id="compressed-tensors"),
    pytest.param(
        weights_of(symmetric=False),
        lambda made: made.compressed(is_symmetric=False),
        {},
        id="compressed-tensors with zero points",
    ),
    pytest.param(
        weights_of(strategy="channel", group_size=None),
        Layer.compressed,
        {"is_symmetric": True, "size": -1},
        id="compressed-tensors, one group",
    ),
    pytest.param(
        weights_of(actorder="group"),
        lambda made: made.compressed(has_order=True),
        {"is_symmetric": True, "is_ordered": False},
        id="compressed-tensors in another order",
    ),
]


@pytest.mark.parametrize(("settings", "pack", "layer"), CASES[:1])
def test_a_model_says_its_format(tmp_path, settings, pack, layer):
    save(tmp_path, settings, pack, **layer)
    loaded = load_model(tmp_path, device="cpu")
    assert loaded.quantization == "AWQ"
    assert loaded.dtype == "float32"
    assert loaded.has_float_linears  # the head


def test_every_eos_token_of_the_generation_config_counts(tmp_path):
    save(tmp_path, AWQ, Layer.awq)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert load_model(tmp_path, device="cpu").eos_token_ids == {5, 7}


def test_they_are_not_quantised_again(tmp_path):
    save(tmp_path, AWQ, Layer.awq)
    for dtype, quantization in (("bfloat16", "AWQ"), ("float16", "none")):
        loaded = load_model(tmp_path, device="cpu", dtype=dtype)
        assert (loaded.dtype, loaded.quantization) == (dtype, quantization)
    with pytest.raises(ConfigurationError, match=r"int8': the weights .* already \(AWQ\)"):
        load_model(tmp_path, device="cpu", kernels=KernelSettings(quantization="int8"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (AWQ | {"bits": 8}, "AWQ with bits=8"),
        (AWQ | {"version": "gemv"}, "version='gemv'"),
        (AWQ | {"group_size": 48}, "AWQ with group_size=48"),
        (AWQ | {"group_size": "all"}, "AWQ with group_size=all"),
        (GPTQ | {"bits": 3}, "GPTQ with bits=3"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        (W4A16 | {"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized'"),
        (W4A16 | {"config_groups": {}}, "0 config_groups"),
        (W4A16 | {"sparsity_config": {"format": "sparse-24"}}, "a sparsity_config"),
        (weights_of(num_bits=8), "num_bits=8"),
        (weights_of(strategy="tensor"), "strategy='tensor'"),
        ({"quant_method": "fbgemm_fp8"}, "quant_method='fbgemm_fp8'"),
        ({}, "quant_method=None"),
    ],
)
def test_other_layouts_are_named(settings, words):
    layout = packed_layout(settings)
    assert isinstance(layout, str) and words in layout


def test_what_is_not_read_is_said_when_transformers_cannot_either(tmp_path):
    save(tmp_path, GPTQ | {"bits": 8}, Layer.gptq)
    with pytest.raises(ModelLoadError, match=r"optimum.*GPTQ with bits=8"):
        load_model(tmp_path, device="cpu")


def damaged(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{UP}.scales"), rf"lack {UP}\.scales"),
        (lambda tensors: tensors.pop(f"{UP}.qweight"), rf"lack {UP}\.weight"),
        (lambda tensors: tensors.pop("model.norm.weight"), r"lack model\.norm\.weight"),
        (
            lambda tensors: tensors.update({f"{UP}.qzeros": torch.zeros(3, 32, dtype=torch.int32)}),
            r"up_proj\.qzeros .* the shape \[3, 32\], and config\.json asks for \[4, 32\]",
        ),
        (lambda tensors: tensors[f"{UP}.scales"].fill_(torch.nan), "not finite"),
        (lambda tensors: tensors["model.norm.weight"].fill_(torch.nan), "hold NaN or infinity"),
    ],
)
def test_damage_is_refused(tmp_path, change, message):
    save(tmp_path, AWQ, Layer.awq)
    damaged(tmp_path, change)
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize("index", [-1, 0, 9])
def test_groups_of_other_lengths_are_refused(tmp_path, index):
    save(tmp_path, GPTQ | {"desc_act": True}, Layer.gptq)
    damaged(tmp_path, lambda tensors: tensors[f"{UP}.g_idx"][40:50].fill_(index))
    with pytest.raises(ModelLoadError, match="g_idx does not give each of 4 groups as many inputs"):
        load_model(tmp_path, device="cpu")


def test_layers_that_are_not_whole_groups_are_refused(tmp_path):
    save(tmp_path, AWQ | {"group_size": 512}, Layer.awq)
    with pytest.raises(ModelLoadError, match=r"has 128 inputs .* not whole groups of 512"):
        load_model(tmp_path, device="cpu")


def test_tensors_of_other_models_are_refused_by_name(tmp_path):
    save(tmp_path, AWQ, Layer.awq)
    damaged(tmp_path, lambda tensors: tensors.update({"vision.weight": torch.zeros(2)}))
    with pytest.raises(
        ModelLoadError, match=r"have vision\.weight, which config\.json does not ask for"
    ):
        load_model(tmp_path, device="cpu")
