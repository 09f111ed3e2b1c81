"""Families of attention mixed with delta rules: Qwen3-Next, Qwen3.5, OLMo-Hybrid, Kimi Linear."""

from dataclasses import replace
from typing import Any

from pyengine.models.decoder.families.experts import (
    QWEN_EXPERTS,
    expert_names,
    qwen_experts,
    qwen_sparse_layers,
)
from pyengine.models.decoder.families.latent import latent_attention
from pyengine.models.decoder.families.parts import (
    DEFAULTS,
    NEUTRAL,
    NO_EFFECT,
    NOT_READ,
    Family,
    attention,
    decoder,
    gated,
    layer_count,
    layer_numbers,
    pre_norm,
    recurrent_layers,
    refuse_other_models,
    rms,
    saved_dtype,
    without_rotation,
)
from pyengine.models.decoder.families.sigmoid_experts import (
    sigmoid_routing,
    sparse_layers,
    with_shared,
)
from pyengine.models.decoder.names import (
    ATTENTION,
    GATED,
    LATENT_ATTENTION,
    PRE_NORM,
    Stored,
    names,
    stored,
    vector,
)
from pyengine.models.decoder.recurrent import DeltaAttention, GatedDelta, GatedNorm
from pyengine.models.decoder.rotary_settings import RotaryKind, rope_section
from pyengine.models.decoder.settings import Settings
from pyengine.models.decoder.spec import (
    Attention,
    DecoderSpec,
    FeedForward,
    Layer,
    Norm,
    QueryKeyNorm,
)

_QUARTER = RotaryKind(share=0.25)


def _delta(settings: Settings, norm_eps: float, **more: Any) -> GatedDelta:
    settings.text("hidden_act", ["silu"])
    value_dim = settings.integer("linear_value_head_dim")
    return GatedDelta(
        key_heads=settings.integer("linear_num_key_heads"),
        value_heads=settings.integer("linear_num_value_heads"),
        key_dim=settings.integer("linear_key_head_dim"),
        value_dim=value_dim,
        convolution=settings.integer("linear_conv_kernel_dim", 2),
        norm=GatedNorm(size=value_dim, eps=norm_eps),
        **more,
    )


def _qwen_attention(settings: Settings, norm: Norm) -> Attention:
    settings.only("attn_output_gate", True, why="attention has a gate")
    section = rope_section(settings)
    if section is not None:
        section.pass_over(dict.fromkeys(("mrope_section", "mrope_interleaved"), "for images"))
    return attention(
        settings,
        _QUARTER,
        bias="attention_bias",
        query_key_norm=QueryKeyNorm(norm=norm, over="head"),
        output_gate=True,
    )


def _qwen_layers(settings: Settings, parts: list[FeedForward]) -> DecoderSpec:
    norm = rms(settings, offset=1.0)
    every = settings.integer("full_attention_interval")
    mixer, delta = _qwen_attention(settings, norm), _delta(settings, norm.eps)
    keeps_state = recurrent_layers(settings, lambda layer: (layer + 1) % every != 0)
    layers = [
        pre_norm(delta if recurrent else mixer, part, norm)
        for recurrent, part in zip(keeps_state, parts, strict=True)
    ]
    return decoder(settings, layers, norm)


def _qwen3_next(settings: Settings) -> DecoderSpec:
    shared = gated(settings, size="shared_expert_intermediate_size")
    experts = qwen_experts(settings, shared=shared, shared_gate=True)
    return _qwen_layers(settings, list(qwen_sparse_layers(settings, experts)))


def _qwen3_5(settings: Settings) -> DecoderSpec:
    return _qwen_layers(settings, [gated(settings)] * layer_count(settings))


def _qwen3_5_moe(settings: Settings) -> DecoderSpec:
    shared = gated(settings, size="shared_expert_intermediate_size")
    experts = qwen_experts(settings, shared=shared, shared_gate=True)
    return _qwen_layers(settings, [experts] * layer_count(settings))


