"""Random models: small ones of many families, and large ones in the shapes of real models."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benches.gpu_check.roofline import ModelSize
from pyengine.models import LoadedModel
from pyengine.models.boundary import quiet_transformers

WINDOW = 48
VOCABULARY = 1024
LONGEST = 1024

# Heads of 128, which every kernel knows, unless the family has its own.
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.08,  # attention matters then: the tests show a wrong window
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SLIDING = {"sliding_window": WINDOW}
# All experts are active: which ones are chosen would be a matter of rounding otherwise.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 128},
    "mistral": _SLIDING,
    "gemma2": {
        "head_dim": 128,
        "query_pre_attn_scalar": 128,
        "attn_logit_softcapping": 5.0,
        **_SLIDING,
    },
    "gpt_oss": {
        "num_attention_heads": 8,
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        **_SLIDING,
    },
    "gemma3_text": {"head_dim": 128, "query_pre_attn_scalar": 128, **_SLIDING},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **_SLIDING},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 4, **_SLIDING},
    "phi3": {},
    "cohere2": {"logit_scale": 1.0, **_SLIDING},
    "olmo2": {},
    "granite": {
        "attention_multiplier": 1 / 64,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "smollm3": {},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
    },
}


def save_small_model(folder: Path, family: str, **changes: Any) -> Path:
    """A random model of a family in bfloat16, the same every time; `folder`, if it is there.

    `changes` go into its configuration, not into its weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    models: Any = AutoModelForCausalLM  # its functions carry no types
    if (folder / "config.json").is_file():
        return folder
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**_BASE, **FAMILIES[family]})
    model = models.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # they start at zero: make them matter
            torch.nn.init.normal_(parameter)
    for name, value in changes.items():
        setattr(model.config, name, value)
    with quiet_transformers():
        model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Shape:
    """The sizes of a real model, to be filled with random weights."""

    name: str
    family: str
    settings: dict[str, Any]

    @cached_property
    def config(self) -> Any:
        """Its transformers configuration."""
        from transformers import AutoConfig

        return AutoConfig.for_model(self.family, **self.settings)

    @property
    def size(self) -> ModelSize:
        """What it reads and computes."""
        return ModelSize.of(self.config)

    def model(self, device: torch.device) -> Any:
        """A transformers model in bfloat16, made on the device."""
        from transformers import AutoModelForCausalLM

        models: Any = AutoModelForCausalLM
        torch.manual_seed(0)
        with device, quiet_transformers():
            model = models.from_config(self.config, dtype=torch.bfloat16)
        return model.eval()

    def load(self, device: torch.device) -> LoadedModel:
        """The same, as the engine loads models."""
        return LoadedModel(
            model=self.model(device),
            tokenizer=None,
            path=Path(self.name),
            name=f"random, in the shape of {self.name}",
            eos_token_ids=frozenset(),
            max_model_len=self.config.max_position_embeddings,
            vocab_size=self.config.vocab_size,
            device=device,
            dtype=torch.bfloat16,
        )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "Qwen3-0.6B",
            "qwen3",
            {
                "vocab_size": 151_936,
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 40_960,
                "tie_word_embeddings": True,
            },
        ),
        Shape(
            "Llama-3.1-8B",
            "llama",
            {
                "vocab_size": 128_256,
                "hidden_size": 4096,
                "intermediate_size": 14_336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131_072,
                "tie_word_embeddings": False,
            },
        ),
        Shape(
            "tiny",  # to see on a CPU that the benchmark runs
            "qwen3",
            {
                "vocab_size": 512,
                "hidden_size": 128,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 64,
                "max_position_embeddings": 1024,
                "tie_word_embeddings": True,
            },
        ),
    )
}
