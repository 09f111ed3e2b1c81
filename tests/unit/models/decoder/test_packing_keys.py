"""Each key of a `quantization_config` is read, has no effect, or is refused by name."""

from pathlib import Path
from typing import Any

import pytest

from pyengine.errors import ModelLoadError
from pyengine.models.decoder.packed import layout_of
from pyengine.models.decoder.settings import BeyondTableError

_PATH = Path("config.json")
_W4A16 = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 128,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
_FP8 = {**_W4A16, "group_size": None, "num_bits": 8, "strategy": "channel", "type": "float"}


def compressed(form: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": form,
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.10.3",
        **more,
    }


RELEASED: dict[str, dict[str, Any]] = {
    "AWQ": {
        "bits": 4,
        "group_size": 128,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    },
    "GPTQ": {
        "batch_size": 1,
        "bits": 4,
        "block_name_to_quantize": None,
        "cache_block_outputs": True,
        "checkpoint_format": "gptq",
        "damp_percent": 0.01,
        "dataset": None,
        "desc_act": False,
        "group_size": 128,
        "meta": {"quantizer": "gptqmodel:1.4.0"},
        "model_file_base_name": "model",
        "model_name_or_path": None,
        "modules_in_block_to_quantize": None,
        "pack_dtype": "int32",
        "quant_method": "gptq",
        "static_groups": False,
        "sym": True,
        "true_sequential": True,
        "use_cuda_fp16": False,
    },
    "DeepSeek FP8": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "W4A16": compressed("pack-quantized", _W4A16),
    "W8A8 FP8": compressed("float-quantized", _FP8),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_settings_are_accepted(name: str) -> None:
    assert layout_of(RELEASED[name], _PATH).key_name


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        *((name, {"attention_scale": 2}, "attention_scale=2") for name in RELEASED),
        *((name, {"quant_method": []}, "quant_method=") for name in RELEASED),
        ("AWQ", {"zero_point": False}, "zero_point=False"),
        ("GPTQ", {"dynamic": {"-:mlp": {}}}, "dynamic="),
        ("GPTQ", {"is_marlin_format": True}, "is_marlin_format=True"),
        ("GPTQ", {"rotation": "hadamard"}, "rotation='hadamard'"),
        ("GPTQ", {"format": "gptq_v2"}, "format='gptq_v2'"),
        ("GPTQ", {"pack_dtype": "int16"}, "pack_dtype='int16'"),
        ("GPTQ", {"desc_act": "no"}, "desc_act='no'"),
        ("DeepSeek FP8", {"fmt": "e5m2"}, "fmt='e5m2'"),
        ("DeepSeek FP8", {"weight_block_size": 128}, "weight_block_size=128"),
        ("W4A16", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config="),
        ("W4A16", {"config_groups": {"g": {"weights": _W4A16, "bits": 4}}}, "bits=4"),
        ("W4A16", {"config_groups": {"g": {"weights": {**_W4A16, "x": 1}}}}, "x=1"),
        ("W4A16", {"config_groups": {"g": {"weights": {**_W4A16, "dynamic": True}}}}, "dynamic"),
        ("W4A16", {"config_groups": [1]}, "config_groups="),
        ("W4A16", {"sparsity_config": 5}, "sparsity_config=5"),
    ],
)
def test_what_changes_the_weights_is_refused_by_name(
    name: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        layout_of({**RELEASED[name], **changes}, _PATH)
    assert named in str(caught.value)
    assert not isinstance(caught.value, BeyondTableError)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("AWQ", {"quant_method": "mxfp4"}, "mxfp4"),
        ("AWQ", {"bits": 8}, "bits=8"),
        ("GPTQ", {"bits": 3}, "bits=3"),
        ("W4A16", {"format": "mixed-precision"}, "mixed-precision"),
    ],
)
def test_other_layouts_are_left_to_the_fallback(
    name: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(BeyondTableError, match=named):
        layout_of({**RELEASED[name], **changes}, _PATH)
