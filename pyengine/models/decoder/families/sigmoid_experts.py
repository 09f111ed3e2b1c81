"""Families whose routers have sigmoids and a correction, as DeepSeek-V3's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pyengine.models.decoder.families.experts import (
    FEW_EXPERTS,
    MIXTRAL_EXPERTS,
    QWEN_EXPERTS,
    routed,
)
from pyengine.models.decoder.families.parts import (
    DEFAULTS,
    NOT_READ,
    Family,
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
from pyengine.models.decoder.names import ATTENTION, GATED, MTP, PRE_NORM, names, stored, vector
from pyengine.models.decoder.rotary_settings import RotaryKind, two_rotaries
from pyengine.models.decoder.settings import Settings
from pyengine.models.decoder.spec import MLP, DecoderSpec, Experts, Layer, QueryKeyNorm, Routing


def sigmoid_routing(settings: Settings) -> Routing:
    """DeepSeek-V3's: sigmoids with a correction, in groups (arXiv 2412.19437, section 2.1.2)."""
    return routed(
        settings,
        "n_routed_experts",
        "sigmoid",
        is_normalised=settings.flag("norm_topk_prob"),
        scale=_optional(settings, "routed_scaling_factor"),
        has_correction=True,
        groups=settings.integer("n_group"),
        chosen_groups=settings.integer("topk_group"),
    )


def _optional(settings: Settings, key: str) -> float:
    """A factor; null: 1, as in files of MiMo."""
    factor = settings.optional_number(key)
    return 1.0 if factor is None else factor


def with_shared(settings: Settings, routing: Routing) -> Experts:
    """Experts of `moe_intermediate_size` beside a shared one, several times as large."""
    mlp = gated(settings, size="moe_intermediate_size")
    times = settings.integer("n_shared_experts")
    shared = MLP(size=mlp.size * times, activation=mlp.activation)
    return Experts(routing=routing, mlp=mlp, shared=shared)


def _glm4_moe(settings: Settings) -> DecoderSpec:
    norm = rms(settings)
    head_norm = QueryKeyNorm(norm=norm, over="head") if settings.flag("use_qk_norm") else None
    mixer = attention(
        settings,
        RotaryKind(share=0.5),
        query_key_norm=head_norm,
        qkv_bias=settings.flag("attention_bias"),
    )
    experts, mlp = with_shared(settings, sigmoid_routing(settings)), gated(settings)
    first = settings.integer("first_k_dense_replace", 0)
    layers = [
        pre_norm(mixer, experts if layer >= first else mlp, norm)
        for layer in range(layer_count(settings))
    ]
    mtp_layer = pre_norm(mixer, experts, norm)
    return decoder(settings, layers, norm, mtp_layers=mtp_layers(settings, mtp_layer))


def mtp_layers(settings: Settings, layer: Layer) -> tuple[Layer, ...]:
    """The layers for speculation that follow the last one in files, all of one kind."""
    key = "num_nextn_predict_layers"
    count = settings.optional_integer(key, 0) or 0
    if count > _MAX_MTP_LAYERS:
        settings.refuse(key, f"a model has at most {_MAX_MTP_LAYERS} layers for speculation")
    return (layer,) * count


def _mimo_v2_flash(settings: Settings) -> DecoderSpec:
    shape, norm = heads(settings), rms(settings)
    kind = RotaryKind(share=0.334)
    full, sliding = two_rotaries(settings, shape["head_dim"], kind, "swa_rope_theta")
    windows = _mimo_windows(settings)
    _check_first_form(settings, shape, windows)
    experts = Experts(
        routing=sigmoid_routing(settings), mlp=gated(settings, size="moe_intermediate_size")
    )
    mlp, value_scale = gated(settings), settings.optional_number("attention_value_scale")
    mixer = attention(
        settings,
        rotary=full,
        value_dim=settings.integer("v_head_dim"),
        value_scale=1.0 if value_scale is None else value_scale,
        qkv_bias=settings.flag("attention_bias"),
    )
    slides = replace(mixer, kv_heads=2 * mixer.kv_heads, rotary=sliding, sinks=True)
    layers = [
        pre_norm(
            mixer if window is None else replace(slides, window=window),
            experts if is_sparse else mlp,
            norm,
        )
        for window, is_sparse in zip(windows, sparse_layers(settings), strict=True)
    ]
    return decoder(settings, layers, norm)


