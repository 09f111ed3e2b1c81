"""Gemma: norms whose weights are differences from 1, since Gemma 2 also after each part."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyengine.models.decoder.families.parts import (
    DEFAULTS,
    WHOLE,
    Family,
    activation,
    attention,
    decoder,
    equal_layers,
    gated,
    heads,
    layer_count,
    pre_norm,
    rms,
    sliding_layers,
)
from pyengine.models.decoder.names import ATTENTION, GATED, LLAMA, names, stored, vector
from pyengine.models.decoder.rotary_settings import (
    RotaryKind,
    read_rotary,
    rope_section,
    rotary_of,
    two_rotaries,
)
from pyengine.models.decoder.settings import Settings
from pyengine.models.decoder.spec import (
    Attention,
    DecoderSpec,
    Layer,
    Norm,
    QueryKeyNorm,
    Rotary,
    TokenInput,
)


def _layer(settings: Settings, norm: Norm, **more: Any) -> Layer:
    scaling = settings.number("query_pre_attn_scalar", above=0) ** -0.5
    mixer = attention(settings, bias="attention_bias", scaling=scaling, **more)
    mlp = gated(settings, act="hidden_activation")
    return pre_norm(mixer, mlp, norm, after_mixer=norm, after_feed_forward=norm)


def _decoder(settings: Settings, layers: list[Layer], norm: Norm) -> DecoderSpec:
    return decoder(
        settings,
        layers,
        norm,
        embedding_scale=settings.integer("hidden_size") ** 0.5,
        logit_softcap=settings.optional_number("final_logit_softcapping", above=0),
    )


def _gemma(settings: Settings) -> DecoderSpec:
    mixer, mlp = attention(settings, bias="attention_bias"), gated(settings)
    if mlp.activation == "gelu":  # files of the first release say so, and mean its formula
        mlp = replace(mlp, activation="gelu_tanh")
    scale = settings.integer("hidden_size") ** 0.5
    return equal_layers(settings, mixer, mlp, rms(settings, offset=1.0), embedding_scale=scale)


def _gemma2(settings: Settings) -> DecoderSpec:
    norm = rms(settings, offset=1.0)
    rotary = read_rotary(settings, heads(settings)["head_dim"], WHOLE)
    softcap = settings.optional_number("attn_logit_softcapping", above=0)
    settings.only("sliding_window_size", settings.raw("sliding_window"), why="it is sliding_window")
    layers = [
        _layer(settings, norm, rotary=rotary, window=window, softcap=softcap)
        for window in sliding_layers(settings, lambda layer: layer % 2 == 0)
    ]
    return _decoder(settings, layers, norm)


def _gemma3(settings: Settings) -> DecoderSpec:
    norm, head_dim = rms(settings, offset=1.0), heads(settings)["head_dim"]
    every = settings.integer("sliding_window_pattern")
    head_norm = QueryKeyNorm(norm=norm, over="head")
    full, sliding = two_rotaries(settings, head_dim, WHOLE, "rope_local_base_freq")
    settings.only("attn_logit_softcapping", why="Gemma 3 has no cap of attention")
    layers = [
        _layer(
            settings,
            norm,
            rotary=full if window is None else sliding,
            window=window,
            query_key_norm=head_norm,
        )
        for window in sliding_layers(settings, lambda layer: (layer + 1) % every != 0)
    ]
    return _decoder(settings, layers, norm)


def _gemma4(settings: Settings) -> DecoderSpec:
    norm, count = rms(settings), layer_count(settings)
    _refuse_experts(settings)
    windows = sliding_layers(settings, lambda layer: (layer + 1) % 6 != 0 and layer < count - 1)
    if windows[-1] is not None:
        settings.refuse("layer_types", "the last layer sees all positions")
    shapes = [_gemma4_shape(settings, layer, window) for layer, window in enumerate(windows)]
    rotaries = _gemma4_rotaries(settings, shapes, windows)
    first = count - settings.integer("num_kv_shared_layers", 0)
    sources = {window: layer for layer, window in enumerate(windows[: max(0, first)])}
    if any(window not in sources for window in windows):
        settings.refuse("num_kv_shared_layers", "layers share with an earlier one of their kind")
    shared = {sources[window] for window in windows[first:]}
    mlp, is_wide = gated(settings, act="hidden_activation"), settings.flag("use_double_wide_mlp")
    wide = replace(mlp, size=2 * mlp.size) if is_wide else mlp
    token_input, keys = _token_input(settings, norm), settings.flag("attention_k_eq_v")
    has_bias = settings.flag("attention_bias")
    layers = [
        pre_norm(
            Attention(
                **shape,
                scaling=1.0,
                rotary=rotaries[window],
                window=window,
                query_key_norm=QueryKeyNorm(norm=norm, over="head"),
                value_norm=replace(norm, has_weight=False),
                values_are_keys=keys and window is None,
                shares=sources[window] if layer >= first else None,
                is_shared=layer in shared,
                qkv_bias=has_bias,
                out_bias=has_bias,
            ),
            mlp if layer < first else wide,
            norm,
            after_mixer=norm,
            after_feed_forward=norm,
            token_input=token_input,
            has_scalar=True,
        )
        for layer, (window, shape) in enumerate(zip(windows, shapes, strict=True))
    ]
    return _decoder(settings, layers, norm)


def _gemma4_shape(settings: Settings, layer: int, window: int | None) -> dict[str, Any]:
    """The heads of a layer, by `per_layer_config`; without it full layers have other ones."""
    shape, section = heads(settings), settings.section("per_layer_config")
    if section is not None:
        settings.pass_over(dict.fromkeys(("global_head_dim", "num_global_key_value_heads"), "read"))
        # transformers pads the numbers of layers with zeros: "05".
        names = [name for name in section.names if name.isdecimal() and int(name) == layer]
        own = section.section(names[0]) if names and section.has(names[0]) else None
        if own is not None:
            for key, name in (("head_dim", "head_dim"), ("num_key_value_heads", "kv_heads")):
                shape[name] = own.integer(key) if own.has(key) else shape[name]
    elif window is None:
        shape["head_dim"] = settings.integer("global_head_dim")
        kv_heads = settings.optional_integer("num_global_key_value_heads")
        if settings.flag("attention_k_eq_v") and kv_heads is not None:
            shape["kv_heads"] = kv_heads
    return shape


def _gemma4_rotaries(
    settings: Settings, shapes: Sequence[dict[str, Any]], windows: Sequence[int | None]
) -> dict[int | None, Rotary]:
    """The rotary embedding of each window: all layers of a kind have heads of one size."""
    sizes = {
        window: {
            shape["head_dim"] for shape, own in zip(shapes, windows, strict=True) if own == window
        }
        for window in windows
    }
    section = rope_section(settings)
    if section is None or any(len(head_dims) > 1 for head_dims in sizes.values()):
        settings.refuse("rope_parameters", "it is for layers of two kinds, each of one head size")
    rotaries = {}
    for window, [head_dim] in sizes.items():
        key = "full_attention" if window is None else "sliding_attention"
        own = section.section(key)
        if own is not None:
            own.only("truncate", True, why="transformers does not read it for each kind of layer")
        rotaries[window] = rotary_of(settings, own, head_dim, RotaryKind(share=1.0))
    return rotaries


def _token_input(settings: Settings, norm: Norm) -> TokenInput | None:
    size = settings.integer("hidden_size_per_layer_input", 0)
    vocabulary = settings.integer("vocab_size_per_layer_input")
    kind = activation(settings, "hidden_activation")
    if size == 0:
        return None
    return TokenInput(size=size, vocab_size=vocabulary, activation=kind, norm=norm)


def _refuse_experts(settings: Settings) -> None:
    settings.leave_unless("enable_moe_block", False, "layers have experts beside an MLP")
    for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        settings.pass_over({key: "there are no experts"})


_NAMES = names(
    ATTENTION,
    GATED,
    before_mixer=stored("input_layernorm"),
    after_mixer=stored("post_attention_layernorm"),
    before_feed_forward=stored("pre_feedforward_layernorm"),
    after_feed_forward=stored("post_feedforward_layernorm"),
)
_GEMMA4_NAMES = replace(
    _NAMES,
    outside={
        **_NAMES.outside,
        "token_inputs": stored("model.embed_tokens_per_layer"),
        "token_input_product": stored("model.per_layer_model_projection"),
        "token_input_norm": stored("model.per_layer_projection_norm"),
    },
    inside={
        **_NAMES.inside,
        "query": stored("self_attn.q_proj"),
        "query_key": stored("self_attn.q_proj", "self_attn.k_proj"),
        "token_input_gate_up": stored("per_layer_input_gate"),
        "token_input_out": stored("per_layer_projection"),
        "after_token_input": stored("post_per_layer_input_norm"),
        "scalar": vector("layer_scalar"),
    },
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
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
    },
}
_NO_EFFECT = {"hidden_act": "transformers reads hidden_activation"}
FAMILIES = (
    Family(
        "gemma",
        _gemma,
        {
            **DEFAULTS,
            "vocab_size": 256000,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        LLAMA,
        {"hidden_activation": "transformers reads hidden_act"},
    ),
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
    Family(
        "gemma4_text",
        _gemma4,
        {
            **_GEMMA2,
            "vocab_size": 262144,
            "num_hidden_layers": 30,
            "max_position_embeddings": 131072,
            "rope_parameters": _GEMMA4_ROPE,
            "sliding_window": 512,
            "final_logit_softcapping": None,
            "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "per_layer_config": None,
            "global_head_dim": 512,
            "num_global_key_value_heads": None,
        },
        _GEMMA4_NAMES,
        _NO_EFFECT,
    ),
)
"""See `Family`."""