def _text_part(settings: Settings, family: Family) -> DecoderSpec:
    """The text part of a model of images and text, whose `text_config` is of another family."""
    refuse_other_models(settings)
    settings.default(text_config={})
    text = settings.section("text_config", defaults=family.defaults)
    assert text is not None  # it is an object by default
    text.default(model_type=family.model_type)
    text.text("model_type", [family.model_type])
    spec = family.spec(text)
    text.pass_over({**NO_EFFECT, **family.no_effect})
    text.pass_over_neutral(NEUTRAL)
    is_tied, name = spec.is_tied, str(settings.raw("model_type"))
    if settings.has("tie_word_embeddings"):
        is_tied = settings.flag("tie_word_embeddings")
    dtype = saved_dtype(settings)
    return replace(spec, family=name, is_tied=is_tied, saved_dtype=spec.saved_dtype or dtype)


def _olmo_hybrid(settings: Settings) -> DecoderSpec:
    norm, heads = rms(settings), settings.integer("num_attention_heads")
    scale = 2.0 if settings.flag("linear_allow_neg_eigval") else 1.0
    delta = _delta(_with_olmo_sizes(settings, heads), _OLMO_GATED_EPS, beta_scale=scale)
    row_norm, more = QueryKeyNorm(norm=norm, over="row"), dict[str, Any]()
    section = rope_section(settings)
    if section is not None and "rope_theta" in section.names and section.raw("rope_theta") is None:
        section.text("rope_type", ["default"])
        more["rotary"] = None
    mixer = attention(settings, bias="attention_bias", query_key_norm=row_norm, **more)
    mlp, count = gated(settings), layer_count(settings)
    after = Layer(mixer=mixer, feed_forward=mlp, after_mixer=norm, after_feed_forward=norm)
    keeps_state = recurrent_layers(
        settings, lambda layer: layer % 4 != 3 and (layer < count - 1 or count > 3)
    )
    layers = [pre_norm(delta, mlp, norm) if state else after for state in keeps_state]
    return decoder(settings, layers, norm)


def _with_olmo_sizes(settings: Settings, heads: int) -> Settings:
    """The settings with the sizes that a file may leave out."""
    keys = [
        key for key in ("linear_num_key_heads", "linear_num_value_heads") if not settings.has(key)
    ]
    settings.default(**dict.fromkeys(keys, heads))
    if not settings.has("linear_key_head_dim"):
        size = int(
            0.75 * settings.integer("hidden_size") / settings.integer("linear_num_key_heads")
        )
        settings.default(linear_key_head_dim=size)
    if not settings.has("linear_value_head_dim"):
        settings.default(linear_value_head_dim=2 * settings.integer("linear_key_head_dim"))
    return settings


def _kimi_linear(settings: Settings) -> DecoderSpec:
    norm, sizes = rms(settings), settings
    settings.text("hidden_act", ["silu"])
    for key, values in _KIMI_ONLY.items():
        settings.only(key, *values, why="the family is built otherwise")
    section = settings.section("linear_attn_config")
    keys = ["linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"]
    if section is not None:
        settings.pass_over(dict.fromkeys(keys, "linear_attn_config has them"))
        sizes, keys = section, ["head_dim", "num_heads", "short_conv_kernel_size"]
    size, heads, positions = (sizes.integer(key) for key in keys)
    delta = DeltaAttention(
        heads=heads,
        head_dim=size,
        convolution=positions,
        norm=GatedNorm(size=size, eps=norm.eps, activation="sigmoid"),
    )
    attending = _kimi_attending(settings, section)
    first = settings.integer("first_k_dense_replace", 0)
    is_sparse = sparse_layers(settings, first)
    experts, mlp = with_shared(settings, sigmoid_routing(settings)), gated(settings)
    without_rotation(settings)
    mixer = latent_attention(settings, rotary=None)
    layers = [
        pre_norm(mixer if attends else delta, experts if sparse else mlp, norm)
        for attends, sparse in zip(attending, is_sparse, strict=True)
    ]
    return decoder(settings, layers, norm)


