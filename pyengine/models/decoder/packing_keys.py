"""The keys of a `quantization_config`: each one is read, has no effect, or is refused by name.

The tensors say which layers are packed, so lists of modules have no effect. Layouts are
chosen by `packed_layout`.
"""

from collections.abc import Mapping
from typing import Any

from pyengine.errors import ModelLoadError
from pyengine.models.decoder.settings import Settings
from pyengine.utils.validation import shown

_TENSORS_SAY = "the tensors say it"
_HISTORY = "how the model was quantised"
_KERNELS = "about the kernels of other programs"
_ACTIVATIONS = "activations stay floats"
_NO_EFFECT: Mapping[str, Mapping[str, str]] = {
    "awq": {
        **dict.fromkeys(("modules_to_not_convert", "modules_to_fuse"), _TENSORS_SAY),
        **dict.fromkeys(("backend", "do_fuse", "exllama_config", "fuse_max_seq_len"), _KERNELS),
    },
    "gptq": {
        **dict.fromkeys(
            (
                *("lm_head", "block_name_to_quantize", "module_name_preceding_first_block"),
                *("modules_in_block_to_quantize", "modules_to_not_convert", "sym"),
            ),
            _TENSORS_SAY,
        ),
        **dict.fromkeys(
            (
                *("true_sequential", "damp_percent", "damp_auto_increment", "static_groups"),
                *("dataset", "tokenizer", "model_file_base_name", "model_name_or_path", "meta"),
                *("cache_block_outputs", "batch_size", "model_seqlen", "pad_token_id", "quantizer"),
                *("act_group_aware", "mse", "max_input_length"),
            ),
            _HISTORY,
        ),
        **dict.fromkeys(
            (
                *("use_exllama", "disable_exllama", "exllama_config", "use_cuda_fp16", "backend"),
                "use_marlin",
            ),
            _KERNELS,
        ),
    },
    "fp8": {
        **dict.fromkeys(("modules_to_not_convert", "ignored_layers", "scale_fmt"), _TENSORS_SAY),
        "activation_scheme": _ACTIVATIONS,
        "dequantize": _KERNELS,
    },
    "compressed-tensors": {
        "ignore": _TENSORS_SAY,
        **dict.fromkeys(("quantization_status", "global_compression_ratio", "version"), _HISTORY),
        "run_compressed": _KERNELS,
        "kv_cache_scheme": "read with the scales of the KV cache",
    },
}
_GROUP = {
    "targets": _TENSORS_SAY,
    "input_activations": _ACTIVATIONS,
    "output_activations": _ACTIVATIONS,
}
_WEIGHTS = dict.fromkeys(("observer", "observer_kwargs", "scale_dtype", "zp_dtype"), _HISTORY)


def check_packing(values: object, where: str) -> Mapping[str, Any]:
    """The `quantization_config` in the file `where`, each key of which means what it says.

    Raises `ModelLoadError` for a key that is unknown or has a value of another kind.
    """
    where = f"{where}, quantization_config,"
    if not isinstance(values, dict):
        raise ModelLoadError(f"{where} is {shown(values)}: it must be an object")
    settings = Settings(values, where, _DEFAULTS)
    method = settings.text("quant_method", list(_NO_EFFECT), falls_back=True)
    _CHECKS[method](settings)
    settings.pass_over(_NO_EFFECT[method])
    settings.finish()
    return {key: value for key, value in values.items() if value is not None}


_DEFAULTS = {"bits": 4, "group_size": 128, "version": "gemm", "desc_act": False, "fmt": "e4m3"}
"""Values of keys that files may lack; most of a group have none."""


def _awq(settings: Settings) -> None:
    settings.integer("bits")
    settings.integer("group_size", -1)
    if settings.raw("version") != "GEMM":
        settings.text("version", ["gemm"])
    settings.only("zero_point", True, why="the layout has zero points")


def _gptq(settings: Settings) -> None:
    settings.integer("bits")
    settings.integer("group_size", -1)
    settings.flag("desc_act")
    known = ["gptq", "gptq_v2"]
    kind = "gptq"
    if settings.has("checkpoint_format"):
        kind = settings.text("checkpoint_format", known)
    settings.only("format", kind, why="checkpoint_format says otherwise")
    settings.only("dynamic", {}, why="some modules are quantised in another way")
    settings.only("pack_dtype", "int32", why="codes are in words of 32 bits")
    settings.only("is_marlin_format", False, why="the layout is another one")
    settings.only("rotation", why="the weights are rotated")


def _fp8(settings: Settings) -> None:
    settings.text("fmt", ["e4m3"])
    if settings.has("weight_block_size"):
        settings.items("weight_block_size", 2)


def _compressed_tensors(settings: Settings) -> None:
    settings.raw("format")
    groups = settings.section("config_groups") if settings.has("config_groups") else None
    for name in groups.names if groups is not None else ():
        group = groups.section(name) if groups is not None and groups.has(name) else None
        if group is None:
            continue
        group.only("format", settings.raw("format"), why="the format of all weights is another")
        group.pass_over(_GROUP)
        if group.has("input_activations"):
            group.section("input_activations", is_passed_over=True)
        weights = group.section("weights") if group.has("weights") else None
        if weights is not None:
            _weights(weights)
    if settings.has("sparsity_config"):
        settings.section("sparsity_config", is_passed_over=True)
    settings.only("transform_config", {}, why="the weights are transformed, as by a rotation")


def _weights(weights: Settings) -> None:
    for key, read in (
        ("num_bits", weights.integer),
        ("group_size", lambda key: weights.integer(key, -1)),
        ("symmetric", weights.flag),
    ):
        if weights.has(key):
            read(key)
    for key in ("type", "strategy", "actorder"):
        if weights.has(key) and not isinstance(weights.raw(key), str):
            weights.refuse(key, "it must be a word")
    if weights.has("block_structure"):
        weights.items("block_structure", 2)
    if weights.has("actorder"):
        weights.text("actorder", ["group", "dynamic", "static", "weight"])
    weights.only("dynamic", False, why="scales of weights are in the file")
    weights.pass_over(_WEIGHTS)


_CHECKS = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed_tensors}
