"""Dense families whose layers differ in rotation or window, or that normalise after each part."""

from dataclasses import replace

from pyengine.models.decoder.families.parts import (
    DEFAULTS,
    GRANITE,
    NOT_READ,
    WHOLE,
    Family,
    attention,
    decoder,
    equal_layers,
    gated,
    granite_decoder,
    heads,
    layer_count,
    pre_norm,
    rms,
    sliding_layers,
    switched_layers,
)
from pyengine.models.decoder.names import ATTENTION, GATED, LLAMA, names, stored
from pyengine.models.decoder.rotary_settings import RotaryKind, rope_section, two_rotaries
from pyengine.models.decoder.settings import Settings
from pyengine.models.decoder.spec import (
    Attention,
    DecoderSpec,
    Layer,
    Norm,
    QueryGrowth,
    QueryKeyNorm,
)


def _smollm3(settings: Settings) -> DecoderSpec:
    norm, mlp = rms(settings), gated(settings, bias="mlp_bias")
    count, every = layer_count(settings), settings.integer("no_rope_layer_interval")
    rotates = [(layer + 1) % every != 0 for layer in range(count)]
    flags = settings.items("no_rope_layers", count)
    if flags is not None:
        if any(flag not in (0, 1) for flag in flags):
            settings.refuse("no_rope_layers", "it must have 1 for a layer that rotates, else 0")
        rotates = [flag == 1 for flag in flags]
    has_window = settings.raw("sliding_window") is not None
    windows = switched_layers(settings, lambda layer: has_window and not rotates[layer])
    mixer = attention(settings, bias="attention_bias")
    unturned = replace(mixer, rotary=None)
    layers = [
        pre_norm(replace(mixer if rotates[layer] else unturned, window=window), mlp, norm)
        for layer, window in enumerate(windows)
    ]
    return decoder(settings, layers, norm)


def _post_norm(settings: Settings, mixer: Attention, norm: Norm) -> Layer:
    """A layer that normalises after each part."""
    mlp = gated(settings)
    return Layer(mixer=mixer, feed_forward=mlp, after_mixer=norm, after_feed_forward=norm)


def _olmo2(settings: Settings) -> DecoderSpec:
    norm = rms(settings)
    row_norm = QueryKeyNorm(norm=norm, over="row")
    mixer = attention(settings, bias="attention_bias", query_key_norm=row_norm)
    layer = _post_norm(settings, mixer, norm)
    return decoder(settings, [layer] * layer_count(settings), norm)


def _olmo3(settings: Settings) -> DecoderSpec:
    norm, head_dim = rms(settings), heads(settings)["head_dim"]
    if settings.has("rope_theta") and settings.number("rope_theta") != _OLMO3_THETA:
        settings.refuse("rope_theta", f"sliding layers have {_OLMO3_THETA:g}: use rope_parameters")
    full, sliding = two_rotaries(settings, head_dim, WHOLE, "rope_theta")
    row_norm = QueryKeyNorm(norm=norm, over="row")
    mixer = attention(settings, bias="attention_bias", rotary=full, query_key_norm=row_norm)
    layers = [
        _post_norm(
            settings,
            replace(mixer, rotary=full if window is None else sliding, window=window),
            norm,
        )
        for window in sliding_layers(settings, lambda layer: (layer + 1) % 4 != 0)
    ]
    return decoder(settings, layers, norm)


def _exaone4(settings: Settings) -> DecoderSpec:
    norm = rms(settings)
    has_window, every = settings.raw("sliding_window") is not None, 1
    if has_window and not settings.has("layer_types"):
        every = settings.integer("sliding_window_pattern")
    settings.pass_over({"sliding_window_pattern": "layer_types says it"})
    mixer = attention(settings, query_key_norm=QueryKeyNorm(norm=norm, over="head"))
    full = replace(mixer, rotary=None) if has_window else mixer
    layers = [
        _post_norm(settings, full if window is None else replace(mixer, window=window), norm)
        for window in sliding_layers(settings, lambda layer: (layer + 1) % every != 0)
    ]
    return decoder(settings, layers, norm)


def _ministral3(settings: Settings) -> DecoderSpec:
    growth, section = None, rope_section(settings)
    if section is not None:
        if section.has("llama_4_scaling_beta"):
            original = "original_max_position_embeddings"
            owner = section if section.has(original) else settings
            key = original if section.has(original) else "max_position_embeddings"
            growth = QueryGrowth(
                beta=section.number("llama_4_scaling_beta"), original=owner.integer(key)
            )
        section.pass_over({"max_position_embeddings": "that of the model is read"})
    window = settings.optional_integer("sliding_window")
    mixer = attention(settings, window=window, query_growth=growth)
    return equal_layers(settings, mixer, gated(settings), rms(settings))


