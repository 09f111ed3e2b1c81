"""Families of attention mixed with short convolutions: LFM2, dense and with experts."""

from collections.abc import Sequence
from typing import Any

from pyengine.models.decoder.families.experts import expert_names, routed
from pyengine.models.decoder.families.parts import (
    DEFAULTS,
    NOT_READ,
    Family,
    attention,
    decoder,
    layer_count,
    layer_numbers,
    pre_norm,
    recurrent_layers,
    rms,
)
from pyengine.models.decoder.names import Names, names, stored, vector
from pyengine.models.decoder.recurrent import ShortConv
from pyengine.models.decoder.settings import Settings
from pyengine.models.decoder.spec import MLP, DecoderSpec, Experts, FeedForward, QueryKeyNorm


def _decoder(settings: Settings, parts: list[FeedForward], attending: Sequence[int]) -> DecoderSpec:
    """The spec of layers with these feed-forward parts; `attending` are the layers that attend."""
    norm = rms(settings, "norm_eps")
    mixer = attention(settings, query_key_norm=QueryKeyNorm(norm=norm, over="head"))
    conv = ShortConv(
        width=settings.integer("hidden_size"),
        convolution=settings.integer("conv_L_cache", 2),
        has_bias=settings.flag("conv_bias"),
    )
    keeps_state = recurrent_layers(settings, lambda layer: layer not in attending)
    layers = [
        pre_norm(conv if state else mixer, part, norm)
        for state, part in zip(keeps_state, parts, strict=True)
    ]
    return decoder(settings, layers, norm)


def _lfm2(settings: Settings) -> DecoderSpec:
    size, count = settings.integer("intermediate_size"), layer_count(settings)
    if settings.flag("block_auto_adjust_ff_dim"):
        size, multiple = int(2 * size / 3), settings.integer("block_multiple_of")
        factor = settings.optional_number("block_ffn_dim_multiplier", above=0)
        if factor is not None:
            size = -(-int(factor * size) // multiple) * multiple
    settings.pass_over(dict.fromkeys(("block_multiple_of", "block_ffn_dim_multiplier"), "not used"))
    attending = layer_numbers(settings, "full_attn_idxs")
    parts: list[FeedForward] = [MLP(size=size, activation="silu")] * count
    return _decoder(settings, parts, range(count) if attending is None else attending)


def _lfm2_moe(settings: Settings) -> DecoderSpec:
    routing = routed(
        settings,
        "num_experts",
        "sigmoid",
        is_normalised=settings.flag("norm_topk_prob"),
        min_sum=1e-6,
        scale=settings.number("routed_scaling_factor"),
        has_correction=settings.flag("use_expert_bias"),
    )
    mlp = MLP(size=settings.integer("moe_intermediate_size"), activation="silu")
    dense = MLP(size=settings.integer("intermediate_size"), activation="silu")
    first, count = settings.integer("num_dense_layers", 0), layer_count(settings)
    parts: list[FeedForward] = [dense] * min(first, count)
    parts += [Experts(routing=routing, mlp=mlp)] * (count - len(parts))
    if not settings.has("layer_types"):
        settings.refuse("layer_types", "it must say which layers attend")
    return _decoder(settings, parts, [])


_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "vocab_size": 65536,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "rope_theta": 1000000.0,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
}
_ALIASES = {"tie_embedding": "tie_word_embeddings"}
_NAMES = Names(
    {
        "embedding": stored("model.embed_tokens"),
        "norm": stored("model.embedding_norm"),
        "head": stored("lm_head"),
    },
    names(
        expert_names("feed_forward.experts", "w1", "w3", "w2"),
        before_mixer=stored("operator_norm"),
        before_feed_forward=stored("ffn_norm"),
        qkv=stored("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out=stored("self_attn.out_proj"),
        query_norm=stored("self_attn.q_layernorm"),
        key_norm=stored("self_attn.k_layernorm"),
        conv_in=stored("conv.in_proj"),
        conv=stored("conv.conv"),
        conv_out=stored("conv.out_proj"),
        gate_up=stored("feed_forward.w1", "feed_forward.w3"),
        down=stored("feed_forward.w2"),
        router=stored("feed_forward.gate"),
        correction=vector("feed_forward.expert_bias"),
    ).inside,
    no_effect=names().no_effect,
)
_OLDER = dict.fromkeys(
    (
        *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale"),
        *("block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out"),
        *("conv_use_xavier_init", "num_heads", "theta", "use_pos_enc", "conv_L_cache_init"),
    ),
    NOT_READ,
)
FAMILIES = (
    Family(
        "lfm2",
        _lfm2,
        {
            **_DEFAULTS,
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
            "full_attn_idxs": None,
        },
        _NAMES,
        _OLDER,
        {**_ALIASES, "block_ff_dim": "intermediate_size"},
    ),
    Family(
        "lfm2_moe",
        _lfm2_moe,
        {
            **_DEFAULTS,
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        },
        _NAMES,
        _OLDER,
        _ALIASES,
    ),
)
"""See `Family`."""
