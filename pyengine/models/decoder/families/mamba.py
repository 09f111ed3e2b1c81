"""Families of attention mixed with Mamba: Granite 4, Nemotron-H, Falcon-H1, Jamba."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyengine.models.decoder.families.experts import expert_names, routed
from pyengine.models.decoder.families.parts import (
    DEFAULTS,
    GRANITE,
    MAX_LAYERS,
    NOT_READ,
    Family,
    activation,
    attention,
    decoder,
    gated,
    granite_decoder,
    layer_count,
    pre_norm,
    recurrent_layers,
    rms,
    without_rotation,
)
from pyengine.models.decoder.families.sigmoid_experts import sigmoid_routing
from pyengine.models.decoder.names import (
    ATTENTION,
    PRE_NORM,
    Names,
    Stored,
    names,
    stored,
    vector,
)
from pyengine.models.decoder.recurrent import GatedNorm, Mamba, Mamba2
from pyengine.models.decoder.settings import Settings
from pyengine.models.decoder.spec import MLP, DecoderSpec, Experts, FeedForward, Layer


def _mamba2(settings: Settings, width: int, eps: float, **more: Any) -> Mamba2:
    """Mamba-2 of this width, by the keys that begin with `mamba_`."""
    heads, groups = settings.integer("mamba_n_heads"), settings.integer("mamba_n_groups")
    size: Any = settings.raw("mamba_d_head")
    size = width // heads if size == "auto" else settings.integer("mamba_d_head")
    if size * heads != width:
        settings.refuse("mamba_d_head", f"times mamba_n_heads={heads} it must be {width}")
    _check_mamba(settings, "hidden_act")
    bias = settings.flag("mamba_proj_bias")
    norm = GatedNorm(size=width // groups, eps=eps, gates_first=True)
    usual = {"norm": norm, "has_bias": bias, "out_bias": bias}
    return Mamba2(
        heads=heads,
        head_dim=size,
        groups=groups,
        state_size=settings.integer("mamba_d_state"),
        convolution=settings.integer("mamba_d_conv", 2),
        conv_bias=settings.flag("mamba_conv_bias"),
        **{**usual, **more},
    )


def _check_mamba(settings: Settings, act: str) -> None:
    """Refuse other activations, and bounds of time steps."""
    settings.text(act, ["silu"])
    limits = settings.items("time_step_limit", 2)
    unbounded = (math.inf, "Infinity", {"__float__": "Infinity"})
    if limits is not None and not (limits[0] == 0 and limits[1] in unbounded):
        settings.refuse("time_step_limit", "bounds of time steps are not supported")


def _granitemoehybrid(settings: Settings) -> DecoderSpec:
    norm, more = rms(settings), dict[str, Any]()
    if settings.raw("position_embedding_type") in (None, "nope"):
        without_rotation(settings)
        more["rotary"] = None
    else:
        settings.text("position_embedding_type", ["rope", "nope"])
    scaling = settings.number("attention_multiplier", above=0)
    mixer = attention(settings, bias="attention_bias", scaling=scaling, **more)
    width = settings.integer("mamba_expand") * settings.integer("hidden_size")
    mamba = _mamba2(settings, width, norm.eps)
    keeps_state = recurrent_layers(settings, lambda _: True)
    shared = gated(settings, size="shared_intermediate_size")
    part: FeedForward = shared
    if settings.integer("num_local_experts", 0):
        routing = routed(settings, "num_local_experts", "chosen")
        part = Experts(routing=routing, mlp=gated(settings), shared=shared)
    settings.pass_over(dict.fromkeys(("intermediate_size", "num_experts_per_tok"), _OF_EXPERTS))
    return granite_decoder(settings, [mamba if state else mixer for state in keeps_state], part)


def _nemotron_h(settings: Settings) -> DecoderSpec:
    norm = rms(settings, "layer_norm_epsilon")
    for key, value in _NEMOTRON_ONLY.items():
        settings.only(key, value, why="the family is built otherwise")
    without_rotation(settings)
    mixer = attention(settings, rotary=None)
    _check_mamba(settings, "mamba_hidden_act")
    heads, size = settings.integer("mamba_num_heads"), settings.integer("mamba_head_dim")
    groups, bias = settings.integer("n_groups"), settings.flag("use_bias")
    mamba = Mamba2(
        heads=heads,
        head_dim=size,
        groups=groups,
        state_size=settings.integer("ssm_state_size"),
        convolution=settings.integer("conv_kernel", 2),
        norm=GatedNorm(size=heads * size // groups, eps=norm.eps, gates_first=True),
        conv_bias=settings.flag("use_conv_bias"),
        has_bias=bias,
        out_bias=bias,
    )
    parts: dict[str, dict[str, Any]] = {
        "linear_attention": {"mixer": mamba, "feed_forward": None, "before_mixer": norm},
        "full_attention": {"mixer": mixer, "feed_forward": None, "before_mixer": norm},
        "mlp": {"mixer": None, "feed_forward": None, "before_feed_forward": norm},
        "moe": {"mixer": None, "feed_forward": None, "before_feed_forward": norm},
    }
    kinds = _nemotron_layers(settings)
    parts["mlp"]["feed_forward"] = _plain(settings, "intermediate_size")
    if "moe" in kinds:
        parts["moe"]["feed_forward"] = _nemotron_experts(settings)
    settings.pass_over(_NEMOTRON_EXPERTS)
    return decoder(settings, [Layer(**parts[kind]) for kind in kinds], norm)


def _plain(settings: Settings, size: str) -> MLP:
    return MLP(
        size=settings.integer(size),
        activation=activation(settings, "mlp_hidden_act"),
        is_gated=False,
        has_bias=settings.flag("mlp_bias"),
    )


def _nemotron_experts(settings: Settings) -> Experts:
    latent = settings.optional_integer("moe_latent_size")
    if latent is not None:
        settings.only("mlp_bias", False, why="matrices around the experts have no biases")
    mlp = MLP(
        size=settings.integer("moe_intermediate_size"),
        activation=activation(settings, "mlp_hidden_act"),
        is_gated=False,
    )
    shared = _plain(settings, "moe_shared_expert_intermediate_size")
    return Experts(routing=sigmoid_routing(settings), mlp=mlp, shared=shared, latent=latent)


def _nemotron_layers(settings: Settings) -> Sequence[str]:
    """The kind of each layer: by a list, or by a text with a letter for each."""
    kinds: Any = settings.items("layers_block_type", None)
    if kinds is None:
        pattern = settings.raw("hybrid_override_pattern")
        if not isinstance(pattern, str) or not set(pattern) <= _PATTERN.keys():
            settings.refuse("hybrid_override_pattern", f"known are {' '.join(_PATTERN)}")
        kinds = [_PATTERN[letter] for letter in pattern]
    settings.pass_over({"hybrid_override_pattern": "layers_block_type counts"})
    kinds = [_RENAMED.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    if not 0 < len(kinds) <= MAX_LAYERS or any(kind not in _PATTERN.values() for kind in kinds):
        settings.refuse("layers_block_type", f"known are {', '.join(_PATTERN.values())}")
    settings.only("num_hidden_layers", len(kinds), why="layers_block_type has other layers")
    result: Sequence[str] = kinds
    return result


def _falcon_h1(settings: Settings) -> DecoderSpec:
    norm, number = rms(settings), settings.number
    expanded = settings.integer("mamba_expand") * settings.integer("hidden_size")
    width = settings.optional_integer("mamba_d_ssm") or expanded
    has_norm, gates_last = settings.flag("mamba_rms_norm"), settings.flag("mamba_norm_before_gate")
    groups = settings.integer("mamba_n_groups")
    gated_norm = GatedNorm(size=width // groups, eps=norm.eps, gates_first=not gates_last)
    scales = settings.numbers("ssm_multipliers", 5) if settings.has("ssm_multipliers") else ()
    mamba = _mamba2(
        settings,
        width,
        norm.eps,
        norm=gated_norm if has_norm else None,
        out_bias=settings.flag("projectors_bias"),
        scales=None if set(scales) <= {1.0} else scales,
        input_scale=number("ssm_in_multiplier"),
        output_scale=number("ssm_out_multiplier"),
    )
    mixer = attention(settings, bias="attention_bias")
    mixer = replace(
        mixer,
        scaling=mixer.scaling * number("key_multiplier", above=0),
        input_scale=number("attention_in_multiplier"),
        output_scale=number("attention_out_multiplier"),
    )
    before, after = 1.0, 1.0
    if settings.has("mlp_multipliers"):
        before, after = settings.numbers("mlp_multipliers", 2)
    # A factor on the gate alone: on the inputs of both halves, and divided out again.
    if before != 1.0:
        settings.only("mlp_bias", False, why="the gate has a factor")
    mlp = MLP(
        size=settings.integer("intermediate_size"),
        activation=activation(settings),
        has_bias=settings.flag("mlp_bias"),
        input_scale=before,
        output_scale=after / before,
    )
    layer = pre_norm(mixer, mlp, norm, beside=mamba)
    return decoder(
        settings,
        [layer] * layer_count(settings),
        norm,
        embedding_scale=number("embedding_multiplier"),
        logit_scale=number("lm_head_multiplier"),
    )


def _jamba(settings: Settings) -> DecoderSpec:
    norm, count = rms(settings), layer_count(settings)
    settings.text("hidden_act", ["silu"])
    settings.only("mamba_inner_layernorms", True, why="time steps, B and C have norms")
    hidden = settings.integer("hidden_size")
    rank: Any = settings.raw("mamba_dt_rank")
    mamba = Mamba(
        width=settings.integer("mamba_expand") * hidden,
        state_size=settings.integer("mamba_d_state"),
        rank=math.ceil(hidden / 16) if rank == "auto" else settings.integer("mamba_dt_rank"),
        convolution=settings.integer("mamba_d_conv", 2),
        eps=norm.eps,
        conv_bias=settings.flag("mamba_conv_bias"),
        has_bias=settings.flag("mamba_proj_bias"),
    )
    without_rotation(settings)
    mixer, part = attention(settings, rotary=None), gated(settings)
    experts: FeedForward = part
    if settings.integer("num_experts") > 1:
        experts = Experts(routing=routed(settings, "num_experts"), mlp=part)
    settings.pass_over({"num_experts_per_tok": _OF_EXPERTS})
    attends, is_sparse = (
        _every(settings, f"{kind}_layer_period", f"{kind}_layer_offset", count)
        for kind in ("attn", "expert")
    )
    layers = [
        pre_norm(mixer if attends[layer] else mamba, experts if is_sparse[layer] else part, norm)
        for layer in range(count)
    ]
    return decoder(settings, layers, norm)


def _every(settings: Settings, period: str, offset: str, count: int) -> list[bool]:
    """True for the layers that are `offset` more than a multiple of `period`; both are keys."""
    size, first = settings.integer(period), settings.integer(offset, 0)
    if first >= size:
        settings.refuse(offset, f"it must be less than {period}={size}")
    return [layer % size == first for layer in range(count)]


_OF_EXPERTS = "there are none, or it is read"
_NEMOTRON_EXPERTS = dict.fromkeys(
    (
        *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
        *("moe_shared_expert_intermediate_size", "moe_latent_size", "topk_group"),
        *("routed_scaling_factor", "n_group", "norm_topk_prob"),
    ),
    _OF_EXPERTS,
)
_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_RENAMED = {"mamba": "linear_attention", "attention": "full_attention"}
_NEMOTRON_ONLY = {
    "attention_bias": False,
    "mamba_proj_bias": False,
    "residual_in_fp32": False,
    "sliding_window": None,
}
_MAMBA = {
    "mamba_in": stored("mamba.in_proj"),
    "conv": stored("mamba.conv1d"),
    "rate": vector("mamba.A_log"),
    "time_bias": vector("mamba.dt_bias"),
    "skip": vector("mamba.D"),
    "mamba_norm": stored("mamba.norm"),
    "mamba_out": stored("mamba.out_proj"),
}
_FEED_FORWARD = {
    "before_mixer": stored("input_layernorm"),
    "before_feed_forward": stored("pre_ff_layernorm"),
    "gate_up": stored("feed_forward.gate_proj", "feed_forward.up_proj"),
    "down": stored("feed_forward.down_proj"),
}
_FINAL_NORM = {
    "embedding": stored("model.embed_tokens"),
    "norm": stored("model.final_layernorm"),
    "head": stored("lm_head"),
}
_JAMBA_EXPERTS = expert_names("feed_forward.experts", "gate_proj", "up_proj", "down_proj")
_NEMOTRON_MIXER = {
    "before_mixer": stored("norm"),
    "before_feed_forward": stored("norm"),
    "qkv": stored("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    "out": stored("mixer.o_proj"),
    **{
        name: (Stored(tuple(part.replace("mamba.", "mixer.") for part in of.parts), of.weight),)
        for name, (of,) in _MAMBA.items()
    },
    "up": stored("mixer.up_proj"),
    "down": stored("mixer.down_proj"),
    "router": stored("mixer.gate"),
    "correction": vector("mixer.gate.e_score_correction_bias"),
    "expert_up": (*stored("mixer.experts.{}.up_proj"), *vector("mixer.experts.up_proj")),
    "expert_down": (*stored("mixer.experts.{}.down_proj"), *vector("mixer.experts.down_proj")),
    "shared_up": stored("mixer.shared_experts.up_proj"),
    "shared_down": stored("mixer.shared_experts.down_proj"),
    "to_latent": stored("mixer.fc1_latent_proj"),
    "from_latent": stored("mixer.fc2_latent_proj"),
}
_MAMBA_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "mamba_n_groups": 1,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": None,
}
_KERNELS = dict.fromkeys(
    ("use_mamba_kernels", "mamba_chunk_size", "use_mambapy", "use_associative_scan"),
    "states do not depend on it",
)
_LOGITS = {"num_logits_to_keep": "the engine chooses", "calc_logits_for_entire_prompt": NOT_READ}
FAMILIES = (
    Family(
        "granitemoehybrid",
        _granitemoehybrid,
        {
            **_MAMBA_DEFAULTS,
            **GRANITE,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "position_embedding_type": None,
            "mamba_n_heads": 128,
            "mamba_d_state": 256,
        },
        names(
            ATTENTION,
            PRE_NORM,
            _MAMBA,
            gate_up=stored("shared_mlp.input_linear"),
            down=stored("shared_mlp.output_linear"),
            shared_gate_up=stored("shared_mlp.input_linear"),
            shared_down=stored("shared_mlp.output_linear"),
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
        {
            **_KERNELS,
            **dict.fromkeys(("normalization_function", "init_method"), NOT_READ),
        },
        {"layers_block_type": "layer_types"},
    ),
    Family(
        "nemotron_h",
        _nemotron_h,
        {
            **DEFAULTS,
            "vocab_size": 131072,
            "intermediate_size": 21504,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "layers_block_type": None,
            "hybrid_override_pattern": "ME*-",
            "mlp_hidden_act": "relu2",
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "mamba_hidden_act": "silu",
            "n_groups": 8,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "use_bias": False,
            "layer_norm_epsilon": 1e-5,
            "time_step_limit": None,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "moe_latent_size": None,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
        Names(
            {
                "embedding": stored("backbone.embeddings"),
                "norm": stored("backbone.norm_f"),
                "head": stored("lm_head"),
            },
            _NEMOTRON_MIXER,
            layer="backbone.layers.{}.",
            base="backbone.",
            no_effect=names().no_effect,
        ),
        {
            **_KERNELS,
            **_LOGITS,
            **dict.fromkeys(
                (
                    *("rescale_prenorm_residual", "time_step_min", "time_step_max"),
                    *("time_step_floor", "time_step_rank"),
                ),
                "for training",
            ),
            **dict.fromkeys(("chunk_size", "mamba_ssm_cache_dtype"), "states do not depend on it"),
            **dict.fromkeys(("expand", "n_shared_experts", "moe_shared_expert_overlap"), NOT_READ),
            **dict.fromkeys(("rms_norm_eps", "hidden_act"), NOT_READ),
            **dict.fromkeys(
                (
                    *("mtp_layers_block_type", "mtp_hybrid_override_pattern"),
                    "num_nextn_predict_layers",
                ),
                "for speculation",
            ),
        },
        {"attention_head_dim": "head_dim"},
    ),
    Family(
        "falcon_h1",
        _falcon_h1,
        {
            **_MAMBA_DEFAULTS,
            "vocab_size": 128000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "mamba_d_ssm": 1024,
            "mamba_n_heads": 128,
            "mamba_d_state": 256,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
            "projectors_bias": False,
            "lm_head_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "mlp_multipliers": None,
            "key_multiplier": 1.0,
            "attention_out_multiplier": 1.0,
            "attention_in_multiplier": 1.0,
            "ssm_multipliers": None,
            "ssm_in_multiplier": 1.0,
            "ssm_out_multiplier": 1.0,
        },
        Names(
            _FINAL_NORM,
            names(ATTENTION, _MAMBA, _FEED_FORWARD).inside,
            no_effect=names().no_effect,
        ),
        {
            **_KERNELS,
            **_LOGITS,
            **dict.fromkeys(("mlp_expansion_factor", "mamba_use_mlp"), NOT_READ),
            **dict.fromkeys(("time_step_floor", "time_step_max", "time_step_min"), "for training"),
        },
    ),
    Family(
        "jamba",
        _jamba,
        {
            **DEFAULTS,
            "vocab_size": 65536,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": "auto",
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
        Names(
            _FINAL_NORM,
            names(
                ATTENTION,
                _MAMBA,
                _FEED_FORWARD,
                _JAMBA_EXPERTS,
                router=stored("feed_forward.router"),
                mamba_rows=stored("mamba.x_proj"),
                time_up=stored("mamba.dt_proj"),
                time_bias=vector("mamba.dt_proj.bias"),
                time_norm=stored("mamba.dt_layernorm"),
                b_norm=stored("mamba.b_layernorm"),
                c_norm=stored("mamba.c_layernorm"),
            ).inside,
            no_effect=names().no_effect,
        ),
        {
            **_KERNELS,
            **_LOGITS,
        },
        {"num_local_experts": "num_experts"},
    ),
)
"""See `Family`."""
