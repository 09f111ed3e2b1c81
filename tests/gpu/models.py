"""Small random models of many families, engines over them, and how a backend says no."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benches.gpu.target import Target
from pyengine import LLM
from pyengine.attention.choice import _CANDIDATES
from pyengine.errors import ConfigurationError
from pyengine.models.transformers_calls import quiet_transformers

ORACLE = "gather"
WINDOW = 48
VOCABULARY = 1024
LONGEST = 1024
_POOL = {True: 256 << 20, False: 24 << 20}
"""Bytes, on CUDA and on the CPU."""
_FLEX_BLOCKS = 36
"""Of a pool for FlexAttention on the CPU, of 64 tokens: every step looks at every slot there."""

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
    "phi3": {"num_key_value_heads": 4},  # as many as query heads
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
DELTA = {
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
WITH_STATES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_5_text": DELTA,
    "granitemoehybrid": {
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_d_state": 32,
        "shared_intermediate_size": 512,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": ["mamba", "attention", "mamba"],
    },
}
"""Families with recurrent layers: short convolutions, a delta rule, a state space."""


def random_model(family: str, **settings: Any) -> Any:
    """A random model in bfloat16, the same every time; `settings` go into its configuration."""
    return model_of(family, {**_BASE, **{**FAMILIES, **WITH_STATES}[family], **settings})


def model_of(family: str, settings: dict[str, Any]) -> Any:
    """A random model in bfloat16 of this configuration, the same every time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **settings)
    models: Any = AutoModelForCausalLM
    model = models.from_config(config, dtype=torch.bfloat16)
    for key, parameter in model.named_parameters():
        if key.endswith("sinks"):  # they start at zero: make them matter
            torch.nn.init.normal_(parameter)
    return model.eval()


class Refused(Exception):
    """A backend says that it cannot serve, and why: no failure, nothing to check."""


class Place(Target):
    """The device that checks run on, and a folder for their models."""

    @property
    def formats(self) -> tuple[str, ...]:
        """The number formats in which a backend is tried, until it serves one."""
        return ("bfloat16",) if self.on_cuda else ("bfloat16", "float32")

    def model(self, family: str, name: str | None = None, **changes: Any) -> Path:
        """The folder of a random model in bfloat16, the same every time; made when asked for.

        `changes` go into its configuration, not into its weights.
        """
        folder = Path(self.folder) / (name or family)
        if (folder / "config.json").is_file():
            return folder
        model = random_model(family)
        for key, value in changes.items():
            setattr(model.config, key, value)
        with quiet_transformers():
            model.save_pretrained(folder)
        return folder

    def llm(self, folder: Path, dtype: str, backend: str, **settings: Any) -> LLM:
        """An engine over a small model; what is not given is small too, eager, and not compiled.

        Raises `Refused` if the backend says that it cannot serve. One that is installed and does
        not import, compile or run is a failure.
        """
        pool: dict[str, Any] = {"kv_cache_memory": _POOL[self.on_cuda]}
        if backend == "flex" and not self.on_cuda:
            pool = {"num_blocks": _FLEX_BLOCKS}
        settings = {
            **({} if "num_blocks" in settings else pool),
            "max_model_len": LONGEST,
            "max_num_seqs": 8,
            "enforce_eager": True,
            "compile": False,
            **settings,
        }
        try:
            return LLM(
                folder, device=self.device, dtype=dtype, attention_backend=backend, **settings
            )
        except ConfigurationError as error:
            said = str(error)
            if "cannot serve: " in said and "it was tried and failed" not in said:
                raise Refused(said.partition("; ")[0]) from error
            raise

    def first_served(self, build: Callable[[str], LLM]) -> tuple[str, LLM]:
        """The first number format that the backend serves, and its engine."""
        for dtype in self.formats[:-1]:
            try:
                return dtype, build(dtype)
            except Refused:
                continue
        return self.formats[-1], build(self.formats[-1])


def backends() -> list[str]:
    """All that there are; what compiles for each model, or is slow, comes last."""
    return sorted(_CANDIDATES, key=lambda name: name == "flex")
