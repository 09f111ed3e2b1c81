"""Dense families whose layers are alike, or differ in their windows only."""

from pyengine.models.decoder.families.parts import (
    DEFAULTS,
    Family,
    decoder,
    gated,
    heads,
    layer_count,
    pre_norm,
    rms,
    sliding_layers,
)
from pyengine.models.decoder.names import ATTENTION, GATED, LLAMA, PRE_NORM, names, stored
from pyengine.models.decoder.rotary_settings import RotaryKind, read_rotary
from pyengine.models.decoder.settings import Settings
from pyengine.models.decoder.spec import Attention, DecoderSpec, QueryKeyNorm

_WHOLE = RotaryKind()
_TRAINED_ELSEWHERE = "transformers does not read it"


def _llama(settings: Settings) -> DecoderSpec:
    shape, norm = heads(settings), rms(settings)
    settings.only("rope_interleaved", False, why="heads rotate in halves")
    has_bias = settings.flag("attention_bias")
    attention = Attention(
        **shape,
        scaling=shape["head_dim"] ** -0.5,
        rotary=read_rotary(settings, shape["head_dim"], _WHOLE),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )
    layer = pre_norm(attention, gated(settings, bias="mlp_bias"), norm)
    return decoder(settings, [layer] * layer_count(settings), norm)


def _qwen(settings: Settings, *, is_third: bool) -> DecoderSpec:
    """Qwen 2, whose queries, keys and values have biases; Qwen 3, whose heads have norms."""
    shape, norm = heads(settings), rms(settings)
    slides, first = settings.flag("use_sliding_window"), settings.integer("max_window_layers", 0)
    settings.only("use_mrope", False, why="positions have one number")
    has_bias = settings.flag("attention_bias") if is_third else False
    rotary = read_rotary(settings, shape["head_dim"], _WHOLE)
    head_norm = QueryKeyNorm(norm=norm, over="head") if is_third else None
    has_window = slides and settings.raw("sliding_window") is not None
    windows = sliding_layers(settings, lambda layer: has_window and layer >= first)
    if not slides and any(windows):
        settings.refuse("use_sliding_window", "layer_types has layers whose attention slides")
    layers = [
        pre_norm(
            Attention(
                **shape,
                scaling=shape["head_dim"] ** -0.5,
                rotary=rotary,
                window=window,
                query_key_norm=head_norm,
                qkv_bias=has_bias or not is_third,
                out_bias=has_bias,
            ),
            gated(settings),
            norm,
        )
        for window in windows
    ]
    return decoder(settings, layers, norm)


def _qwen2(settings: Settings) -> DecoderSpec:
    return _qwen(settings, is_third=False)


def _qwen3(settings: Settings) -> DecoderSpec:
    return _qwen(settings, is_third=True)


def _mistral(settings: Settings) -> DecoderSpec:
    shape, norm = heads(settings), rms(settings)
    attention = Attention(
        **shape,
        scaling=shape["head_dim"] ** -0.5,
        rotary=read_rotary(settings, shape["head_dim"], _WHOLE),
        window=settings.optional_integer("sliding_window"),
    )
    layer = pre_norm(attention, gated(settings), norm)
    return decoder(settings, [layer] * layer_count(settings), norm)


def _phi3(settings: Settings) -> DecoderSpec:
    shape, norm = heads(settings), rms(settings)
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        settings.only(key, False, why="the layers of the family have no biases")
    kind = RotaryKind(share=1.0, renamed=(("su", "longrope"), ("yarn", "longrope")))
    attention = Attention(
        **shape,
        scaling=shape["head_dim"] ** -0.5,
        rotary=read_rotary(settings, shape["head_dim"], kind),
        window=settings.optional_integer("sliding_window"),
    )
    layer = pre_norm(attention, gated(settings), norm)
    count = layer_count(settings)
    return decoder(settings, [layer] * count, norm, kind=kind)


def _granite(settings: Settings) -> DecoderSpec:
    shape, norm, has_bias = heads(settings), rms(settings), settings.flag("attention_bias")
    attention = Attention(
        **shape,
        scaling=settings.number("attention_multiplier", above=0),
        rotary=read_rotary(settings, shape["head_dim"], _WHOLE),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )
    layer = pre_norm(
        attention,
        gated(settings, bias="mlp_bias"),
        norm,
        residual_scale=settings.number("residual_multiplier"),
    )
    return decoder(
        settings,
        [layer] * layer_count(settings),
        norm,
        embedding_scale=settings.number("embedding_multiplier"),
        logit_scale=1 / settings.number("logits_scaling", above=0),
    )


def _seed_oss(settings: Settings) -> DecoderSpec:
    shape, norm = heads(settings), rms(settings)
    attention = Attention(
        **shape,
        scaling=shape["head_dim"] ** -0.5,
        rotary=read_rotary(settings, shape["head_dim"], _WHOLE),
        qkv_bias=settings.flag("attention_bias"),
        out_bias=settings.flag("attention_out_bias"),
    )
    layer = pre_norm(attention, gated(settings, bias="mlp_bias"), norm)
    return decoder(settings, [layer] * layer_count(settings), norm)


def _glm4(settings: Settings) -> DecoderSpec:
    shape, norm = heads(settings), rms(settings)
    attention = Attention(
        **shape,
        scaling=shape["head_dim"] ** -0.5,
        rotary=read_rotary(settings, shape["head_dim"], RotaryKind(order="pairs", share=0.5)),
        qkv_bias=settings.flag("attention_bias"),
    )
    layer = pre_norm(attention, gated(settings), norm, after_mixer=norm, after_feed_forward=norm)
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
    "layer_types": None,
}
FAMILIES = (
    Family("llama", _llama, DEFAULTS, LLAMA, {"is_llama_config": _TRAINED_ELSEWHERE}),
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
            "sliding_window": None,
        },
        names(
            ATTENTION,
            PRE_NORM,
            GATED,
            qkv=stored("self_attn.qkv_proj"),
            gate_up=stored("mlp.gate_up_proj"),
        ),
        dict.fromkeys(("full_attn_mod", "interpolate_factor"), _TRAINED_ELSEWHERE),
    ),
    Family(
        "granite",
        _granite,
        {
            **DEFAULTS,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
        LLAMA,
    ),
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
