"""Dense families whose layers are alike, or differ in their windows only."""

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
    switched_layers,
)
from pyengine.models.decoder.names import ATTENTION, GATED, LLAMA, PRE_NORM, names, stored
from pyengine.models.decoder.rotary_settings import RotaryKind
from pyengine.models.decoder.settings import Settings
from pyengine.models.decoder.spec import DecoderSpec, QueryKeyNorm


def _llama(settings: Settings) -> DecoderSpec:
    settings.only("rope_interleaved", False, why="heads rotate in halves")
    mixer, mlp = attention(settings, bias="attention_bias"), gated(settings, bias="mlp_bias")
    return equal_layers(settings, mixer, mlp, rms(settings))


def _qwen(settings: Settings, **more: Any) -> DecoderSpec:
    first, mlp, norm = settings.integer("max_window_layers", 0), gated(settings), rms(settings)
    settings.only("use_mrope", False, why="positions have one number")
    has_window = settings.raw("sliding_window") is not None
    windows = switched_layers(settings, lambda layer: has_window and layer >= first)
    mixer = attention(settings, **more)
    layers = [pre_norm(replace(mixer, window=window), mlp, norm) for window in windows]
    return decoder(settings, layers, norm)


def _qwen2(settings: Settings) -> DecoderSpec:
    return _qwen(settings, qkv_bias=True)


def _qwen3(settings: Settings) -> DecoderSpec:
    head_norm = QueryKeyNorm(norm=rms(settings), over="head")
    return _qwen(settings, bias="attention_bias", query_key_norm=head_norm)


def _mistral(settings: Settings) -> DecoderSpec:
    mixer = attention(settings, window=settings.optional_integer("sliding_window"))
    return equal_layers(settings, mixer, gated(settings), rms(settings))


def _phi3(settings: Settings) -> DecoderSpec:
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        settings.only(key, False, why="the layers of the family have no biases")
    kind = RotaryKind(share=1.0, renamed=(("su", "longrope"), ("yarn", "longrope")))
    mixer = attention(settings, kind, window=settings.optional_integer("sliding_window"))
    return equal_layers(settings, mixer, gated(settings), rms(settings), kind=kind)


def _granite(settings: Settings) -> DecoderSpec:
    scaling = settings.number("attention_multiplier", above=0)
    mixer = attention(settings, bias="attention_bias", scaling=scaling)
    mixers = [mixer] * layer_count(settings)
    return granite_decoder(settings, mixers, gated(settings, bias="mlp_bias"))


def _seed_oss(settings: Settings) -> DecoderSpec:
    out_bias = settings.flag("attention_out_bias")
    mixer = attention(settings, bias="attention_bias", out_bias=out_bias)
    return equal_layers(settings, mixer, gated(settings, bias="mlp_bias"), rms(settings))


def _glm4(settings: Settings) -> DecoderSpec:
    norm, kind = rms(settings), RotaryKind(order="pairs", share=0.5)
    mixer = attention(settings, kind, bias="attention_bias", out_bias=False)
    layer = pre_norm(mixer, gated(settings), norm, after_mixer=norm, after_feed_forward=norm)
    return decoder(settings, [layer] * layer_count(settings), norm)


_QWEN = {
    **DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILIES = (
    Family("llama", _llama, DEFAULTS, LLAMA, {"is_llama_config": NOT_READ}),
    Family("qwen2", _qwen2, _QWEN, LLAMA),
    Family("qwen3", _qwen3, {**_QWEN, "head_dim": 128}, LLAMA),
    Family(
        "mistral",
        _mistral,
        {
            **DEFAULTS,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        LLAMA,
    ),
    Family(
        "phi3",
        _phi3,
        {
            **DEFAULTS,
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
        names(
            ATTENTION,
            PRE_NORM,
            GATED,
            qkv=stored("self_attn.qkv_proj"),
            gate_up=stored("mlp.gate_up_proj"),
        ),
        dict.fromkeys(("full_attn_mod", "interpolate_factor"), NOT_READ),
    ),
    Family("granite", _granite, {**DEFAULTS, **GRANITE}, LLAMA),
    Family(
        "seed_oss",
        _seed_oss,
        {
            **DEFAULTS,
            "vocab_size": 155136,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "attention_out_bias": False,
        },
        LLAMA,
    ),
    Family(
        "glm4",
        _glm4,
        {
            **DEFAULTS,
            "vocab_size": 151552,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1.5625e-07,
            "attention_bias": True,
        },
        names(
            ATTENTION,
            PRE_NORM,
            GATED,
            gate_up=stored("mlp.gate_up_proj"),
            after_mixer=stored("post_self_attn_layernorm"),
            after_feed_forward=stored("post_mlp_layernorm"),
        ),
    ),
)
"""See `Family`."""
