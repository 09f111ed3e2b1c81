"""The transformers configuration of a model in a GGUF file.

transformers builds the configuration of the family from the keys that it knows. The settings below
overwrite it with all keys of the header. A missing key has llama.cpp's default, not the default of
one published model. llama.cpp writes Mixtral as a `llama` with experts.
Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pyengine.models.gguf_header import GGUFArray, GGUFHeader
from pyengine.models.gguf_keys import HeaderKeys
from pyengine.models.gguf_rope import rope_parameters, sliding_rope_parameters

_GPT_OSS = "gpt-oss"
_GEMMAS = ("gemma2", "gemma3")
_SLIDING = (*_GEMMAS, "phi3", _GPT_OSS)
"""Architectures with layers that attend to a window."""
_PARTLY_ROTATED = ("phi3", "stablelm", "nemotron", "minimax-m2")
_SCALED_QUERIES = {"gemma2": 46, "gemma3": 62}
"""Numbers of layers of the models whose queries are scaled by the mean size of a head."""
_PERIODS = {"gemma2": 2, "gemma3": 6}
"""One of so many layers attends to all tokens: llama.cpp's defaults."""


class _Setting(NamedTuple):
    """A key, and the attributes of which a configuration has one."""

    key: str
    kind: Literal["count", "number", "flag", "text"]
    names: tuple[str, ...]


_SETTINGS = (
    _Setting(".context_length", "count", ("max_position_embeddings",)),
    _Setting(".embedding_length", "count", ("hidden_size",)),
    _Setting(".block_count", "count", ("num_hidden_layers",)),
    _Setting(".feed_forward_length", "count", ("intermediate_size", "ffn_hidden_size", "n_inner")),
    _Setting(".attention.head_count", "count", ("num_attention_heads",)),
    _Setting(".attention.layer_norm_rms_epsilon", "number", ("rms_norm_eps", "norm_eps")),
    _Setting(
        ".attention.layer_norm_epsilon",
        "number",
        ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    ),
    _Setting(".expert_weights_norm", "flag", ("norm_topk_prob",)),
    _Setting(".attn_logit_softcapping", "number", ("attn_logit_softcapping",)),
    _Setting(".final_logit_softcapping", "number", ("final_logit_softcapping",)),
    _Setting(".hidden_activation", "text", ("hidden_act", "hidden_activation")),
)

_ONLY: tuple[tuple[str, tuple[object, ...], str], ...] = (
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
)
"""Keys, their supported values, and the effect of other values."""

