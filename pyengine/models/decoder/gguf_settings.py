"""The header of a GGUF file as the settings of a configuration, key by key.

A missing key has the family's default. Every key is read, expected to have the value that the
family has anyway, or known to have no effect (`HeaderKeys.refuse_unread`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyengine.errors import ModelLoadError
from pyengine.models.decoder.gguf_recurrent import recurrent_settings
from pyengine.models.gguf_header import GGUFArray
from pyengine.models.gguf_keys import HeaderKeys
from pyengine.models.gguf_rope import rope_parameters, sliding_rope_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How the headers of an architecture differ from Llama's.

    - `family`: its row of the table of families.
    - `layer_norm`: the name of the norms' epsilon in a configuration, if they are layer norms.
    - `biases`: settings that are true if the file has such tensors in its first layer.
    - `window`: the key of a sliding window is refused, may be there, or must be.
    - `period`: one layer in `period` attends to all tokens; 0: layers do not differ.
    - `rotates_partly`: the rotated part of a head may be smaller than the head.
    - `has_experts`: the file is a mixture of experts.
    - `gate`: llama.cpp's number for the score of experts: 1 softmax, 2 sigmoid, 3 softmax of the
      chosen ones.
    - `scales`: the settings that keys of factors are.
    """

    family: str
    layer_norm: str | None = None
    biases: Mapping[str, str] = field(default_factory=dict)
    window: str = "refused"
    period: int = 0
    rotates_partly: bool = False
    has_experts: bool = False
    gate: int = 1
    scales: Mapping[str, str] = field(default_factory=dict)


_ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
_BIASES = {**_ATTENTION_BIAS, "mlp_bias": "ffn_up.bias"}
_GRANITE_SCALES = {
    ".residual_scale": "residual_multiplier",
    ".embedding_scale": "embedding_multiplier",
    ".logit_scale": "logits_scaling",
    ".attention.scale": "attention_multiplier",
}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(family="llama", biases=_BIASES),
    "qwen2": Architecture(family="qwen2"),
    "qwen3": Architecture(family="qwen3", biases=_ATTENTION_BIAS),
    "gemma": Architecture(family="gemma"),
    "gemma2": Architecture(family="gemma2", window="needed", period=2),
    "gemma3": Architecture(family="gemma3_text", window="needed", period=6),
    "phi3": Architecture(family="phi3", window="optional", rotates_partly=True),
    "granite": Architecture(family="granite", biases=_BIASES, scales=_GRANITE_SCALES),
    "smollm3": Architecture(family="smollm3", biases=_BIASES),
    "olmo2": Architecture(family="olmo2", biases=_ATTENTION_BIAS, window="optional", period=4),
    "exaone4": Architecture(family="exaone4", window="optional", period=4),
    "seed_oss": Architecture(
        family="seed_oss",
        biases={**_BIASES, "attention_out_bias": "attn_output.bias"},
    ),
    "glm4": Architecture(family="glm4", biases=_ATTENTION_BIAS, rotates_partly=True),
    "cohere2": Architecture(
        family="cohere2",
        layer_norm="layer_norm_eps",
        window="needed",
        period=4,
        scales={".logit_scale": "logit_scale"},
    ),
    "starcoder2": Architecture(family="starcoder2", layer_norm="norm_epsilon", window="optional"),
    "gpt2": Architecture(family="gpt2", layer_norm="layer_norm_epsilon"),
    "stablelm": Architecture(
        family="stablelm",
        layer_norm="layer_norm_eps",
        biases={"use_qkv_bias": "attn_q.bias"},
        rotates_partly=True,
    ),
    "nemotron": Architecture(
        family="nemotron", layer_norm="norm_eps", biases=_BIASES, rotates_partly=True
    ),
    "qwen2moe": Architecture(family="qwen2_moe", has_experts=True),
    "qwen3moe": Architecture(family="qwen3_moe", biases=_ATTENTION_BIAS, has_experts=True),
    "granitemoe": Architecture(
        family="granitemoe", biases=_ATTENTION_BIAS, scales=_GRANITE_SCALES, has_experts=True
    ),
    "gpt-oss": Architecture(family="gpt_oss", window="needed", has_experts=True, gate=3),
    "minimax-m2": Architecture(family="minimax_m2", rotates_partly=True, has_experts=True, gate=2),
}
"""By `general.architecture`. A `llama` with experts is a `mixtral`, an `olmo2` with a window an
`olmo3`."""

