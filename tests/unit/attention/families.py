"""Models of families whose demands on attention differ, without weights."""

from typing import Any

import torch

from pyengine.attention.needs import LayerNeeds

_COMMON = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0,
}  # fmt: skip
_MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 128},
    "gemma2": {"head_dim": 256, **_MIXED},
    "gemma3_text": {"head_dim": 256, **_MIXED},
    "gpt_oss": {"head_dim": 64, "num_local_experts": 2, "num_experts_per_tok": 1, **_MIXED},
}
"""Settings by model type."""


def on_meta(model_type: str) -> Any:
    """A model of transformers on the meta device: its modules and configuration are real."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **_COMMON, **MODELS[model_type])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def layers_of(model_type: str) -> tuple[LayerNeeds, ...]:
    """The needs of the layers of such a model."""
    from pyengine.models.fallback import attending_layers

    return attending_layers(on_meta(model_type))
