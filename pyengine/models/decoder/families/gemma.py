"""Gemma: norms before and after each part, whose weights are differences from 1."""

from typing import Any

from pyengine.models.decoder.families.parts import (
    DEFAULTS,
    Family,
    decoder,
    gated,
    heads,
    rms,
    sliding_layers,
)
from pyengine.models.decoder.names import ATTENTION, GATED, names, stored
from pyengine.models.decoder.rotary_settings import RotaryKind, read_rotary, two_rotaries
from pyengine.models.decoder.settings import Settings
from pyengine.models.decoder.spec import Attention, DecoderSpec, Layer, Norm, QueryKeyNorm

_WHOLE = RotaryKind()


def _layer(settings: Settings, norm: Norm, shape: dict[str, Any], **attention: Any) -> Layer:
    has_bias = settings.flag("attention_bias")
    return Layer(
        mixer=Attention(
            **shape,
            scaling=settings.number("query_pre_attn_scalar", above=0) ** -0.5,
            qkv_bias=has_bias,
            out_bias=has_bias,
            **attention,
        ),
        feed_forward=gated(settings, act="hidden_activation"),
        before_mixer=norm,
        after_mixer=norm,
        before_feed_forward=norm,
        after_feed_forward=norm,
    )


def _decoder(settings: Settings, layers: list[Layer], norm: Norm) -> DecoderSpec:
    return decoder(
        settings,
        layers,
        norm,
        embedding_scale=settings.integer("hidden_size") ** 0.5,
        logit_softcap=settings.optional_number("final_logit_softcapping", above=0),
    )


def _gemma2(settings: Settings) -> DecoderSpec:
    shape, norm = heads(settings), rms(settings, offset=1.0)
    rotary = read_rotary(settings, shape["head_dim"], _WHOLE)
    softcap = settings.optional_number("attn_logit_softcapping", above=0)
    layers = [
        _layer(settings, norm, shape, rotary=rotary, window=window, softcap=softcap)
        for window in sliding_layers(settings, lambda layer: layer % 2 == 0)
    ]
    return _decoder(settings, layers, norm)


def _gemma3(settings: Settings) -> DecoderSpec:
    shape, norm = heads(settings), rms(settings, offset=1.0)
    every = settings.integer("sliding_window_pattern")
    head_norm = QueryKeyNorm(norm=norm, over="head")
    full, sliding = two_rotaries(settings, shape["head_dim"], _WHOLE, "rope_local_base_freq")
    settings.only("attn_logit_softcapping", why="Gemma 3 has no cap of attention")
    layers = [
        _layer(
            settings,
            norm,
            shape,
            rotary=full if window is None else sliding,
            window=window,
            query_key_norm=head_norm,
        )
        for window in sliding_layers(settings, lambda layer: (layer + 1) % every != 0)
    ]
    return _decoder(settings, layers, norm)


_NAMES = names(
    ATTENTION,
    GATED,
    before_mixer=stored("input_layernorm"),
    after_mixer=stored("post_attention_layernorm"),
    before_feed_forward=stored("pre_feedforward_layernorm"),
    after_feed_forward=stored("post_feedforward_layernorm"),
)
_GEMMA2 = {
    **DEFAULTS,
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_NO_EFFECT = {"hidden_act": "transformers reads hidden_activation"}
FAMILIES = (
    Family("gemma2", _gemma2, _GEMMA2, _NAMES, _NO_EFFECT),
    Family(
        "gemma3_text",
        _gemma3,
        {
            **_GEMMA2,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": 6,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
        },
        _NAMES,
        {**_NO_EFFECT, "_sliding_window_pattern": "layer_types says it"},
    ),
)
"""See `Family`."""