_COUNTS = {
    ".context_length": "max_position_embeddings",
    ".embedding_length": "hidden_size",
    ".block_count": "num_hidden_layers",
    ".feed_forward_length": "intermediate_size",
    ".attention.head_count": "num_attention_heads",
}
_SCALED_QUERIES = {"gemma2": 46, "gemma3": 62}
"""Numbers of layers of the models whose queries are scaled by the mean size of a head."""
_DTYPES = {"F32": "float32", "F16": "float16"}
_EXPECTED: tuple[tuple[str, tuple[object, ...], str], ...] = (
    (".attention.causal", (True,), "makes a model that embeds texts"),
    (".attention.clamp_kqv", (0.0,), "bounds queries, keys and values, which is not supported"),
    (".attention.max_alibi_bias", (0.0,), "weighs by distance (ALiBi), which is not supported"),
    (".attention.shared_kv_layers", (0,), "shares keys among layers, which is not supported"),
    (".attention.output_scale", (1.0,), "scales what layers add, which is not supported"),
    (".attention.value_scale", (1.0,), "scales values, which is not supported"),
    (".residual_scale", (1.0,), "scales what layers add, which is not supported"),
    (".embedding_scale", (1.0,), "scales embeddings, which is not supported"),
    (".logit_scale", (1.0,), "scales logits, which is not supported"),
    (".expert_weights_scale", (1.0,), "scales experts, which is not supported"),
    (".expert_group_count", (0, 1), "chooses experts by groups, which is not supported"),
    (".expert_group_used_count", (0, 1), "chooses experts by groups, which is not supported"),
    (".leading_dense_block_count", (0,), "has first layers without experts: not supported"),
    (".interleave_moe_layer_step", (0, 1), "has layers without experts: not supported"),
    (".moe_every_n_layers", (0, 1), "has layers without experts: not supported"),
    (".nextn_predict_layers", (0,), "has layers that predict further tokens: not supported"),
    (".tensor_data_layout", ("", "Meta AI original pth"), "orders tensors in an unknown way"),
)


