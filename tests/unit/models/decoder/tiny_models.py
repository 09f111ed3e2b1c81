"""Small random models of every family, as transformers saves them: the oracle of ours."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyengine.models.transformers_calls import quiet_transformers
from tests.support.checkpoints import save_model

VOCABULARY = 101
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOW = {"sliding_window": 9}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_DIVISORS = {
    "short_factor": [1.0, 1.3, 1.7],
    "long_factor": [2.0, 3.0, 5.0],
    "original_max_position_embeddings": 96,
}
_BASES_OF_KINDS = ("gemma3_text", "gemma4_text", "mimo_v2_flash", "olmo3")
"""Families whose kinds of layers have different rotary settings."""
_ABSENT: Any = object()
"""A setting that the family does not have."""
_GPT2 = {"num_key_value_heads": _ABSENT, "intermediate_size": _ABSENT}
_MOE = {"moe_intermediate_size": 24}
_CHOSEN = {"num_experts_per_tok": 3}
_GROUPS = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.4,
    "n_shared_experts": 2,
    **_CHOSEN,
}
_LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "first_k_dense_replace": 1,
}


@dataclass(frozen=True)
class Tiny:
    """A model: its family, and settings of its configuration. `name` is that of the test."""

    name: str
    family: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    reads_images: bool = False
    """True for a model of images and text; `settings` are those of its text part."""

    @property
    def configuration(self) -> dict[str, Any]:
        merged = {**_BASE, **self.settings}
        text = {key: value for key, value in merged.items() if value is not _ABSENT}
        return {"text_config": text, "vision_config": _VISION} if self.reads_images else text


Folders = Callable[[Tiny], Path]
"""The folder of a model."""


def rope(base: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {**base, "rope_theta": 5000.0, **more}}


_DELTA = {
    "head_dim": 16,
    "num_hidden_layers": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_QWEN_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 20,
    **_MOE,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_d_conv": 3}
_GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 2.5,
    "residual_multiplier": 0.4,
    "logits_scaling": 1.7,
    "shared_intermediate_size": 40,
    "layer_types": ["mamba", "attention", "mamba"],
}
_NEMOTRON = {
    "num_hidden_layers": _ABSENT,
    "head_dim": 10,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "time_step_min": 1e-6,
    "time_step_floor": 1e-2,
}
_FALCON = {**_MAMBA2, "mamba_d_ssm": 64}
_KIMI = {
    "num_hidden_layers": 5,
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    **_MOE,
}

_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}

RECURRENT = (
    Tiny("qwen3_next", "qwen3_next", {**_DELTA, **_QWEN_MOE, "mlp_only_layers": [1]}),
    Tiny(
        "qwen3_next-types",
        "qwen3_next",
        {
            **_DELTA,
            **_QWEN_MOE,
            "linear_num_value_heads": 2,
            "layer_types": ["full_attention", "linear_attention"] * 2 + ["linear_attention"],
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    Tiny("qwen3_5", "qwen3_5_text", _DELTA),
    Tiny("qwen3_5-images", "qwen3_5", _DELTA, reads_images=True),
    Tiny("qwen3_5_moe", "qwen3_5_moe_text", {**_DELTA, **_QWEN_MOE}),
    Tiny("qwen3_5_moe-images", "qwen3_5_moe", {**_DELTA, **_QWEN_MOE}, reads_images=True),
    Tiny("olmo_hybrid", "olmo_hybrid", {"num_key_value_heads": 3}),
    Tiny(
        "olmo_hybrid-plain",
        "olmo_hybrid",
        {
            "num_hidden_layers": 5,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 10,
            "linear_conv_kernel_dim": 2,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "rope_parameters": {"rope_theta": None, "rope_type": "default"},
        },
    ),
    Tiny("kimi_linear", "kimi_linear", _KIMI),
    Tiny(
        "kimi_linear-groups",
        "kimi_linear",
        {
            **_KIMI,
            "num_hidden_layers": 3,
            "q_lora_rank": 18,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    Tiny(
        "granitemoehybrid",
        "granitemoehybrid",
        {
            **_MAMBA2,
            **_GRANITE,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "position_embedding_type": "rope",
        },
    ),
    Tiny(
        "granitemoehybrid-dense",
        "granitemoehybrid",
        {
            **_MAMBA2,
            **_GRANITE,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
        },
    ),
    Tiny(
        "nemotron_h",
        "nemotron_h",
        {
            **_NEMOTRON,
            "layers_block_type": ["moe", "mamba", "mamba", "attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 32,
            "routed_scaling_factor": 1.4,
            "moe_latent_size": 20,
            "use_bias": True,
        },
    ),
    Tiny(
        "nemotron_h-dense",
        "nemotron_h",
        {**_NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba", "mlp"]},
    ),
    Tiny("falcon_h1", "falcon_h1", _FALCON),
    Tiny(
        "falcon_h1-scales",
        "falcon_h1",
        {
            **_FALCON,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 1.3,
            "key_multiplier": 0.6,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.7,
            "ssm_multipliers": [0.5, 1.1, 0.9, 1.3, 0.7],
            "mlp_multipliers": [0.8, 1.4],
            "embedding_multiplier": 2.5,
            "lm_head_multiplier": 0.6,
            "attention_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
        },
    ),
    Tiny("falcon_h1-norm", "falcon_h1", {**_FALCON, "mamba_rms_norm": True, "mlp_bias": True}),
    Tiny(
        "jamba",
        "jamba",
        {
            "num_hidden_layers": 5,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    Tiny(
        "jamba-biases",
        "jamba",
        {
            "num_experts": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_dt_rank": 5,
            "mamba_d_state": 8,
        },
    ),
    Tiny("lfm2", "lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    Tiny(
        "lfm2-biases",
        "lfm2",
        {
            "full_attn_idxs": [1],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    Tiny(
        "lfm2_moe",
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.4,
            **_MOE,
        },
    ),
)
"""Models whose layers keep states; they are in `MODELS`, too."""

MODELS = (
    Tiny("llama", "llama"),
    Tiny("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    Tiny("llama-tied", "llama", {"tie_word_embeddings": True, "num_key_value_heads": None}),
    Tiny("llama-3.1", "llama", rope(_LLAMA3)),
    Tiny("llama-linear", "llama", rope({"rope_type": "linear", "factor": 2.5})),
    Tiny("llama-dynamic", "llama", rope({"rope_type": "dynamic", "factor": 2.0})),
    Tiny("llama-yarn", "llama", rope(_YARN)),
    Tiny("llama-yarn-scales", "llama", rope(_YARN, mscale=0.7, mscale_all_dim=1.3)),
    Tiny("llama-yarn-betas", "llama", rope(_YARN, beta_fast=16.0, beta_slow=2.0, truncate=False)),
    Tiny("llama-relu2", "llama", {"hidden_act": "relu2", "num_attention_heads": 4}),
    Tiny("qwen2", "qwen2"),
    Tiny("qwen2-window", "qwen2", {"use_sliding_window": True, "max_window_layers": 1, **_WINDOW}),
    Tiny("qwen3", "qwen3", {"head_dim": 14, "attention_bias": True}),
    Tiny("qwen3-tied", "qwen3", {"head_dim": 12, "tie_word_embeddings": True, **rope(_YARN)}),
    Tiny("mistral", "mistral", {"sliding_window": None}),
    Tiny("mistral-window", "mistral", {"head_dim": 10, **_WINDOW}),
    Tiny("gemma", "gemma", {"head_dim": 14}),
    Tiny(
        "gemma2",
        "gemma2",
        {
            "head_dim": 14,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
            **_WINDOW,
        },
    ),
    Tiny("gemma2-biases", "gemma2", {"head_dim": 8, "attention_bias": True, **_WINDOW}),
    Tiny(
        "gemma3",
        "gemma3_text",
        {"head_dim": 14, "query_pre_attn_scalar": 10, "num_hidden_layers": 7, **_WINDOW},
    ),
    Tiny(
        "gemma3-linear",
        "gemma3_text",
        {
            "head_dim": 10,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 4.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
            **_WINDOW,
        },
    ),
    Tiny("phi3", "phi3", {"num_key_value_heads": 6, **_WINDOW}),
    Tiny("phi3-partial", "phi3", {"num_key_value_heads": 3, "partial_rotary_factor": 0.5}),
    Tiny(
        "phi3-longrope",
        "phi3",
        {
            "original_max_position_embeddings": 96,
            "rope_parameters": {
                **_DIVISORS,
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    Tiny("smollm3", "smollm3", {"num_hidden_layers": 5}),
    Tiny(
        "smollm3-window",
        "smollm3",
        {
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "attention_bias": True,
            **_WINDOW,
        },
    ),
    Tiny("olmo2", "olmo2"),
    Tiny("olmo2-biases", "olmo2", {"attention_bias": True, **rope(_LLAMA3)}),
    Tiny(
        "granite",
        "granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 2.5,
            "residual_multiplier": 0.4,
            "logits_scaling": 1.7,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    Tiny("cohere2", "cohere2", {"num_hidden_layers": 5, "logit_scale": 0.7, **_WINDOW}),
    Tiny("cohere2-biases", "cohere2", {"attention_bias": True, "tie_word_embeddings": False}),
    Tiny("mixtral", "mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    Tiny("mixtral-window", "mixtral", {"num_local_experts": 3, "head_dim": 10, **_WINDOW}),
    Tiny(
        "granitemoe",
        "granitemoe",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 2.5,
            "residual_multiplier": 0.4,
            "logits_scaling": 1.7,
        },
    ),
    Tiny(
        "qwen2_moe",
        "qwen2_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 56, **_MOE},
    ),
    Tiny(
        "qwen2_moe-window",
        "qwen2_moe",
        {
            "num_experts": 6,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "qkv_bias": False,
            "shared_expert_intermediate_size": 56,
            "use_sliding_window": True,
            "max_window_layers": 2,
            **_MOE,
            **_WINDOW,
        },
    ),
    Tiny("qwen3_moe", "qwen3_moe", {"num_experts": 9, "num_experts_per_tok": 3, **_MOE}),
    Tiny(
        "qwen3_moe-window",
        "qwen3_moe",
        {
            "num_experts": 9,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "attention_bias": True,
            **_MOE,
            **_WINDOW,
        },
    ),
    Tiny(
        "gpt_oss",
        "gpt_oss",
        {"head_dim": 14, "num_local_experts": 5, "num_experts_per_tok": 2, **_WINDOW},
    ),
    Tiny(
        "gpt_oss-default-rope",
        "gpt_oss",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "swiglu_limit": 0.3,
            **rope({"rope_type": "default"}),
        },
    ),
    Tiny("glm4_moe", "glm4_moe", {"head_dim": 12, "first_k_dense_replace": 1, **_MOE, **_GROUPS}),
    Tiny(
        "glm4_moe-norms",
        "glm4_moe",
        {"head_dim": 12, "use_qk_norm": True, "attention_bias": True, **_MOE, **_GROUPS},
    ),
    Tiny("minimax_m2", "minimax_m2", {"head_dim": 14, "num_local_experts": 7, **_CHOSEN}),
    Tiny(
        "minimax_m2-partial",
        "minimax_m2",
        {"head_dim": 14, "num_local_experts": 7, "rotary_dim": 6, **_CHOSEN},
    ),
    Tiny("deepseek_v3", "deepseek_v3", {**_MOE, **_GROUPS, **_LATENT}),
    Tiny(
        "deepseek_v3-yarn",
        "deepseek_v3",
        {
            **_MOE,
            **_GROUPS,
            **_LATENT,
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_interleave": False,
            "norm_topk_prob": False,
            **rope(_YARN, mscale=1.0, mscale_all_dim=1.2),
        },
    ),
    Tiny(
        "glm4_moe_lite",
        "glm4_moe_lite",
        {**_MOE, **_GROUPS, **_LATENT, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    Tiny("seed_oss", "seed_oss", {"head_dim": 10}),
    Tiny(
        "seed_oss-biases",
        "seed_oss",
        {"head_dim": 10, "attention_out_bias": True, "mlp_bias": True},
    ),
    Tiny("glm4", "glm4", {"head_dim": 12}),
    Tiny(
        "glm4-partial",
        "glm4",
        {"head_dim": 12, "partial_rotary_factor": 0.25, "attention_bias": False},
    ),
    Tiny("olmo3", "olmo3", {"num_hidden_layers": 5, **_WINDOW}),
    Tiny(
        "olmo3-yarn",
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {**_YARN, "rope_theta": 700.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
            **_WINDOW,
        },
    ),
    Tiny("exaone4", "exaone4", {"num_hidden_layers": 5, **_WINDOW}),
    Tiny(
        "exaone4-full",
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "head_dim": 10},
    ),
    Tiny(
        "ministral3",
        "ministral3",
        {
            "head_dim": 10,
            **rope(_YARN, llama_4_scaling_beta=0.3, original_max_position_embeddings=7),
        },
    ),
    Tiny(
        "granite_swa",
        "granite_swa",
        {
            "num_hidden_layers": 5,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 2.5,
            "residual_multiplier": 0.4,
            "logits_scaling": 1.7,
            "layer_rope_theta": [0, 500.0, 90.0, 0, 500.0],
            **_WINDOW,
        },
    ),
    Tiny("granite_swa-plain", "granite_swa", {"tie_word_embeddings": False, **_WINDOW}),
    Tiny("starcoder2", "starcoder2"),
    Tiny("starcoder2-window", "starcoder2", {"use_bias": False, "hidden_act": "gelu", **_WINDOW}),
    Tiny("nemotron", "nemotron"),
    Tiny("nemotron-biases", "nemotron", {"head_dim": 10, "attention_bias": True, "mlp_bias": True}),
    Tiny("stablelm", "stablelm", {"use_qkv_bias": True}),
    Tiny(
        "stablelm-parallel",
        "stablelm",
        {"use_parallel_residual": True, "partial_rotary_factor": 0.5, "num_key_value_heads": 6},
    ),
    Tiny("gpt2", "gpt2", _GPT2),
    Tiny(
        "gpt2-scales",
        "gpt2",
        {
            **_GPT2,
            "n_inner": 50,
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
            "activation_function": "relu",
            "tie_word_embeddings": False,
        },
    ),
    Tiny(
        "gemma4",
        "gemma4_text",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "num_hidden_layers": 6,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 6,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            **_WINDOW,
        },
    ),
    Tiny(
        "gemma4-keys",
        "gemma4_text",
        {
            "head_dim": 10,
            "global_head_dim": 14,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 3.0,
            **_WINDOW,
        },
    ),
    Tiny(
        "mimo_v2_flash",
        "mimo_v2_flash",
        {
            "head_dim": 18,
            "v_head_dim": 12,
            "num_hidden_layers": 7,
            "num_key_value_heads": 1,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.4,
            **_MOE,
            **_CHOSEN,
            **_WINDOW,
        },
    ),
    *RECURRENT,
)


def random_model(tiny: Tiny) -> Any:
    """The model in float32, the same every time; no weight has its initial value."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    config = AutoConfig.for_model(tiny.family, **tiny.configuration)
    models: Any = AutoModelForImageTextToText if tiny.reads_images else AutoModelForCausalLM
    model = models.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar", "expert_bias")):
                buffer.add_(torch.randn(buffer.shape) * 0.2)
    return model.eval()


def save(tiny: Tiny, folder: Path) -> Any:
    """Save the model in `folder`; returns it."""
    model = random_model(tiny)
    with quiet_transformers():
        model.save_pretrained(folder)
    return model


def save_without_torch(tiny: Tiny, folder: Path) -> None:
    """Save other weights of the same names, and the settings that the model has."""
    settings, rope = tiny.configuration, {"rope_type": "default", "rope_theta": 1e4}
    kinds = ("full_attention", "sliding_attention")
    if tiny.family in _BASES_OF_KINDS:
        settings.setdefault("rope_parameters", dict.fromkeys(kinds, rope))
    elif tiny.family != "gpt2":
        text_of(settings).setdefault("rope_parameters", rope)
    save_model(folder, tiny.family, **settings)


def configuration_in(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


def text_of(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of the text part, of a model that reads images too; else all of them."""
    text: dict[str, Any] = values.get("text_config", values)
    return text


def with_text(values: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """The configuration with these settings of its text part."""
    return {**values, "text_config": text} if "text_config" in values else text