def _mimo_windows(settings: Settings) -> list[int | None]:
    """The window of each layer; the first form of the file says one less of it, too."""
    windows = sliding_layers(settings, lambda layer: layer > 0 and (layer + 1) % 6 != 0)
    if not settings.has("sliding_window_size"):
        return windows
    size = settings.integer("sliding_window_size")
    settings.only("sliding_window", size, size + 1, why=f"sliding_window_size is {size}")
    return [None if window is None else size + 1 for window in windows]


def _check_first_form(
    settings: Settings, shape: Mapping[str, int], windows: Sequence[int | None]
) -> None:
    """Refuse what the first form of the file says otherwise: transformers does not read it."""
    is_sparse = sparse_layers(settings)
    values = {
        "hybrid_layer_pattern": [int(window is not None) for window in windows],
        "moe_layer_freq": [int(sparse) for sparse in is_sparse],
        "swa_num_attention_heads": shape["heads"],
        "swa_num_key_value_heads": 2 * shape["kv_heads"],
        "swa_head_dim": shape["head_dim"],
        "swa_v_head_dim": settings.integer("v_head_dim"),
        "layernorm_epsilon": settings.number("rms_norm_eps"),
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    for key, value in values.items():
        settings.only(key, value, why="the other settings say so")


def sparse_layers(settings: Settings, first: int = 1) -> list[bool]:
    """The layers that have experts, by `mlp_layer_types`; by default those from `first` on."""
    count = layer_count(settings)
    types = settings.items("mlp_layer_types", count)
    if types is None:
        return [layer >= first for layer in range(count)]
    if any(kind not in ("dense", "sparse") for kind in types):
        settings.refuse("mlp_layer_types", "known are dense, sparse")
    return [kind == "sparse" for kind in types]


def _minimax_m2(settings: Settings) -> DecoderSpec:
    shape, norm = heads(settings), rms(settings)
    share: float | None = 1.0
    if settings.has("rotary_dim"):
        # A little more: the product with the size of a head is cut to a whole number.
        share = (settings.integer("rotary_dim") + 0.5) / shape["head_dim"]
    types = [1] * layer_count(settings)
    settings.only("attn_type_list", types, why="all layers attend to all positions")
    for key, value in _MINIMAX_ONLY.items():
        settings.only(key, value, why="the family is built otherwise")
    row_norm = QueryKeyNorm(norm=norm, over="row")
    mixer = attention(settings, RotaryKind(share=share), query_key_norm=row_norm)
    routing = routed(
        settings, "num_local_experts", "sigmoid", is_normalised=True, has_correction=True
    )
    return equal_layers(settings, mixer, Experts(routing=routing, mlp=gated(settings)), norm)


_MINIMAX_ONLY = {
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_qk_norm": True,
    "use_routing_bias": True,
}


_MAX_MTP_LAYERS = 64
SHARED_EXPERTS = {
    "shared_gate_up": stored("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "shared_down": stored("mlp.shared_experts.down_proj"),
}
DEEPSEEK_ALIASES = {
    "num_local_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}
_MIMO_ROPE = {
    kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}
    for kind, theta in (("full_attention", 5000000.0), ("sliding_attention", 10000.0))
}
FAMILIES = (
    Family(
        "glm4_moe",
        _glm4_moe,
        {
            **DEFAULTS,
            "vocab_size": 151552,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "use_qk_norm": False,
            "num_nextn_predict_layers": 1,
        },
        names(ATTENTION, PRE_NORM, GATED, QWEN_EXPERTS, SHARED_EXPERTS, MTP),
        aliases=DEEPSEEK_ALIASES,
    ),
    Family(
        "minimax_m2",
        _minimax_m2,
        {
            **DEFAULTS,
            "vocab_size": 200064,
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "rope_theta": 5000000.0,
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
        },
        names(ATTENTION, PRE_NORM, MIXTRAL_EXPERTS),
        dict.fromkeys(
            ("mtp_transformer_layers", "num_mtp_modules", "use_mtp"),
            "layers for speculation, which files do not have",
        ),
        FEW_EXPERTS,
    ),
    Family(
        "mimo_v2_flash",
        _mimo_v2_flash,
        {
            **DEFAULTS,
            "vocab_size": 152576,
            "intermediate_size": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _MIMO_ROPE,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8,
            "n_routed_experts": 256,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "sliding_window": 129,
            "mlp_layer_types": None,
            "attention_value_scale": 0.707,
        },
        names(
            ATTENTION,
            PRE_NORM,
            GATED,
            QWEN_EXPERTS,
            sinks=(*vector("self_attn.attention_sink_bias"), *vector("self_attn.sinks")),
        ),
        dict.fromkeys(("attention_chunk_size", "hybrid_block_size"), NOT_READ),
        {"num_local_experts": "n_routed_experts"},
    ),
)
"""See `Family`."""