def gguf_settings(keys: HeaderKeys) -> dict[str, Any]:
    """The settings of the model in a file, as a config.json has them.

    Raises `ModelLoadError` for an architecture that is not in the table, and for a key that is
    missing, or has a value that the family has not.
    """
    keys.expect("general.type", ("model",), "is not a model that generates text")
    dtype = _DTYPES.get(keys.header.main_type, "bfloat16")
    if (recurrent := recurrent_settings(keys)) is not None:
        return {**recurrent, "dtype": dtype}
    row = _architecture(keys)
    names = {tensor.name: tensor.shape for tensor in keys.header.tensors}
    settings: dict[str, Any] = {"model_type": row.family}
    settings["dtype"] = dtype
    for key, name in _COUNTS.items():
        settings[name] = _needed(keys, key, keys.count(key))
    kind = "layer_norm_rms" if row.layer_norm is None else "layer_norm"
    epsilon = f".attention.{kind}_epsilon"
    value = _needed(keys, epsilon, keys.number(epsilon, maximum=1.0))
    settings[row.layer_norm or "rms_norm_eps"] = value
    if "token_embd.weight" not in names:
        raise ModelLoadError(f"{keys.path} lacks the weights of token_embd.weight: get it again")
    settings["vocab_size"] = names["token_embd.weight"][0]
    settings["tie_word_embeddings"] = "output.weight" not in names
    keys.expect(".vocab_size", (settings["vocab_size"],), "is not the number of rows of token_embd")
    for key, allowed, meaning in _EXPECTED:
        if key not in row.scales:
            keys.expect(key, allowed, meaning)
    for setting, tensor in row.biases.items():
        settings[setting] = f"blk.0.{tensor}" in names
    if row.family == "stablelm":
        settings["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in names
    _add_heads(keys, settings, row)
    _add_experts(keys, settings, row)
    _add_windows(keys, settings, row)
    if row.family == "gpt2":
        settings["n_inner"] = settings.pop("intermediate_size")
        return settings
    _add_rope(keys, settings, row)
    return settings


def _architecture(keys: HeaderKeys) -> Architecture:
    keys.raw("general.architecture")
    name = keys.header.architecture
    row = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if row is None:
        raise ModelLoadError(
            f"{keys.path} is of the architecture {str(name)[:80]!r}, which pyengine does not read "
            f"from GGUF files ({', '.join(ARCHITECTURES)}); take the model as a folder of "
            "safetensors files"
        )
    return row


def _needed(keys: HeaderKeys, key: str, value: float | None) -> float:
    if value is None:
        raise ModelLoadError(f"{keys.path} does not say {keys.full_name(key)}: get it again")
    return value


def _add_heads(keys: HeaderKeys, settings: dict[str, Any], row: Architecture) -> None:
    """Add the sizes of heads and the scale of queries, and other factors."""
    architecture, heads = str(keys.header.architecture), settings["num_attention_heads"]
    hidden = settings["hidden_size"]
    size = keys.count(".attention.key_length", high=hidden * heads)
    if size is None and hidden % heads:
        raise keys.refusal(".attention.head_count", f"does not divide embedding_length={hidden}")
    size = size or hidden // heads
    groups = keys.count(".attention.head_count_kv", high=heads) or heads
    if row.family == "gpt2":
        keys.expect(".attention.head_count_kv", (heads,), "is not the number of heads")
        keys.expect(".attention.key_length", (hidden // heads,), "is not the size of heads")
    else:
        settings |= {"num_key_value_heads": groups, "head_dim": size}
    for key in ("value_length", "key_length_swa", "value_length_swa"):
        keys.expect(f".attention.{key}", (size,), f"is not the size of keys, {size}")
    keys.expect(".embedding_length_out", (hidden,), "is not the size of hidden states")
    scaled = size
    if architecture in _SCALED_QUERIES:
        if settings["num_hidden_layers"] == _SCALED_QUERIES[architecture]:
            scaled = hidden // heads
        settings["query_pre_attn_scalar"] = scaled
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if (cap := keys.number(f".{key}")) is not None:
                settings[key] = cap
    for key, name in row.scales.items():
        default = scaled**-0.5 if key == ".attention.scale" else 1.0
        settings[name] = keys.number(key) or default
    scale = keys.number(".attention.scale")
    is_fixed = ".attention.scale" not in row.scales
    if is_fixed and scale and not math.isclose(scale, scaled**-0.5, rel_tol=1e-3):
        raise keys.refusal(".attention.scale", f"is not {scaled}**-0.5, which is supported")


def _add_experts(keys: HeaderKeys, settings: dict[str, Any], row: Architecture) -> None:
    """Add the numbers and sizes of experts."""
    is_mixtral = row.family == "llama" and bool(keys.raw(".expert_count"))
    if not row.has_experts and not is_mixtral:
        for key in (".expert_count", ".expert_used_count", ".expert_shared_count"):
            keys.expect(key, (0,), "is for experts that are not there")
        return
    count = int(_needed(keys, ".expert_count", keys.count(".expert_count")))
    used = _needed(keys, ".expert_used_count", keys.count(".expert_used_count", high=count))
    keys.expect(".expert_gating_func", (0, row.gate), "is not the one of this architecture")
    size, shared = keys.count(".expert_feed_forward_length"), 0
    settings["num_experts_per_tok"] = used
    if row.family in ("qwen2_moe", "qwen3_moe"):
        settings["num_experts"] = count
        settings["moe_intermediate_size"] = size or settings["intermediate_size"] // int(used)
        norm = keys.flag(".expert_weights_norm")
        settings["norm_topk_prob"] = row.family == "qwen3_moe" if norm is None else norm
    else:
        settings["num_local_experts"] = count
        settings["intermediate_size"] = size or settings["intermediate_size"]
        keys.expect(".expert_weights_norm", (True,), "is not that of this architecture")
    if row.family == "qwen2_moe":
        shared, key = 1, ".expert_shared_feed_forward_length"
        size = keys.count(key) or settings["intermediate_size"]
        settings["shared_expert_intermediate_size"] = size
    keys.expect(".expert_shared_count", (shared,), "is not supported")
    if is_mixtral:
        settings |= {"model_type": "mixtral", "sliding_window": None}
        for setting in row.biases:
            if settings.pop(setting):
                raise ModelLoadError(f"{keys.path} has biases, which this mixture has not")


def _add_windows(keys: HeaderKeys, settings: dict[str, Any], row: Architecture) -> None:
    """Add the window of sliding layers, and which layers these are."""
    key = ".attention.sliding_window"
    window = keys.count(key, low=1 if row.window == "needed" else 0)
    if row.window == "refused":
        if window and window < settings["max_position_embeddings"]:
            raise keys.refusal(key, f"is not supported for {keys.header.architecture}")
        return
    if row.window == "needed":
        _needed(keys, key, window)
    settings["sliding_window"] = window or None
    if row.family == "olmo2" and window:
        settings["model_type"] = "olmo3"
    if row.period and window:
        settings["layer_types"] = _layer_types(keys, settings, row.period)


def _layer_types(keys: HeaderKeys, settings: Mapping[str, Any], period: int) -> list[str]:
    key, layers = ".attention.sliding_window_pattern", range(settings["num_hidden_layers"])
    pattern = keys.raw(key)
    if isinstance(pattern, GGUFArray):
        slides = [bool(value) for value in pattern.values or ()]
        if len(slides) != len(layers):
            raise keys.refusal(key, f"has not one value for each of {len(layers)} layers")
    else:
        period = keys.count(key) or period
        slides = [number % period < period - 1 for number in layers]
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides]


def _add_rope(keys: HeaderKeys, settings: dict[str, Any], row: Architecture) -> None:
    size = settings["head_dim"]
    rotated = keys.count(".rope.dimension_count", high=size) or size
    keys.expect(".rope.dimension_count_swa", (rotated,), f"is not {rotated}, as in other layers")
    if rotated % 2 or (not row.rotates_partly and rotated != size):
        raise keys.refusal(".rope.dimension_count", f"does not fit heads of {size} numbers")
    parameters = rope_parameters(keys, rotated, settings["max_position_embeddings"])
    if row.family == "gpt_oss" and parameters["rope_type"] == "yarn":
        parameters["truncate"] = False
    if row.rotates_partly:
        # The factor times the size is cut to a whole number, which must be `rotated`.
        parameters["partial_rotary_factor"] = (rotated + 0.5) / size
    if row.family == "phi3" and parameters["rope_type"] == "longrope":
        original = parameters.pop("original_max_position_embeddings")
        settings["original_max_position_embeddings"] = original
    if settings["model_type"] in ("gemma3_text", "olmo3"):
        base = parameters["rope_theta"] if row.family == "olmo2" else None
        sliding = sliding_rope_parameters(keys, base)
        parameters = {"full_attention": parameters, "sliding_attention": sliding}
    settings["rope_parameters"] = parameters
