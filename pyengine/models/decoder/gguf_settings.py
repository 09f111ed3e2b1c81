"""The header of a GGUF file as the settings of a configuration, key by key.

A missing key has the family's default. Every key is read, expected to have the value that the
family has anyway, or known to have no effect (`HeaderKeys.refuse_unread`).
"""

import math
from collections.abc import Mapping
from typing import Any

from pyengine.errors import ModelLoadError
from pyengine.models.gguf_header import GGUFArray
from pyengine.models.gguf_keys import HeaderKeys
from pyengine.models.gguf_rope import rope_parameters, sliding_rope_parameters

MODEL_TYPES: Mapping[str, str] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "starcoder2": "starcoder2",
    "gpt2": "gpt2",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "stablelm": "stablelm",
    "nemotron": "nemotron",
}
"""Families of the table by `general.architecture`; a `llama` with experts is a `mixtral`."""

_COUNTS = {
    ".context_length": "max_position_embeddings",
    ".embedding_length": "hidden_size",
    ".block_count": "num_hidden_layers",
    ".feed_forward_length": "intermediate_size",
    ".attention.head_count": "num_attention_heads",
}
_EPSILONS = {
    "gpt2": (".attention.layer_norm_epsilon", "layer_norm_epsilon"),
    "starcoder2": (".attention.layer_norm_epsilon", "norm_epsilon"),
    "stablelm": (".attention.layer_norm_epsilon", "layer_norm_eps"),
    "nemotron": (".attention.layer_norm_epsilon", "norm_eps"),
}
_RMS = (".attention.layer_norm_rms_epsilon", "rms_norm_eps")
_SCALED_QUERIES = {"gemma2": 46, "gemma3": 62}
"""Numbers of layers of the models whose queries are scaled by the mean size of a head."""
_PARTLY_ROTATED = ("phi3", "stablelm", "nemotron")
_PERIODS = {"gemma2": 2, "gemma3": 6}
"""One of so many layers attends to all tokens: llama.cpp's defaults."""
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
    architecture = str(keys.header.architecture)
    keys.raw("general.architecture")
    if architecture not in MODEL_TYPES:
        raise ModelLoadError(
            f"{keys.path} is of the architecture {architecture!r}, which pyengine has no decoder "
            f"for: there are {', '.join(MODEL_TYPES)}"
        )
    names = {tensor.name: tensor.shape for tensor in keys.header.tensors}
    found: dict[str, Any] = {"model_type": MODEL_TYPES[architecture]}
    for key, name in _COUNTS.items():
        found[name] = _needed(keys, key, keys.count(key))
    epsilon, name = _EPSILONS.get(architecture, _RMS)
    found[name] = _needed(keys, epsilon, keys.number(epsilon, most=1.0))
    if "token_embd.weight" not in names:
        raise ModelLoadError(f"{keys.path} lacks the weights of token_embd.weight: get it again")
    found["vocab_size"] = names["token_embd.weight"][0]
    found["tie_word_embeddings"] = "output.weight" not in names
    keys.expect(".vocab_size", (found["vocab_size"],), "is not the number of rows of token_embd")
    for key, allowed, meaning in _EXPECTED:
        keys.expect(key, allowed, meaning)
    _add_heads(keys, found, names)
    _add_experts(keys, found)
    _add_windows(keys, found)
    if architecture == "gpt2":
        found["n_inner"] = found.pop("intermediate_size")
        return found
    _add_rope(keys, found)
    return found


def _needed(keys: HeaderKeys, key: str, value: float | None) -> float:
    if value is None:
        raise ModelLoadError(f"{keys.path} does not say {keys.full_name(key)}: get it again")
    return value


