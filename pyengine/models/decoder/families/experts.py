"""Families with mixtures of experts, whose routers have a softmax."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyengine.models.decoder.families.parts import (
    DEFAULTS,
    GRANITE,
    NOT_READ,
    Family,
    attention,
    decoder,
    equal_layers,
    gated,
    granite_decoder,
    layer_count,
    pre_norm,
    rms,
    sliding_layers,
    switched_layers,
)
from pyengine.models.decoder.names import ATTENTION, GATED, PRE_NORM, Stored, names, stored, vector
from pyengine.models.decoder.settings import Settings
from pyengine.models.decoder.spec import (
    MLP,
    ClampedGate,
    DecoderSpec,
    Experts,
    FeedForward,
    QueryKeyNorm,
    Routing,
)


def routed(settings: Settings, count: str, score: Any = "softmax", **more: Any) -> Routing:
    """A routing whose number of experts is under the key `count`."""
    chosen = settings.integer("num_experts_per_tok")
    return Routing(count=settings.integer(count), chosen=chosen, score=score, **more)


def _mixtral(settings: Settings) -> DecoderSpec:
    mixer = attention(settings, window=settings.optional_integer("sliding_window"))
    routing = routed(settings, "num_local_experts", is_normalised=True)
    experts = Experts(routing=routing, mlp=gated(settings))
    return equal_layers(settings, mixer, experts, rms(settings))


def _granitemoe(settings: Settings) -> DecoderSpec:
    scaling = settings.number("attention_multiplier", above=0)
    mixer = attention(settings, bias="attention_bias", scaling=scaling)
    experts = Experts(routing=routed(settings, "num_local_experts", "chosen"), mlp=gated(settings))
    return granite_decoder(settings, [mixer] * layer_count(settings), experts)


def qwen_experts(settings: Settings, **more: Any) -> Experts:
    """Qwen's experts; `more` are further fields."""
    return Experts(
        routing=routed(settings, "num_experts", is_normalised=settings.flag("norm_topk_prob")),
        mlp=gated(settings, size="moe_intermediate_size"),
        **more,
    )


def _qwen2_moe(settings: Settings) -> DecoderSpec:
    norm, first = rms(settings), settings.integer("max_window_layers", 0)
    mixer = attention(settings, qkv_bias=settings.flag("qkv_bias"))
    windows = switched_layers(
        settings, lambda layer: layer < first and (layer + 1) % 2 == 1, none=0
    )
    shared = gated(settings, size="shared_expert_intermediate_size")
    parts = qwen_sparse_layers(settings, qwen_experts(settings, shared=shared, shared_gate=True))
    layers = [
        pre_norm(replace(mixer, window=window), part, norm)
        for window, part in zip(windows, parts, strict=True)
    ]
    return decoder(settings, layers, norm)


def _qwen3_moe(settings: Settings) -> DecoderSpec:
    norm, window = rms(settings), settings.optional_integer("sliding_window")
    settings.only("use_qk_norm", True, why="heads have norms")
    mixer = attention(
        settings,
        bias="attention_bias",
        window=window if settings.flag("use_sliding_window") else None,
        query_key_norm=QueryKeyNorm(norm=norm, over="head"),
    )
    parts = qwen_sparse_layers(settings, qwen_experts(settings))
    return decoder(settings, [pre_norm(mixer, part, norm) for part in parts], norm)


def qwen_sparse_layers(settings: Settings, experts: Experts) -> Sequence[FeedForward]:
    """Qwen's: every `decoder_sparse_step`-th layer has experts, but for `mlp_only_layers`."""
    every = settings.integer("decoder_sparse_step")
    dense = settings.items("mlp_only_layers", None) or []
    if any(type(number) is not int for number in dense):
        settings.refuse("mlp_only_layers", "it must be a list of the numbers of layers")
    mlp = gated(settings)
    return [
        experts if layer not in dense and (layer + 1) % every == 0 else mlp
        for layer in range(layer_count(settings))
    ]


