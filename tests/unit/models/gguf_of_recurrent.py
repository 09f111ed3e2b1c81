"""GGUF files of transformers' models that keep states, written as llama.cpp's converter does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.models.decoder.tiny_models import RECURRENT, VOCABULARY, Tiny
from tests.unit.models.gguf_of_model import MERGES, TOKENS
from tests.unit.models.tiny_gguf import add_value

_BY_NAME = {tiny.name: tiny for tiny in RECURRENT}


def _tiny(name: str, **changes: Any) -> Tiny:
    tiny = _BY_NAME[name]
    return replace(tiny, settings={**tiny.settings, **changes})


TINY = {
    "lfm2": _tiny("lfm2"),
    "lfm2moe": _tiny("lfm2_moe", routed_scaling_factor=1.0),
    "qwen3next": _tiny("qwen3_next", mlp_only_layers=[]),
    "qwen35": _tiny("qwen3_5"),
    "qwen35moe": _tiny("qwen3_5_moe"),
    "granitehybrid": _tiny("granitemoehybrid", position_embedding_type="nope"),
    "granitehybrid-dense": _tiny("granitemoehybrid-dense", mamba_proj_bias=False),
    "nemotron_h": _tiny("nemotron_h-dense"),
    "nemotron_h_moe": _tiny("nemotron_h"),
    "falcon-h1": _tiny(
        "falcon_h1-scales", attention_bias=False, mamba_proj_bias=False, projectors_bias=False
    ),
    "jamba": _tiny("jamba"),
}
"""Models by the architecture of their files; what follows a hyphen of Granite is for tests."""


def write(
    path: Path,
    architecture: str,
    model: Any,
    *,
    kind: str = "F32",
    values: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
) -> list[str]:
    """Write `model` to `path`; returns the keys of the architecture.

    `kind` is the type of its matrices; `values` are other values of keys, None: without it;
    `extra` are more tensors.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    name = architecture.removesuffix("-dense")
    writer = GGUFWriter(path, name)
    keys = _keys(name, model.config) | (values or {})
    for key, value in keys.items():
        if value is not None:
            add_value(writer, f"{name}.{key}", value)
    add_value(writer, "tokenizer.ggml.model", "gpt2")
    tokens = [*TOKENS, *(f"t{number}" for number in range(len(TOKENS), VOCABULARY))]
    add_value(writer, "tokenizer.ggml.tokens", tokens)
    add_value(writer, "tokenizer.ggml.merges", MERGES)
    for key, numbers in (_tensors(name, model) | (extra or {})).items():
        is_float = numbers.ndim == 1 or "_inp." in key or "conv" in key.split(".")[-2]
        is_float |= key.endswith(("ssm_a", "ssm_d")) or "norm" in key
        to = GGMLQuantizationType["F32" if is_float or numbers.shape[-1] % 32 else kind]
        dense = np.ascontiguousarray(numbers, np.float32)
        writer.add_tensor(key, quantize(dense, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return list(keys)


def _keys(name: str, config: Any) -> dict[str, Any]:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attends = [kind in ("full_attention", "hybrid") for kind in config.layer_types]
    groups = [config.num_key_value_heads if attending else 0 for attending in attends]
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": groups,
        "attention.layer_norm_rms_epsilon": _epsilon(config),
        "vocab_size": VOCABULARY,
    }
    rope = getattr(config, "rope_parameters", None)
    if rope:
        keys["rope.freq_base"] = float(rope["rope_theta"])
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", 0)
    if experts and config.num_experts_per_tok:
        keys |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    if name.startswith("lfm2"):
        keys["shortconv.l_cache"] = config.conv_L_cache
        keys["feed_forward_length"] = 256 if name == "lfm2" else config.intermediate_size
    if name == "lfm2moe":
        keys |= {
            "expert_feed_forward_length": config.moe_intermediate_size,
            "leading_dense_block_count": config.num_dense_layers,
            "expert_gating_func": 2,
        }
    if name.startswith("qwen3"):
        inner = config.linear_value_head_dim * config.linear_num_value_heads
        keys |= {
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.key_length": head,
            "attention.value_length": head,
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": inner,
            "full_attention_interval": 4,
            "rope.dimension_count": head // 4,
        }
    if name.startswith("qwen35"):
        keys["rope.dimension_sections"] = [11, 11, 10, 0]
    if name in ("qwen3next", "qwen35moe"):
        keys |= {
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    if name == "granitehybrid":
        keys |= {
            "residual_scale": config.residual_multiplier,
            "embedding_scale": config.embedding_multiplier,
            "logit_scale": config.logits_scaling,
            "attention.scale": config.attention_multiplier,
            "rope.scaling.finetuned": False,
            "rope.dimension_count": head,
            "expert_shared_feed_forward_length": config.shared_intermediate_size,
        }
    if name in ("granitehybrid", "falcon-h1"):
        keys |= {
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.state_size": config.mamba_d_state,
            "ssm.group_count": config.mamba_n_groups,
            "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
            "ssm.time_step_rank": config.mamba_n_heads,
        }
    if name.startswith("nemotron"):
        return _nemotron_keys(name, config, keys, head)
    if name == "jamba":
        keys |= {
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.state_size": config.mamba_d_state,
            "ssm.inner_size": config.mamba_expand * config.hidden_size,
            "ssm.time_step_rank": config.mamba_dt_rank,
        }
    return keys


def _nemotron_keys(name: str, config: Any, keys: dict[str, Any], head: int) -> dict[str, Any]:
    size = config.moe_intermediate_size if name.endswith("moe") else config.intermediate_size
    keys |= {
        "attention.key_length": head,
        "attention.value_length": head,
        "feed_forward_length": [
            size if kind in ("mlp", "moe") else 0 for kind in config.layers_block_type
        ],
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
    }
    if name == "nemotron_h":
        keys = {key: value for key, value in keys.items() if not key.startswith("expert")}
    if name == "nemotron_h_moe":
        keys |= {
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_group_count": 1,
            "moe_latent_size": config.moe_latent_size,
        }
    return keys


def _epsilon(config: Any) -> float:
    names = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
    return float(next(getattr(config, name) for name in names if hasattr(config, name)))


_KINDS = {
    "embed_tokens": "token_embd",
    "embeddings": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "norm_f": "output_norm",
    "final_layernorm": "output_norm",
    "embedding_norm": "token_embd_norm",
}
_OF_LAYERS = {
    **dict.fromkeys(("input_layernorm", "operator_norm", "norm"), "attn_norm"),
    **dict.fromkeys(("ffn_norm", "pre_ff_layernorm"), "ffn_norm"),
    **{f"{part}_proj": f"attn_{part}" for part in "qkv"},
    **dict.fromkeys(("self_attn.o_proj", "self_attn.out_proj", "mixer.o_proj"), "attn_output"),
    **dict.fromkeys(("q_norm", "q_layernorm"), "attn_q_norm"),
    **dict.fromkeys(("k_norm", "k_layernorm"), "attn_k_norm"),
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    **dict.fromkeys(("feed_forward.w1", "gate_proj"), "ffn_gate"),
    **dict.fromkeys(("feed_forward.w2", "down_proj"), "ffn_down"),
    **dict.fromkeys(("feed_forward.w3", "up_proj"), "ffn_up"),
    **dict.fromkeys(("gate", "router"), "ffn_gate_inp"),
    "shared_expert_gate": "ffn_gate_inp_shexp",
    "shared_expert.gate_proj": "ffn_gate_shexp",
    **dict.fromkeys(("shared_expert.up_proj", "shared_experts.up_proj"), "ffn_up_shexp"),
    **dict.fromkeys(("shared_expert.down_proj", "shared_experts.down_proj"), "ffn_down_shexp"),
    "fc1_latent_proj": "ffn_latent_down",
    "fc2_latent_proj": "ffn_latent_up",
    "experts.up_proj": "ffn_up_exps",
    "experts.down_proj": "ffn_down_exps",
    "in_proj_qkv": "attn_qkv",
    "in_proj_z": "attn_gate",
    "in_proj_ba": "ssm_ba",
    "in_proj_b": "ssm_beta",
    "in_proj_a": "ssm_alpha",
    "conv1d": "ssm_conv1d",
    **dict.fromkeys(("linear_attn.norm", "mamba.norm", "mixer.norm"), "ssm_norm"),
    **dict.fromkeys(("linear_attn.out_proj", "mamba.out_proj", "mixer.out_proj"), "ssm_out"),
    **dict.fromkeys(("mamba.in_proj", "mixer.in_proj"), "ssm_in"),
    "x_proj": "ssm_x",
    "dt_proj": "ssm_dt",
    "dt_layernorm": "ssm_dt_norm",
    "b_layernorm": "ssm_b_norm",
    "c_layernorm": "ssm_c_norm",
}


def _name_of(name: str, own: str) -> str:
    """The name in the file of a module in a layer, by its longest known end."""
    if own.endswith("post_attention_layernorm"):
        return "post_attention_norm" if name.startswith("qwen3") else "ffn_norm"
    parts = own.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next(_OF_LAYERS[end] for end in ends if end in _OF_LAYERS)


def _tensors(name: str, model: Any) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for own, weight in model.state_dict().items():
        values, (stem, _, end) = weight.numpy(), own.rpartition(".")
        if own == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if ".layers." not in own:
            known = next(of for part, of in _KINDS.items() if stem.endswith(part))
            tensors[f"{known}.{end}"] = _scaled(name, model.config, known, values)
            continue
        layer, inner = own.split(".layers.")[1].split(".", 1)
        for key, part in _in_layer(name, model.config, inner, values):
            tensors[f"blk.{layer}.{key}"] = part
    return tensors


def _of_experts(name: str, config: Any, own: str, values: Any) -> list[tuple[str, Any]] | None:
    """Tensors of experts and of what transformers joins; None: it is another tensor."""
    end = own.rpartition(".")[2]
    if own.endswith(("e_score_correction_bias", "expert_bias")):
        return [("exp_probs_b.bias", values)]
    if own.endswith(("experts.gate_up_proj", "input_linear.weight")):
        gate, up = np.split(values, 2, -2)
        kind = "exps" if "experts" in own else "shexp"
        if name == "granitehybrid" and kind == "shexp" and not config.num_local_experts:
            return [("ffn_gate.weight", gate), ("ffn_up.weight", up)]
        return [(f"ffn_gate_{kind}.weight", gate), (f"ffn_up_{kind}.weight", up)]
    if own.endswith("shared_mlp.output_linear.weight"):
        kind = "_shexp" if config.num_local_experts else ""
        return [(f"ffn_down{kind}.weight", values)]
    if end in ("down_proj", "up_proj"):  # of all experts
        return [(f"ffn_{end.removesuffix('_proj')}_exps.weight", values)]
    return None


def _in_layer(name: str, config: Any, own: str, values: Any) -> list[tuple[str, Any]]:
    stem, _, end = own.rpartition(".")
    if (experts := _of_experts(name, config, own, values)) is not None:
        return experts
    if name.startswith("qwen35") and stem.startswith("linear_attn"):
        values = _tiled(config, own, values)
    if own.endswith("in_proj_qkvz.weight"):
        return _ungrouped(config, values)
    if end == "A_log":
        values = -np.exp(values)
        return [("ssm_a", values[:, None] if name[:4] in ("gran", "nemo", "falc") else values)]
    if end == "D":
        return [("ssm_d", values if name == "jamba" else values[:, None])]
    if end == "dt_bias":
        return [("ssm_dt.bias", values)]
    known = _name_of(name, stem)
    if known in ("ssm_conv1d", "shortconv.conv") and end == "weight":
        values = values.squeeze(1)
    if known == "ffn_gate_inp_shexp":
        values = values[0]
    if known == "ssm_norm" and not name.startswith("qwen3"):
        groups = getattr(config, "mamba_n_groups", None) or config.n_groups
        values = values.reshape(groups, -1)
    if name.startswith("qwen3") and known.endswith("norm") and known != "ssm_norm":
        values = values + 1
    return [(f"{known}.{end}", _scaled(name, config, known, values))]


def _scaled(name: str, config: Any, known: str, values: Any) -> Any:
    """A weight times the factors of Falcon-H1, and norms outside of layers plus 1 for Qwen."""
    if known == "output_norm" and name.startswith("qwen3"):
        return values + 1
    if name != "falcon-h1":
        return values
    width = config.mamba_d_ssm
    state = config.mamba_n_groups * config.mamba_d_state
    factors = {
        "token_embd": config.embedding_multiplier,
        "output": config.lm_head_multiplier,
        "ffn_gate": config.mlp_multipliers[0],
        "ffn_down": config.mlp_multipliers[1],
        "attn_q": config.attention_in_multiplier,
        "attn_k": config.attention_in_multiplier * config.key_multiplier,
        "attn_v": config.attention_in_multiplier,
        "attn_output": config.attention_out_multiplier,
        "ssm_out": config.ssm_out_multiplier,
        "ssm_in": config.ssm_in_multiplier
        * np.repeat(config.ssm_multipliers, [width, width, state, state, config.mamba_n_heads])[
            :, None
        ],
    }
    return values * factors.get(known, 1.0)


def _ungrouped(config: Any, values: Any) -> list[tuple[str, Any]]:
    """Qwen3-Next's projections, which files of transformers have head by head."""
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    rest = config.linear_num_value_heads // heads * config.linear_value_head_dim
    parts = np.split(values.reshape(heads, -1, values.shape[1]), np.cumsum([size, size, rest]), 1)
    query, key, value, gate = (part.reshape(-1, values.shape[1]) for part in parts)
    qkv = np.concatenate([query, key, value])
    return [("attn_qkv.weight", qkv), ("attn_gate.weight", gate)]


def _tiled(config: Any, own: str, values: Any) -> Any:
    """Qwen3.5's value heads, sorted by their number among those of a key head."""
    heads, size = config.linear_num_key_heads, config.linear_value_head_dim
    keys = 2 * heads * config.linear_key_head_dim

    def sorted_rows(rows: Any, width: int) -> Any:
        shape = (heads, -1, width, *rows.shape[1:])
        return rows.reshape(shape).swapaxes(0, 1).reshape(rows.shape)

    if "in_proj_qkv" in own or "conv1d" in own:
        return np.concatenate([values[:keys], sorted_rows(values[keys:], size)])
    if "in_proj_z" in own:
        return sorted_rows(values, size)
    if "out_proj" in own:
        return sorted_rows(values.T, size).T
    if own.endswith("norm.weight"):
        return values
    return sorted_rows(values, 1)