def _kimi_attending(settings: Settings, section: Settings | None) -> list[bool]:
    """True for each layer with attention: by `layer_types`, or by numbers from 1 on."""
    attending: list[int] | None = None
    if section is not None:
        attending = layer_numbers(section, "full_attn_layers")
        layer_numbers(section, "kda_layers")
    if settings.has("layer_types") or attending is None:
        keeps_state = recurrent_layers(settings, lambda layer: layer % 4 != 0 or layer == 0)
        return [not state for state in keeps_state]
    return [number + 1 in attending for number in range(layer_count(settings))]


_OLMO_GATED_EPS = 1e-5
_KIMI_ONLY = {
    "moe_router_activation_func": ("sigmoid",),
    "moe_layer_freq": (1,),
    "mla_use_nope": (True,),
    "use_grouped_topk": (True,),
}
_IMAGES = dict.fromkeys(
    (
        *("vision_config", "image_token_id", "video_token_id"),
        *("vision_start_token_id", "vision_end_token_id", "language_model_only"),
    ),
    "for images",
)
_DELTA = {
    "conv": stored("linear_attn.conv1d"),
    "rate": vector("linear_attn.A_log"),
    "time_bias": vector("linear_attn.dt_bias"),
    "delta_norm": stored("linear_attn.norm"),
    "delta_out": stored("linear_attn.out_proj"),
}
_SHARED_EXPERT = {
    "shared_gate_up": stored("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared_down": stored("mlp.shared_expert.down_proj"),
    "shared_gate": stored("mlp.shared_expert_gate"),
}
_QWEN3_5_DELTA = {
    **_DELTA,
    "delta_qkvz": (Stored(("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"), kinds=(3, 1)),),
    "delta_ba": stored("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
}
_QWEN3_5_NAMES = names(ATTENTION, PRE_NORM, GATED, QWEN_EXPERTS, _SHARED_EXPERT, _QWEN3_5_DELTA)
_QWEN3_5_TEXT_PART = replace(
    _QWEN3_5_NAMES,
    outside={
        "embedding": stored("model.language_model.embed_tokens"),
        "norm": stored("model.language_model.norm"),
        "head": stored("lm_head"),
    },
    layer="model.language_model.layers.{}.",
    no_effect={**_QWEN3_5_NAMES.no_effect, r"model\.visual\..*": "reads images"},
)
_OLMO_NAMES = names(
    ATTENTION,
    GATED,
    _DELTA,
    conv=(
        *stored("linear_attn.q_conv1d", "linear_attn.k_conv1d", "linear_attn.v_conv1d"),
        *stored("linear_attn.conv1d"),
    ),
    delta_qkvz=stored(*(f"linear_attn.{part}_proj" for part in "qkvg")),
    delta_ba=stored("linear_attn.b_proj", "linear_attn.a_proj"),
    delta_norm=stored("linear_attn.o_norm"),
    delta_out=stored("linear_attn.o_proj"),
    before_mixer=(*stored("attention_layer_norm"), *stored("input_layernorm")),
    before_feed_forward=(*stored("feedforward_layer_norm"), *stored("post_attention_layernorm")),
    after_mixer=(*stored("feedforward_layer_norm"), *stored("post_attention_layernorm")),
    after_feed_forward=stored("post_feedforward_layernorm"),
)
_KIMI_EXPERTS = expert_names("block_sparse_moe.experts", "w1", "w3", "w2")
_KIMI_NAMES = names(
    LATENT_ATTENTION,
    PRE_NORM,
    _KIMI_EXPERTS,
    gate_up=(
        *stored("mlp.gate_proj", "mlp.up_proj"),
        *stored("block_sparse_moe.gate_proj", "block_sparse_moe.up_proj"),
    ),
    down=(*stored("mlp.down_proj"), *stored("block_sparse_moe.down_proj")),
    router=stored("block_sparse_moe.gate"),
    correction=vector("block_sparse_moe.gate.e_score_correction_bias"),
    shared_gate_up=stored(
        "block_sparse_moe.shared_experts.gate_proj", "block_sparse_moe.shared_experts.up_proj"
    ),
    shared_down=stored("block_sparse_moe.shared_experts.down_proj"),
    delta_qkv=stored(*(f"self_attn.{part}_proj" for part in "qkv")),
    conv=stored(*(f"self_attn.{part}_conv1d" for part in "qkv")),
    delta_b=stored("self_attn.b_proj"),
    decay_down=stored("self_attn.f_a_proj"),
    decay_up=stored("self_attn.f_b_proj"),
    gate_down=stored("self_attn.g_a_proj"),
    gate_up_heads=stored("self_attn.g_b_proj"),
    rate=vector("self_attn.A_log"),
    time_bias=vector("self_attn.dt_bias"),
    delta_norm=stored("self_attn.o_norm"),
    delta_out=stored("self_attn.o_proj"),
)
_QWEN: dict[str, Any] = {
    **DEFAULTS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
_QWEN3_5 = Family(
    "qwen3_5_text",
    _qwen3_5,
    {
        **_QWEN,
        "vocab_size": 248320,
        "intermediate_size": 12288,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    _QWEN3_5_NAMES,
    {
        **dict.fromkeys(
            ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"), "for speculation"
        ),
        "mamba_ssm_dtype": "states are float32",
    },
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    model_type="qwen3_5_moe_text",
    spec=_qwen3_5_moe,
    defaults={
        **_QWEN,
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    no_effect={**_QWEN3_5.no_effect, "intermediate_size": NOT_READ},
)
FAMILIES = (
    Family(
        "qwen3_next",
        _qwen3_next,
        {
            **_QWEN,
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        names(
            ATTENTION,
            PRE_NORM,
            GATED,
            QWEN_EXPERTS,
            _SHARED_EXPERT,
            _DELTA,
            delta_qkvz=(Stored(("linear_attn.in_proj_qkvz",), is_grouped=True),),
            delta_ba=(Stored(("linear_attn.in_proj_ba",), is_grouped=True),),
        ),
        _QWEN3_5.no_effect,
    ),
    _QWEN3_5,
    _QWEN3_5_MOE,
    Family(
        "qwen3_5",
        lambda settings: _text_part(settings, _QWEN3_5),
        {},
        _QWEN3_5_TEXT_PART,
        {**_QWEN3_5.no_effect, **_IMAGES},
    ),
    Family(
        "qwen3_5_moe",
        lambda settings: _text_part(settings, _QWEN3_5_MOE),
        {},
        _QWEN3_5_TEXT_PART,
        {**_QWEN3_5_MOE.no_effect, **_IMAGES},
    ),
    Family(
        "olmo_hybrid",
        _olmo_hybrid,
        {
            **DEFAULTS,
            "vocab_size": 100352,
            "hidden_size": 3840,
            "num_attention_heads": 30,
            "max_position_embeddings": 65536,
            "linear_num_key_heads": None,
            "linear_num_value_heads": None,
            "linear_key_head_dim": None,
            "linear_value_head_dim": None,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
        },
        _OLMO_NAMES,
        dict.fromkeys(
            (
                *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max"),
                "linear_dt_init_floor",
            ),
            "for training",
        ),
    ),
    Family(
        "kimi_linear",
        _kimi_linear,
        {
            **DEFAULTS,
            "vocab_size": 163840,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "moe_intermediate_size": 1024,
            "num_hidden_layers": 27,
            "num_key_value_heads": 32,
            "max_position_embeddings": 1048576,
            "rms_norm_eps": 1e-5,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.446,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "linear_attn_config": None,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
            "mlp_layer_types": None,
            "first_k_dense_replace": 1,
        },
        _KIMI_NAMES,
        {
            "head_dim": "the other sizes of heads count",
            "ep_size": "for training",
        },
        {
            "model_max_length": "max_position_embeddings",
            "moe_renormalize": "norm_topk_prob",
            "num_expert_group": "n_group",
            "num_experts": "n_routed_experts",
            "num_local_experts": "n_routed_experts",
            "num_experts_per_token": "num_experts_per_tok",
            "num_shared_experts": "n_shared_experts",
        },
    ),
)
"""See `Family`."""