def _granite_swa(settings: Settings) -> DecoderSpec:
    scaling = settings.number("attention_multiplier", above=0)
    mixer = attention(settings, bias="attention_bias", scaling=scaling, sinks=True)
    rotary = mixer.rotary
    assert rotary is not None
    windows = sliding_layers(settings, lambda layer: layer % 4 != 0)
    bases = settings.items("layer_rope_theta", len(windows)) or [rotary.theta] * len(windows)
    if any(type(base) not in (int, float) or not 0 <= base < _MAX_BASE for base in bases):
        settings.refuse("layer_rope_theta", "it must have a base for each layer, or 0: no rotation")
    turns = [replace(rotary, theta=float(base)) if base else None for base in bases]
    mixers = [
        replace(mixer, rotary=turn, window=window)
        for window, turn in zip(windows, turns, strict=True)
    ]
    return granite_decoder(settings, mixers, gated(settings, bias="mlp_bias"))


def _cohere2(settings: Settings) -> DecoderSpec:
    norm = Norm(kind="layer", eps=settings.number("layer_norm_eps", above=0))
    every = settings.integer("sliding_window_pattern")
    for key, value in _COHERE_ONLY.items():
        settings.only(key, value, why="the family is built otherwise")
    mixer = attention(settings, RotaryKind(order="pairs"), bias="attention_bias")
    full, mlp = replace(mixer, rotary=None), gated(settings)
    layers = [
        Layer(
            mixer=full if window is None else replace(mixer, window=window),
            feed_forward=mlp,
            before_mixer=norm,
            is_parallel=True,
        )
        for window in sliding_layers(settings, lambda layer: (layer + 1) % every != 0)
    ]
    scale = settings.number("logit_scale")
    return decoder(settings, layers, norm, logit_scale=scale)


_COHERE_ONLY = {
    "rotary_pct": 1.0,
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}
_POST_NORMS = {
    "after_mixer": stored("post_attention_layernorm"),
    "after_feed_forward": stored("post_feedforward_layernorm"),
}
_OLMO3_THETA = 500000.0
_MAX_BASE = 1e300
_MINISTRAL3_ROPE = {
    "type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
FAMILIES = (
    Family(
        "smollm3",
        _smollm3,
        {
            **DEFAULTS,
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        LLAMA,
        {"max_window_layers": NOT_READ},
    ),
    Family(
        "olmo2",
        _olmo2,
        {**DEFAULTS, "vocab_size": 50304, "rms_norm_eps": 1e-5},
        names(ATTENTION, GATED, _POST_NORMS),
    ),
    Family(
        "cohere2",
        _cohere2,
        {
            **DEFAULTS,
            "vocab_size": 256000,
            "hidden_size": 8192,
            "intermediate_size": 22528,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        names(ATTENTION, GATED, before_mixer=stored("input_layernorm")),
        dict.fromkeys(
            ("use_embedding_sharing", "use_parallel_embedding", "layer_switch"), NOT_READ
        ),
    ),
    Family(
        "olmo3",
        _olmo3,
        {
            **DEFAULTS,
            "vocab_size": 50304,
            "rms_norm_eps": 1e-5,
            "rope_theta": _OLMO3_THETA,
            "sliding_window": 4096,
        },
        names(ATTENTION, GATED, _POST_NORMS),
    ),
    Family(
        "exaone4",
        _exaone4,
        {
            **DEFAULTS,
            "vocab_size": 102400,
            "intermediate_size": 16384,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        names(ATTENTION, GATED, _POST_NORMS),
    ),
    Family(
        "ministral3",
        _ministral3,
        {
            **DEFAULTS,
            "vocab_size": 131072,
            "intermediate_size": 14336,
            "num_hidden_layers": 34,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _MINISTRAL3_ROPE,
        },
        LLAMA,
    ),
    Family(
        "granite_swa",
        _granite_swa,
        {
            **DEFAULTS,
            "vocab_size": 100352,
            "hidden_size": 2560,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            **GRANITE,
            "sliding_window": 128,
            "layer_rope_theta": None,
        },
        LLAMA,
    ),
)
"""See `Family`."""