_NEEDED = (".context_length", ".embedding_length", ".attention.head_count")
_NEEDED_OF = {"gemma3": (".attention.sliding_window",), _GPT_OSS: (".attention.sliding_window",)}
_EPSILONS = (".attention.layer_norm_rms_epsilon", ".attention.layer_norm_epsilon")
_OTHER_COUNTS = tuple(
    f".{name}"
    for name in (
        *("attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("rope.dimension_count", "vocab_size", "expert_feed_forward_length"),
    )
)

_LAYOUTS = {"llama": "Meta AI original pth", "falcon": "jploski"}
"""The order of rows that transformers expects, by architecture."""
_GATES = {0: "none", 1: "softmax", 2: "sigmoid"}


def is_kept_only(header: GGUFHeader) -> bool:
    """True for mixtures of experts that transformers cannot read: Mixtral and GPT-OSS."""
    return header.architecture == _GPT_OSS or _is_mixtral(header)


def gguf_config(copy: Path, keys: HeaderKeys) -> Any:
    """The transformers configuration of a file, whose header is at `copy`, alone in its folder.

    The caller reads the keys of the tokenizer, and refuses unread keys. Raises `ModelLoadError` for
    values that are invalid or not supported.
    """
    _check_values(HeaderKeys(keys.path, keys.header))
    config = _family_config(copy, keys)
    for setting in _SETTINGS:
        _apply(setting, keys, config)
    for key, allowed, meaning in _ONLY:
        keys.expect(key, allowed, meaning)
    layout = _LAYOUTS.get(str(keys.header.architecture), "")
    keys.expect(".tensor_data_layout", (layout,), "orders tensors in an unknown way")
    _set_vocabulary(keys, config)
    _set_heads(keys, config)
    _set_experts(keys, config)
    _set_biases(keys, config)
    _set_windows(keys, config)
    _set_rope(keys, config)
    return config


def _check_values(keys: HeaderKeys) -> None:
    """Raise for values that transformers would misread, or reject without naming the key.

    Marks keys as read: pass an object of its own.
    """
    for key in [setting.key for setting in _SETTINGS] + [*_OTHER_COUNTS]:
        if isinstance(keys.raw(key), GGUFArray):
            raise keys.refusal(key, "has a value for each layer, which is not supported")
    for setting in _SETTINGS:
        _value(setting, keys)
    for key in _OTHER_COUNTS:
        keys.count(key)
    for key in (".expert_count", ".expert_used_count", ".attention.sliding_window"):
        keys.count(key, low=0)
    for key in (*_NEEDED, *_NEEDED_OF.get(str(keys.header.architecture), ())):
        if key not in keys:
            raise ValueError(f"it does not say {keys.full_name(key)}")
    if not any(key in keys for key in _EPSILONS):
        raise ValueError(f"it does not say {keys.full_name(_EPSILONS[0])}")


def _value(setting: _Setting, keys: HeaderKeys) -> Any:
    if setting.kind == "number":
        return keys.number(setting.key, most=1.0 if setting.key in _EPSILONS else math.inf)
    readers: dict[str, Any] = {"count": keys.count, "flag": keys.flag, "text": keys.text}
    return readers[setting.kind](setting.key)


def _family_config(copy: Path, keys: HeaderKeys) -> Any:
    """The configuration of the family, before the settings of the file."""
    from transformers import AutoConfig, GptOssConfig, LlamaConfig, MixtralConfig

    layers = keys.count(".block_count") or 1
    if keys.header.architecture == _GPT_OSS:
        return GptOssConfig(num_hidden_layers=layers, architectures=["GptOssForCausalLM"])
    if _is_mixtral(keys.header):
        return MixtralConfig(num_hidden_layers=layers, architectures=["MixtralForCausalLM"])
    if (
        keys.header.architecture == "llama"
    ):  # transformers takes a file named "mistral" for another family
        return LlamaConfig(num_hidden_layers=layers)
    where: Any = {"gguf_file": copy.name, "trust_remote_code": False}
    config: Any = AutoConfig.from_pretrained(copy.parent, **where)
    return config


def _is_mixtral(header: GGUFHeader) -> bool:
    count = header.values.get("llama.expert_count")
    return header.architecture == "llama" and isinstance(count, int) and count > 0


def _of(config: Any, *names: str) -> str:
    """The first of the attributes that a configuration has; "" without one."""
    return next((name for name in names if hasattr(config, name)), "")


def _apply(setting: _Setting, keys: HeaderKeys, config: Any) -> None:
    value = _value(setting, keys)
    if value is None:
        return
    name = _of(config, *setting.names)
    if name and setting.kind != "text":
        setattr(config, name, value)
    elif not name or getattr(config, name) != value:
        raise keys.refusal(setting.key, f"is not a setting of {type(config).__name__}")


def _set_vocabulary(keys: HeaderKeys, config: Any) -> None:
    tensors = {tensor.name: tensor.shape for tensor in keys.header.tensors}
    if "token_embd.weight" not in tensors:
        raise ValueError("it lacks the weights of token_embd.weight")
    config.vocab_size = tensors["token_embd.weight"][0]
    keys.expect(
        ".vocab_size",
        (config.vocab_size,),
        f"is not the number of rows of token_embd.weight, {config.vocab_size}",
    )
    keys.expect(".embedding_length_out", (config.hidden_size,), "is not the size of hidden states")
    config.tie_word_embeddings = "output.weight" not in tensors


def _set_heads(keys: HeaderKeys, config: Any) -> None:
    """Set the numbers of heads, their size and the scale of queries."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    groups = keys.count(".attention.head_count_kv", high=heads) or heads
    if name := _of(config, "num_key_value_heads", "num_kv_heads"):
        setattr(config, name, groups)
    elif groups != heads:
        raise keys.refusal(".attention.head_count_kv", "is not the number of heads")
    size = keys.count(".attention.key_length", high=hidden * heads)
    if size is None and hidden % heads:
        raise keys.refusal(".attention.head_count", f"does not divide embedding_length={hidden}")
    size = size or hidden // heads
    if hasattr(config, "head_dim") or size != hidden // heads:
        config.head_dim = size
    for key in (
        ".attention.value_length",
        ".attention.key_length_swa",
        ".attention.value_length_swa",
    ):
        keys.expect(key, (size,), f"is not the size of keys, {size}")
    largest = _SCALED_QUERIES.get(str(keys.header.architecture))
    scaled = hidden // heads if config.num_hidden_layers == largest else size
    if largest is not None:
        config.query_pre_attn_scalar = scaled
    scale = keys.number(".attention.scale")
    if scale and not math.isclose(scale, scaled**-0.5, rel_tol=1e-3):
        raise keys.refusal(".attention.scale", f"is not {scaled}**-0.5, which is supported")


def _set_experts(keys: HeaderKeys, config: Any) -> None:
    """Set experts and their sizes, with llama.cpp's defaults for missing sizes."""
    count = keys.count(".expert_count", low=0) or 0
    name = _of(config, "num_local_experts", "num_experts")
    if bool(name) != bool(count):
        raise keys.refusal(".expert_count", f"does not fit {type(config).__name__}")
    used = keys.count(".expert_used_count", low=min(count, 1), high=count)
    if count and used is None:
        raise ValueError(f"it does not say {keys.full_name('.expert_used_count')}")
    if not name:
        keys.expect(".expert_shared_count", (0,), "is for experts that are not there")
        return
    setattr(config, name, count)
    config.num_experts_per_tok = used
    shared = keys.count(".expert_shared_feed_forward_length", low=0) or 0
    size = keys.count(".expert_feed_forward_length")
    if own := _of(config, "moe_intermediate_size"):
        setattr(config, own, size or config.intermediate_size // used)
    elif size is not None:
        config.intermediate_size = size
    if has_shared := hasattr(config, "shared_expert_intermediate_size"):
        config.shared_expert_intermediate_size = shared or config.intermediate_size
    elif shared:
        raise keys.refusal(
            ".expert_shared_feed_forward_length", "is for experts that are not there"
        )
    keys.expect(".expert_shared_count", (int(has_shared),), "is not supported")
    _set_gate(keys, config)


def _set_gate(keys: HeaderKeys, config: Any) -> None:
    gate = keys.count(".expert_gating_func", low=0)
    if hasattr(config, "scoring_func"):
        config.scoring_func = _GATES.get(gate or 0, "softmax")
        return
    after_choice = keys.header.architecture == _GPT_OSS
    if gate not in (None, 0, 3 if after_choice else 1):
        raise keys.refusal(".expert_gating_func", "is not the one of this architecture")


def _set_biases(keys: HeaderKeys, config: Any) -> None:
    """Set biases that are optional in the family."""
    names = {tensor.name for tensor in keys.header.tensors}
    if type(config).__name__ != "GptOssConfig" and hasattr(config, "attention_bias"):
        config.attention_bias = "blk.0.attn_q.bias" in names
    if hasattr(config, "mlp_bias"):
        config.mlp_bias = "blk.0.ffn_up.bias" in names


def _set_windows(keys: HeaderKeys, config: Any) -> None:
    """Set the window of sliding layers, and which layers these are."""
    architecture = str(keys.header.architecture)
    can_be_none = architecture not in _NEEDED_OF and architecture not in _PERIODS
    window = keys.count(".attention.sliding_window", low=0 if can_be_none else 1)
    if architecture not in _SLIDING:
        if window and window < config.max_position_embeddings:
            raise keys.refusal(
                ".attention.sliding_window", f"is not supported for {type(config).__name__}"
            )
        return
    if window is not None:
        config.sliding_window = window or None
    if architecture in _PERIODS:
        config.layer_types = _layer_types(keys, config, _PERIODS[architecture])


def _layer_types(keys: HeaderKeys, config: Any, period: int) -> list[str]:
    key, layers = ".attention.sliding_window_pattern", range(config.num_hidden_layers)
    pattern = keys.raw(key)
    if isinstance(pattern, GGUFArray):
        slides = [bool(value) for value in pattern.values or ()]
        if len(slides) != len(layers):
            raise keys.refusal(key, f"has not one value for each of {len(layers)} layers")
    else:
        period = keys.count(key) or period
        slides = [number % period < period - 1 for number in layers]
    return ["sliding_attention" if each else "full_attention" for each in slides]


def _set_rope(keys: HeaderKeys, config: Any) -> None:
    if getattr(config, "rope_parameters", None) is None:
        return  # its keys are left, and refused
    architecture = str(keys.header.architecture)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = keys.count(".rope.dimension_count", high=size) or size
    keys.expect(".rope.dimension_count_swa", (rotated,), f"is not {rotated}, as in other layers")
    is_whole = architecture not in _PARTLY_ROTATED
    if rotated % 2 or (is_whole and rotated != size):
        raise keys.refusal(".rope.dimension_count", f"does not fit heads of {size} numbers")
    found = rope_parameters(keys, rotated, config.max_position_embeddings)
    if not is_whole:
        found["partial_rotary_factor"] = rotated / size
    if architecture == _GPT_OSS and found["rope_type"] == "yarn":
        found["truncate"] = False
    if architecture == "phi3" and found["rope_type"] == "longrope":
        config.original_max_position_embeddings = found["original_max_position_embeddings"]
    if architecture == "gemma3":
        found = {"full_attention": found, "sliding_attention": sliding_rope_parameters(keys)}
    config.rope_parameters = found
    try:
        config.validate_rope()
    except ValueError as error:
        name = type(config).__name__
        raise keys.refusal(".rope.scaling.type", f"is not one of {name}: {error}") from error
