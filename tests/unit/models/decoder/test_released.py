"""Configurations as released models have them, with keys that have no effect: all are accepted."""

from typing import Any

import pytest

from pyengine.models.decoder.loading import spec_of

_OF_FILES: dict[str, Any] = {
    "architectures": ["SomeForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": None,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "hidden_act": "silu",
    "vocab_size": 32000,
}

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_ODD: dict[str, Any] = {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}


def config(model_type: str, *sizes: int, **more: Any) -> dict[str, Any]:
    return {**_OF_FILES, "model_type": model_type, **sizes_of(*sizes), **more}


def sizes_of(*sizes: int) -> dict[str, int]:
    return dict(zip(_SIZES, sizes, strict=True))


RELEASED = {
    "SmolLM2": config(
        *("llama", 576, 1536, 30, 9, 3),
        is_llama_config=True,
        rope_interleaved=False,
        rope_scaling=None,
        rope_theta=100000,
        pretraining_tp=1,
        tie_word_embeddings=True,
        **_ODD,
    ),
    "Llama-3.1": config(
        *("llama", 4096, 14336, 32, 32, 8),
        attention_bias=False,
        mlp_bias=False,
        max_position_embeddings=131072,
        rms_norm_eps=1e-05,
        rope_theta=500000.0,
        rope_scaling={
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    ),
    "Qwen2.5": config(
        *("qwen2", 896, 4864, 24, 14, 2),
        max_window_layers=24,
        sliding_window=32768,
        use_sliding_window=False,
        use_mrope=False,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
    ),
    "Qwen3": config(
        *("qwen3", 1024, 3072, 28, 16, 8),
        head_dim=128,
        attention_bias=False,
        max_window_layers=28,
        rope_scaling=None,
        sliding_window=None,
        use_sliding_window=False,
    ),
    "Mistral": config("mistral", 4096, 14336, 32, 32, 8, sliding_window=None, head_dim=None),
    "Gemma-2": config(
        *("gemma2", 2304, 9216, 26, 8, 4),
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        cache_implementation="hybrid",
        hidden_activation="gelu_pytorch_tanh",
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=4096,
    ),
    "Gemma-3": config(
        *("gemma3_text", 1152, 6912, 26, 4, 1),
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        cache_implementation="hybrid",
        hidden_activation="gelu_pytorch_tanh",
        head_dim=256,
        query_pre_attn_scalar=256,
        rope_local_base_freq=10000,
        rope_theta=1000000,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        sliding_window=512,
        sliding_window_pattern=6,
    ),
    "Gemma-3-270m": config(
        *("gemma3_text", 640, 2048, 6, 4, 1),
        _sliding_window_pattern=6,
        layer_types=[*["sliding_attention"] * 5, "full_attention"],
        head_dim=256,
        use_bidirectional_attention=False,
        rope_local_base_freq=10000.0,
        rope_scaling=None,
    ),
    "Phi-4-mini": config(
        *("phi3", 3072, 8192, 32, 24, 8),
        attention_bias=False,
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        full_attn_mod=1,
        interpolate_factor=1,
        lm_head_bias=False,
        mlp_bias=False,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        partial_rotary_factor=0.75,
        rope_scaling={"long_factor": [2] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
        sliding_window=262144,
    ),
    "SmolLM3": config(
        *("smollm3", 2048, 11008, 4, 16, 4),
        layer_types=["full_attention"] * 4,
        max_window_layers=28,
        no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0],
        pretraining_tp=2,
        sliding_window=None,
        use_sliding_window=False,
    ),
    "OLMo-2": config("olmo2", 2048, 8192, 16, 16, 16, attention_bias=False, rope_scaling=None),
    "Olmo-3": config(
        *("olmo3", 4096, 11008, 4, 32, 32),
        layer_types=[*["sliding_attention"] * 3, "full_attention"],
        max_position_embeddings=65536,
        rope_theta=500000,
        rope_scaling={
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        sliding_window=4096,
    ),
    "Granite": config(
        *("granite", 2048, 8192, 40, 32, 8),
        attention_bias=False,
        attention_multiplier=0.015625,
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        residual_multiplier=0.22,
    ),
    "Command-R7B": config(
        *("cohere2", 4096, 14336, 32, 32, 8),
        cache_implementation="hybrid",
        head_dim=128,
        layer_norm_eps=1e-05,
        layer_switch=4,
        logit_scale=0.25,
        order_of_interleaved_layers="local_attn_first",
        position_embedding_type="rope_gptj",
        rotary_pct=1.0,
        sliding_window=4096,
        sliding_window_pattern=4,
        use_embedding_sharing=True,
        use_gated_activation=True,
        use_parallel_block=True,
        use_parallel_embedding=True,
    ),
    "EXAONE-4": config(
        *("exaone4", 2048, 4096, 2, 32, 8),
        head_dim=64,
        layer_types=["full_attention"] * 2,
        sliding_window=None,
        sliding_window_pattern="LLLG",
    ),
    "GLM-4": config(
        *("glm4", 4096, 13696, 40, 32, 2),
        attention_bias=True,
        head_dim=128,
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-05,
    ),
    "Seed-OSS": config(
        *("seed_oss", 5120, 27648, 64, 80, 8),
        attention_bias=True,
        attention_out_bias=False,
        residual_dropout=0.1,
        head_dim=128,
        rope_scaling={"rope_type": "default"},
        rope_theta=10000000.0,
    ),
    "StarCoder2": {
        **config("starcoder2", 3072, 12288, 30, 24, 2),
        "activation_function": "gelu",
        "attention_softmax_in_fp32": True,
        "embedding_dropout": 0.1,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_epsilon": 1e-05,
        "mlp_type": "default",
        "norm_epsilon": 1e-05,
        "norm_type": "layer_norm",
        "residual_dropout": 0.1,
        "rope_theta": 999999.4420358813,
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
        "sliding_window": 4096,
        "use_bias": True,
    },
    "GPT-2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
    "Mixtral": config(
        *("mixtral", 4096, 14336, 32, 32, 8),
        num_experts_per_tok=2,
        num_local_experts=8,
        output_router_logits=False,
        router_aux_loss_coef=0.02,
        sliding_window=None,
    ),
    "Qwen3-A3B": config(
        *("qwen3_moe", 2048, 6144, 48, 32, 4),
        decoder_sparse_step=1,
        head_dim=128,
        max_window_layers=48,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_experts=128,
        num_experts_per_tok=8,
        sliding_window=None,
        use_sliding_window=False,
    ),
    "gpt-oss": config(
        *("gpt_oss", 2880, 2880, 2, 64, 8),
        attention_bias=True,
        experts_per_token=4,
        head_dim=64,
        initial_context_length=4096,
        layer_types=["sliding_attention", "full_attention"],
        num_experts_per_tok=4,
        num_local_experts=32,
        rope_scaling={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        rope_theta=150000,
        sliding_window=128,
        swiglu_limit=7.0,
    ),
    "GLM-4.5": config(
        *("glm4_moe", 4096, 10944, 46, 96, 8),
        first_k_dense_replace=1,
        head_dim=128,
        moe_intermediate_size=1408,
        n_group=1,
        n_routed_experts=128,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_nextn_predict_layers=1,
        partial_rotary_factor=0.5,
        topk_group=1,
        use_qk_norm=False,
    ),
    "DeepSeek-V3": config(
        *("deepseek_v3", 7168, 18432, 61, 128, 128),
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        aux_loss_alpha=0.001,
        ep_size=1,
        first_k_dense_replace=3,
        kv_lora_rank=512,
        max_position_embeddings=163840,
        moe_intermediate_size=2048,
        moe_layer_freq=1,
        n_group=8,
        n_routed_experts=256,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_nextn_predict_layers=1,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        rope_scaling={
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        seq_aux=True,
        topk_group=4,
        topk_method="noaux_tc",
        v_head_dim=128,
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_configuration_is_accepted(name: str) -> None:
    spec = spec_of(RELEASED[name], "config.json")
    assert len(spec.layers) == RELEASED[name].get("num_hidden_layers", 12)


def test_they_say_what_they_are_known_for() -> None:
    specs = {name: spec_of(values, "config.json") for name, values in RELEASED.items()}
    assert specs["Phi-4-mini"].max_positions == 4096
    assert len(specs["DeepSeek-V3"].mtp_layers) == 1
    assert specs["DeepSeek-V3"].layers[5].mixer.scaling == pytest.approx(0.1352337788608801)
    assert specs["Gemma-3"].windows[4:6] == (512, None)
    assert specs["SmolLM3"].layers[3].mixer.rotary is None
    assert specs["Granite"].layers[0].residual_scale == 0.22
    assert specs["Qwen2.5"].windows[-1] is None
    sliding, full = (specs["gpt-oss"].layers[layer].mixer for layer in (0, 1))
    assert (sliding.window, full.window) == (128, None)
    assert sliding.rotary == full.rotary is not None
