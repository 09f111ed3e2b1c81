"""Configurations of further releases, older forms among them, mean what transformers reads in them.

transformers writes what it read in the newest form; both forms give one spec.
"""

import json
from dataclasses import replace
from typing import Any

import pytest

from pyengine.errors import ModelLoadError
from pyengine.models.decoder.families import TABLE
from pyengine.models.decoder.loading import spec_of
from tests.unit.models.decoder.test_recurrent_released import RELEASED as RECURRENT
from tests.unit.models.decoder.test_released import RELEASED, config, sizes_of
from tests.unit.models.decoder.test_rotary_forms import newest

_LONG = {"long_factor": [1.1] * 48, "short_factor": [1.05] * 48}
_LLAMA3 = RELEASED["Llama-3.1"]["rope_scaling"]


def like(name: str, *sizes: int, **changed: Any) -> dict[str, Any]:
    """That release with other values; its sizes, if they differ, in the order of `config`."""
    return {**RELEASED[name], **(sizes_of(*sizes) if sizes else {}), **changed}


VARIANTS: dict[str, dict[str, Any]] = {
    "Llama-2-chat": config(
        *("llama", 4096, 11008, 32, 32, 32),
        _name_or_path="meta-llama/Llama-2-7b-chat-hf",
        max_position_embeddings=4096,
        pretraining_tp=1,
        rms_norm_eps=1e-05,
        rope_scaling=None,
    ),
    "TinyLlama-Chat": config(
        *("llama", 2048, 5632, 22, 32, 4), max_position_embeddings=2048, rms_norm_eps=1e-05
    ),
    "Llama-3.2-Instruct": like(
        *("Llama-3.1", 2048, 8192, 16, 32, 8),
        head_dim=64,
        rope_scaling={**_LLAMA3, "factor": 32.0},
        tie_word_embeddings=True,
        unsloth_fixed=True,
    ),
    "Yi-linear": config(
        *("llama", 4096, 11008, 32, 32, 4),
        rope_scaling={"type": "linear", "factor": 8.0},
        rope_theta=5000000.0,
    ),
    "vicuna-16k": config(
        *("llama", 4096, 11008, 32, 32, 32),
        max_position_embeddings=4096,
        max_sequence_length=16384,
        rope_scaling={"factor": 4.0, "type": "linear"},
    ),
    "DeepSeek-R1-Distill-Qwen": config(
        *("qwen2", 1536, 8960, 28, 12, 2),
        max_position_embeddings=131072,
        max_window_layers=21,
        rope_theta=10000,
        sliding_window=4096,
        use_mrope=False,
        use_sliding_window=False,
    ),
    "Qwen2.5-Instruct-yarn": like(
        *("Qwen2.5", 3584, 18944, 28, 28, 4),
        max_window_layers=28,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        sliding_window=131072,
        tie_word_embeddings=False,
    ),
    "Qwen3-Instruct-2507": like(
        *("Qwen3", 2560, 9728, 36, 32, 8),
        max_position_embeddings=262144,
        max_window_layers=36,
        rope_theta=5000000,
        tie_word_embeddings=True,
    ),
    "Mistral-v0.1": config("mistral", 4096, 14336, 32, 32, 8, sliding_window=4096),
    "Mistral-Nemo-Instruct": like(
        *("Mistral", 5120, 14336, 40, 32, 8),
        head_dim=128,
        max_position_embeddings=131072,
        rope_theta=1000000.0,
    ),
    "Ministral-3-Instruct": config(
        *("ministral3", 4096, 14336, 34, 32, 8),
        head_dim=128,
        max_position_embeddings=262144,
        rope_parameters={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        sliding_window=None,
    ),
    "gemma-1.1-it": config(
        *("gemma", 2048, 16384, 18, 8, 1),
        attention_bias=False,
        head_dim=256,
        hidden_act="gelu",
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=8192,
        rope_scaling=None,
        rope_theta=10000.0,
    ),
    "gemma-2-it": like(
        *("Gemma-2", 3584, 14336, 42, 16, 8),
        hidden_act="gelu_pytorch_tanh",
        rope_theta=10000.0,
        sliding_window_size=4096,
    ),
    "Phi-3-mini-4k": config(
        *("phi3", 3072, 8192, 32, 32, 32),
        attention_bias=False,
        embd_pdrop=0.0,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        resid_pdrop=0.0,
        rope_scaling=None,
        rope_theta=10000.0,
        sliding_window=2047,
    ),
    "Phi-3.5-mini": config(
        *("phi3", 3072, 8192, 32, 32, 32),
        attention_bias=False,
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_scaling={**_LONG, "type": "longrope"},
        sliding_window=262144,
    ),
    "OLMo-2-Instruct": like(
        "OLMo-2", 4096, 11008, 32, 32, 32, max_position_embeddings=4096, rope_theta=500000
    ),
    "granite-3.3-instruct": like(
        *("Granite", 4096, 12800, 40, 32, 8),
        attention_multiplier=0.0078125,
        logits_scaling=16.0,
        mlp_bias=False,
        rope_theta=10000000.0,
        tie_word_embeddings=True,
    ),
    "granite-3.1-a400m": config(
        *("granitemoe", 1024, 512, 24, 16, 8),
        attention_bias=False,
        attention_multiplier=0.015625,
        embedding_multiplier=12.0,
        logits_scaling=6.0,
        num_experts_per_tok=8,
        num_local_experts=32,
        output_router_logits=False,
        residual_multiplier=0.22,
        router_aux_loss_coef=0.0,
        tie_word_embeddings=True,
    ),
    "Qwen1.5-MoE-A2.7B": config(
        *("qwen2_moe", 2048, 5632, 24, 16, 16),
        decoder_sparse_step=1,
        max_window_layers=21,
        moe_intermediate_size=1408,
        norm_topk_prob=False,
        num_experts=60,
        num_experts_per_tok=4,
        output_router_logits=False,
        shared_expert_intermediate_size=5632,
        sliding_window=32768,
        use_sliding_window=False,
    ),
    "Mixtral-Instruct": like("Mixtral", rope_theta=1000000.0),
    "MiniMax-M2": config(
        *("minimax_m2", 3072, 1536, 62, 48, 8),
        attn_type_list=[1] * 62,
        head_dim=128,
        max_position_embeddings=196608,
        mtp_transformer_layers=1,
        num_experts_per_tok=8,
        num_local_experts=256,
        num_mtp_modules=3,
        qk_norm_type="per_layer",
        rope_theta=5000000,
        rotary_dim=64,
        scoring_func="sigmoid",
        shared_intermediate_size=0,
        use_mtp=True,
        use_qk_norm=True,
        use_routing_bias=True,
    ),
    "MiMo-V2-Flash": config(
        *("mimo_v2_flash", 4096, 16384, 12, 64, 4),
        add_full_attention_sink_bias=False,
        add_swa_attention_sink_bias=True,
        attention_bias=False,
        attention_chunk_size=128,
        attention_value_scale=0.707,
        head_dim=192,
        hybrid_block_size=None,
        hybrid_layer_pattern=[0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0],
        layernorm_epsilon=1e-05,
        max_position_embeddings=262144,
        moe_intermediate_size=2048,
        moe_layer_freq=[0, *[1] * 11],
        n_group=1,
        n_routed_experts=256,
        n_shared_experts=None,
        norm_topk_prob=True,
        num_experts_per_tok=8,
        partial_rotary_factor=0.334,
        rope_theta=5000000,
        routed_scaling_factor=None,
        scoring_func="sigmoid",
        sliding_window=128,
        sliding_window_size=128,
        swa_head_dim=192,
        swa_num_attention_heads=64,
        swa_num_key_value_heads=8,
        swa_rope_theta=10000,
        swa_v_head_dim=128,
        topk_group=1,
        topk_method="noaux_tc",
        v_head_dim=128,
    ),
    "GLM-4.7-Flash": config(
        *("glm4_moe_lite", 2048, 10240, 47, 20, 20),
        attention_bias=False,
        first_k_dense_replace=1,
        kv_lora_rank=512,
        max_position_embeddings=202752,
        moe_intermediate_size=1536,
        n_group=1,
        n_routed_experts=64,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_experts_per_tok=4,
        num_nextn_predict_layers=1,
        partial_rotary_factor=1.0,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        rope_scaling=None,
        rope_theta=1000000,
        routed_scaling_factor=1.8,
        topk_group=1,
        topk_method="noaux_tc",
        v_head_dim=256,
    ),
    "DeepSeek-R1": like("DeepSeek-V3", num_experts_per_tok=8, rope_theta=10000),
    "Minitron": config(
        *("nemotron", 4096, 16384, 32, 48, 8),
        head_dim=128,
        hidden_act="relu2",
        attention_bias=False,
        mlp_bias=False,
        norm_eps=1e-05,
        partial_rotary_factor=0.5,
        rope_theta=10000,
    ),
    "stablelm-2-chat": config(
        *("stablelm", 2048, 5632, 24, 32, 32),
        hidden_dropout=0.0,
        layer_norm_eps=1e-05,
        max_position_embeddings=4096,
        partial_rotary_factor=0.25,
        qk_layernorm=False,
        rope_theta=10000,
        use_parallel_residual=False,
        use_qkv_bias=True,
    ),
    "starcoder2-15b-instruct": like(
        *("StarCoder2", 6144, 24576, 40, 48, 4),
        max_position_embeddings=16384,
        rope_theta=100000,
    ),
    "gpt-oss-120b": like(
        *("gpt-oss", 2880, 2880, 4, 64, 8),
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=131072,
        num_local_experts=128,
        output_router_logits=False,
        rms_norm_eps=1e-05,
        router_aux_loss_coef=0.9,
    ),
    "gemma-4-e2b (text)": config(
        *("gemma4_text", 1536, 6144, 30, 8, 1),
        enable_moe_block=False,
        final_logit_softcapping=30.0,
        global_head_dim=512,
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        hidden_size_per_layer_input=256,
        layer_types=[*["sliding_attention"] * 5, "full_attention"] * 5,
        max_position_embeddings=131072,
        moe_intermediate_size=None,
        num_experts=None,
        num_global_key_value_heads=None,
        num_kv_shared_layers=10,
        rope_parameters={
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        sliding_window=512,
        top_k_experts=None,
        use_bidirectional_attention=None,
        use_double_wide_mlp=True,
        vocab_size_per_layer_input=32000,
    ),
    "command-r7b (newest form)": config(
        *("cohere2", 4096, 14336, 4, 32, 8),
        layer_norm_eps=1e-05,
        layer_types=[*["sliding_attention"] * 3, "full_attention"],
        logit_scale=0.25,
        rope_parameters={"rope_theta": 50000, "rope_type": "default"},
        sliding_window=4096,
        use_qk_norm=False,
    ),
    "EXAONE-4.0-32B": like(
        *("EXAONE-4", 5120, 27392, 4, 40, 8),
        head_dim=128,
        layer_types=[*["sliding_attention"] * 3, "full_attention"],
        max_position_embeddings=131072,
        rope_scaling={**_LLAMA3, "factor": 16.0},
        rope_theta=1000000,
        sliding_window=4096,
    ),
    "granite-4 (windows)": config(
        *("granite_swa", 2560, 8192, 4, 20, 4),
        attention_multiplier=0.0078125,
        layer_rope_theta=[0, 10000.0, 10000.0, 0],
        layer_types=[*["full_attention"], *["sliding_attention"] * 2, "full_attention"],
        sliding_window=128,
    ),
    "GLM-4-0414": like(
        "GLM-4", attention_bias=False, max_position_embeddings=32768, rope_theta=10000.0
    ),
    "GLM-4.5-Air": like(
        "GLM-4.5",
        attention_bias=True,
        max_position_embeddings=131072,
        num_experts_per_tok=8,
        rope_scaling=None,
        rope_theta=1000000,
        routed_scaling_factor=1.0,
    ),
    "Qwen3-Coder-A3B": like(
        *("Qwen3-A3B", 2048, 5472, 48, 32, 4),
        max_position_embeddings=262144,
        max_window_layers=28,
        qkv_bias=False,
        rope_scaling=None,
        rope_theta=10000000,
        shared_expert_intermediate_size=0,
        use_qk_norm=True,
    ),
}
VARIANTS["Phi-3-128k"] = {**VARIANTS["Phi-3.5-mini"], "rope_scaling": {**_LONG, "type": "su"}}
_REFUSED = {"Phi-3-128k"}
"""Older names of LongRoPE that transformers does not take any more."""
_ALL = {**RELEASED, **VARIANTS, **RECURRENT}


def test_every_family_has_a_release_here() -> None:
    assert {values["model_type"] for values in _ALL.values()} == set(TABLE)


@pytest.mark.parametrize("name", _ALL)
def test_a_release_means_what_transformers_reads_in_it(name: str) -> None:
    from transformers import CONFIG_MAPPING

    values = _ALL[name]
    if name in _REFUSED:
        spec_of(values, "config.json")
        with pytest.raises(KeyError):
            CONFIG_MAPPING[values["model_type"]].from_dict(json.loads(json.dumps(values)))
        return
    actual, expected = spec_of(values, "config.json"), spec_of(newest(values), "newest")
    assert actual == replace(expected, saved_dtype=actual.saved_dtype)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hybrid_layer_pattern", [1] * 12),
        ("moe_layer_freq", [1] * 12),
        ("swa_num_key_value_heads", 4),
        ("swa_rope_theta", 20000),
        ("layernorm_epsilon", 1e-6),
        ("sliding_window", 64),
        ("add_swa_attention_sink_bias", False),
    ],
)
def test_the_first_form_of_mimo_is_refused_where_it_says_otherwise(key: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=key):
        spec_of({**VARIANTS["MiMo-V2-Flash"], key: value}, "config.json")


def test_keys_that_switch_off_what_a_family_does_not_have_are_accepted() -> None:
    plain = config("llama", 64, 96, 2, 4, 2)
    off = {"use_sliding_window": False, "logits_scaling": 1.0, "num_experts": 0, "use_mrope": False}
    assert spec_of({**plain, **off}, "config.json") == spec_of(plain, "config.json")
    for key, value in (("use_sliding_window", True), ("logits_scaling", 2.0), ("num_experts", 8)):
        with pytest.raises(ModelLoadError, match=f"says {key}="):
            spec_of({**plain, key: value}, "config.json")
