"""The configuration of a model in a GGUF file, where transformers reads less than the file says.

llama.cpp writes Mixtral as a `llama` with experts, and the width of experts beside that of other
layers. Of GPT-OSS, transformers reads neither the head size nor the scaling of its positions.
Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyengine.models.gguf_header import GGUFHeader

_GPT_OSS = "gpt-oss"

_WIDTHS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_GPT_OSS_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "expert_feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
_TOKENS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "padding_token_id": "pad_token_id",
}


def is_kept_only(header: GGUFHeader) -> bool:
    """True for mixtures of experts that transformers cannot read: Mixtral and GPT-OSS."""
    return _architecture(header) == _GPT_OSS or _is_mixtral(header)


def gguf_tokenizer(path: Path, header: GGUFHeader) -> Any:
    """transformers' tokenizer of the file at `path`, which is alone in its folder."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer reads transformers' configuration of the file.
    kind: Any = PreTrainedTokenizerFast if _architecture(header) == _GPT_OSS else AutoTokenizer
    return kind.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)


def gguf_config(path: Path, header: GGUFHeader) -> Any:
    """The transformers configuration of the file at `path`, which is alone in its folder.

    Raises `ValueError` for numbers that are missing.
    """
    from transformers import AutoConfig

    if _architecture(header) == _GPT_OSS:
        return _gpt_oss_config(header)
    where: Any = {"gguf_file": path.name, "trust_remote_code": False}
    config: Any = AutoConfig.from_pretrained(path.parent, **where)
    if _is_mixtral(header):
        return _mixtral_config(header, config)
    for key, name in _WIDTHS.items():
        width = header.values.get(f"{_architecture(header)}.{key}")
        if width is not None and hasattr(config, name):
            setattr(config, name, width)
    return config


def _architecture(header: GGUFHeader) -> object:
    return header.values.get("general.architecture")


def _is_mixtral(header: GGUFHeader) -> bool:
    count = header.values.get("llama.expert_count")
    return _architecture(header) == "llama" and isinstance(count, int) and count > 0


def _mixtral_config(header: GGUFHeader, llama: Any) -> Any:
    from transformers import MixtralConfig

    known = llama.to_dict()
    names = {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
        *("rms_norm_eps", "rope_parameters", "tie_word_embeddings"),
        *_TOKENS.values(),
    }
    return MixtralConfig(
        **{name: value for name, value in known.items() if name in names},
        num_local_experts=_value(header, "llama.expert_count"),
        num_experts_per_tok=_value(header, "llama.expert_used_count"),
        architectures=["MixtralForCausalLM"],
    )


def _gpt_oss_config(header: GGUFHeader) -> Any:
    from transformers import GptOssConfig

    sizes = {name: _value(header, f"{_GPT_OSS}.{key}") for key, name in _GPT_OSS_SIZES.items()}
    tokens = {
        name: header.values[f"tokenizer.ggml.{key}"]
        for key, name in _TOKENS.items()
        if f"tokenizer.ggml.{key}" in header.values
    }
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if "token_embd.weight" not in shapes:
        raise ValueError("it has no token_embd.weight")
    return GptOssConfig(
        **sizes,
        **tokens,
        vocab_size=shapes["token_embd.weight"][0],
        rope_parameters=dict(_gpt_oss_rope(header)),
        tie_word_embeddings="output.weight" not in shapes,
        architectures=["GptOssForCausalLM"],
    )


def _gpt_oss_rope(header: GGUFHeader) -> Mapping[str, object]:
    """The scaling of positions; its bounds are those of llama.cpp where the file has none."""
    theta = _value(header, f"{_GPT_OSS}.rope.freq_base")
    scaling = f"{_GPT_OSS}.rope.scaling"
    kind = header.values.get(f"{scaling}.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind != "yarn":
        raise ValueError(f"{scaling}.type is {kind!r}, and GPT-OSS scales positions by 'yarn'")
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": _value(header, f"{scaling}.factor"),
        "original_max_position_embeddings": _value(header, f"{scaling}.original_context_length"),
        "beta_fast": header.values.get(f"{scaling}.yarn_beta_fast", 32.0),
        "beta_slow": header.values.get(f"{scaling}.yarn_beta_slow", 1.0),
        "truncate": False,
    }


def _value(header: GGUFHeader, key: str) -> Any:
    """A number that the file has to have."""
    value = header.values.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise ValueError(f"it does not say {key} (found {value!r})")
    return value