def _add_heads(keys: HeaderKeys, found: dict[str, Any], names: Mapping[str, Any]) -> None:
    """Add the sizes of heads, their biases and the scale of queries."""
    architecture, heads = str(keys.header.architecture), found["num_attention_heads"]
    size = keys.count(".attention.key_length") or found["hidden_size"] // heads
    groups = keys.count(".attention.head_count_kv", high=heads) or heads
    if architecture == "gpt2":
        keys.expect(".attention.head_count_kv", (heads,), "is not the number of heads")
    else:
        found |= {"num_key_value_heads": groups, "head_dim": size}
    for key in (".attention.value_length", ".attention.key_length_swa"):
        keys.expect(key, (size,), f"is not the size of keys, {size}")
    keys.expect(".attention.value_length_swa", (size,), f"is not the size of keys, {size}")
    scaled = size
    if architecture in _SCALED_QUERIES:
        if found["num_hidden_layers"] == _SCALED_QUERIES[architecture]:
            scaled = found["hidden_size"] // heads
        found["query_pre_attn_scalar"] = scaled
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if (cap := keys.number(f".{key}")) is not None:
                found[key] = cap
    scale = keys.number(".attention.scale")
    if scale and not math.isclose(scale, scaled**-0.5, rel_tol=1e-3):
        raise keys.refusal(".attention.scale", f"is not {scaled}**-0.5, which is supported")
    if architecture in ("llama", "qwen3", "qwen3moe", "nemotron"):
        found["attention_bias"] = "blk.0.attn_q.bias" in names
    if architecture in ("llama", "nemotron"):
        found["mlp_bias"] = "blk.0.ffn_up.bias" in names
    if architecture == "stablelm":
        found["use_qkv_bias"] = "blk.0.attn_q.bias" in names
        found["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in names


def _add_experts(keys: HeaderKeys, found: dict[str, Any]) -> None:
    """Add the numbers and sizes of experts."""
    architecture = str(keys.header.architecture)
    count = keys.count(".expert_count", low=0) or 0
    if architecture not in ("llama", "qwen2moe", "qwen3moe", "gpt-oss"):
        keys.expect(".expert_count", (0,), "is for experts that are not there")
        keys.expect(".expert_used_count", (0,), "is for experts that are not there")
        return
    used = keys.count(".expert_used_count", low=min(count, 1), high=count)
    gate = 3 if architecture == "gpt-oss" else 1
    keys.expect(".expert_gating_func", (0, gate), "is not the one of this architecture")
    size = keys.count(".expert_feed_forward_length")
    if architecture == "llama":
        keys.expect(".expert_weights_norm", (True,), "is not that of this architecture")
        if count:
            found |= {"model_type": "mixtral", "num_local_experts": count, "sliding_window": None}
            found |= {"num_experts_per_tok": _needed(keys, ".expert_used_count", used)}
            found |= {"intermediate_size": size or found["intermediate_size"]}
            for key in ("attention_bias", "mlp_bias"):
                if found.pop(key):
                    raise ModelLoadError(f"{keys.path} has biases, which this mixture has not")
        return
    if architecture == "gpt-oss":
        found |= {"num_local_experts": count, "num_experts_per_tok": used}
        found["intermediate_size"] = size or found["intermediate_size"]
        return
    found |= {"num_experts": count, "num_experts_per_tok": used}
    found["moe_intermediate_size"] = size or found["intermediate_size"] // max(1, used or 1)
    norm = keys.flag(".expert_weights_norm")
    found["norm_topk_prob"] = architecture == "qwen3moe" if norm is None else norm
    if architecture == "qwen2moe":
        shared = keys.count(".expert_shared_feed_forward_length")
        found["shared_expert_intermediate_size"] = shared or found["intermediate_size"]
        keys.expect(".expert_shared_count", (1,), "is not supported")


def _add_windows(keys: HeaderKeys, found: dict[str, Any]) -> None:
    """Add the window of sliding layers, and which layers these are."""
    architecture, key = str(keys.header.architecture), ".attention.sliding_window"
    window = keys.count(key, low=0) or None
    if architecture in _PERIODS:
        found["sliding_window"] = _needed(keys, key, window)
        found["layer_types"] = _layer_types(keys, found, _PERIODS[architecture])
    elif architecture == "gpt-oss":
        found["sliding_window"] = _needed(keys, key, window)
    elif architecture in ("phi3", "starcoder2"):
        found["sliding_window"] = window
    elif window and window < found["max_position_embeddings"]:
        raise keys.refusal(key, f"is not supported for {architecture}")


def _layer_types(keys: HeaderKeys, found: Mapping[str, Any], period: int) -> list[str]:
    key, layers = ".attention.sliding_window_pattern", range(found["num_hidden_layers"])
    pattern = keys.raw(key)
    if isinstance(pattern, GGUFArray):
        slides = [bool(value) for value in pattern.values or ()]
        if len(slides) != len(layers):
            raise keys.refusal(key, f"has not one value for each of {len(layers)} layers")
    else:
        period = keys.count(key) or period
        slides = [number % period < period - 1 for number in layers]
    return ["sliding_attention" if each else "full_attention" for each in slides]


def _add_rope(keys: HeaderKeys, found: dict[str, Any]) -> None:
    architecture, size = str(keys.header.architecture), found["head_dim"]
    rotated = keys.count(".rope.dimension_count", high=size) or size
    keys.expect(".rope.dimension_count_swa", (rotated,), f"is not {rotated}, as in other layers")
    is_whole = architecture not in _PARTLY_ROTATED
    if rotated % 2 or (is_whole and rotated != size):
        raise keys.refusal(".rope.dimension_count", f"does not fit heads of {size} numbers")
    parameters = rope_parameters(keys, rotated, found["max_position_embeddings"])
    if architecture == "gpt-oss" and parameters["rope_type"] == "yarn":
        parameters["truncate"] = False
    if not is_whole:
        # The factor times the size is cut to a whole number, which must be `rotated`.
        parameters["partial_rotary_factor"] = (rotated + 0.5) / size
    if architecture == "phi3" and parameters["rope_type"] == "longrope":
        original = parameters.pop("original_max_position_embeddings")
        found["original_max_position_embeddings"] = original
    if architecture == "gemma3":
        sliding = sliding_rope_parameters(keys)
        parameters = {"full_attention": parameters, "sliding_attention": sliding}
    found["rope_parameters"] = parameters