def _gpt_oss(settings: Settings) -> DecoderSpec:
    norm, mixer = rms(settings), attention(settings, bias="attention_bias", sinks=True)
    settings.text("hidden_act", ["silu"])
    gate = ClampedGate(
        alpha=settings.number("swiglu_alpha"), limit=settings.number("swiglu_limit", above=0)
    )
    experts = Experts(
        routing=routed(settings, "num_local_experts", "chosen", has_bias=True),
        mlp=MLP(size=settings.integer("intermediate_size"), activation=gate, has_bias=True),
    )
    windows = sliding_layers(settings, lambda layer: layer % 2 == 0)
    layers = [pre_norm(replace(mixer, window=window), experts, norm) for window in windows]
    return decoder(settings, layers, norm)


def expert_names(prefix: str, gate: str, up: str, down: str) -> dict[str, tuple[Stored, ...]]:
    """Experts in separate tensors, or all in one, under the name that newer files have."""
    stacked = {
        "expert_gate_up": Stored(("mlp.experts.gate_up_proj",), weight="", bias="_bias"),
        "expert_down": Stored(("mlp.experts.down_proj",), weight="", bias="_bias"),
    }
    separate = {
        "expert_gate_up": (f"{prefix}.{{}}.{gate}", f"{prefix}.{{}}.{up}"),
        "expert_down": (f"{prefix}.{{}}.{down}",),
    }
    return {name: (Stored(separate[name]), stacked[name]) for name in separate}


QWEN_EXPERTS = {
    "router": stored("mlp.gate"),
    "correction": vector("mlp.gate.e_score_correction_bias"),
    **expert_names("mlp.experts", "gate_proj", "up_proj", "down_proj"),
}
MIXTRAL_EXPERTS = {
    "router": (*stored("block_sparse_moe.gate"), *stored("mlp.gate")),
    "correction": (
        *vector("block_sparse_moe.e_score_correction_bias"),
        *vector("mlp.e_score_correction_bias"),
    ),
    **expert_names("block_sparse_moe.experts", "w1", "w3", "w2"),
}
FEW_EXPERTS = {"num_experts": "num_local_experts"}
_MIXTRAL = {
    **DEFAULTS,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
_QWEN_MOE = {
    **DEFAULTS,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
FAMILIES = (
    Family(
        "mixtral",
        _mixtral,
        _MIXTRAL,
        names(ATTENTION, PRE_NORM, MIXTRAL_EXPERTS),
        aliases=FEW_EXPERTS,
    ),
    Family(
        "granitemoe",
        _granitemoe,
        {**DEFAULTS, **GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2},
        names(
            ATTENTION,
            PRE_NORM,
            router=(*stored("block_sparse_moe.router.layer"), *stored("block_sparse_moe.router")),
            expert_gate_up=(
                *stored("block_sparse_moe.input_linear"),
                *vector("block_sparse_moe.experts.gate_up_proj"),
            ),
            expert_down=(
                *stored("block_sparse_moe.output_linear"),
                *vector("block_sparse_moe.experts.down_proj"),
            ),
        ),
    ),
    Family(
        "qwen2_moe",
        _qwen2_moe,
        {
            **_QWEN_MOE,
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_window_layers": 28,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "qkv_bias": True,
        },
        names(
            ATTENTION,
            PRE_NORM,
            GATED,
            QWEN_EXPERTS,
            shared_gate_up=stored("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
            shared_down=stored("mlp.shared_expert.down_proj"),
            shared_gate=stored("mlp.shared_expert_gate"),
        ),
    ),
    Family(
        "qwen3_moe",
        _qwen3_moe,
        {
            **_QWEN_MOE,
            "intermediate_size": 6144,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
        names(ATTENTION, PRE_NORM, GATED, QWEN_EXPERTS),
        {"max_window_layers": NOT_READ},
        {"num_local_experts": "num_experts"},
    ),
    Family(
        "gpt_oss",
        _gpt_oss,
        {
            **DEFAULTS,
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": _GPT_OSS_ROPE,
            "attention_bias": True,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        names(
            ATTENTION,
            PRE_NORM,
            router=stored("mlp.router"),
            expert_gate_up=(
                Stored(
                    ("mlp.experts.gate_up_proj",),
                    weight="",
                    bias="_bias",
                    is_transposed=True,
                    is_interleaved=True,
                ),
            ),
            expert_down=(
                Stored(("mlp.experts.down_proj",), weight="", bias="_bias", is_transposed=True),
            ),
        ),
        dict.fromkeys(("experts_per_token", "initial_context_length"), NOT_READ),
    ),
)
"""See `Family`."""
