"""Families with latent attention: DeepSeek-V3 and those built like it."""

from collections.abc import Sequence
from typing import Literal

from pyengine.models.decoder.families.experts import QWEN_EXPERTS
from pyengine.models.decoder.families.parts import (
    DEFAULTS,
    Family,
    decoder,
    gated,
    layer_count,
    pre_norm,
    rms,
)
from pyengine.models.decoder.families.sigmoid_experts import (
    DEEPSEEK_ALIASES,
    SHARED_EXPERTS,
    mtp_layers,
    sigmoid_routing,
    sparse_layers,
    with_shared,
)
from pyengine.models.decoder.names import GATED, LATENT_ATTENTION, MTP, PRE_NORM, names
from pyengine.models.decoder.rotary_settings import (
    RotaryKind,
    read_rotary,
    rope_section,
    yarn_score_scale,
)
from pyengine.models.decoder.settings import Settings
from pyengine.models.decoder.spec import DecoderSpec, LatentAttention, Norm, Rotary

_LATENT_NORM = Norm(eps=1e-6)
"""Norms of latents do not have the epsilon of the configuration."""


def latent_attention(
    settings: Settings, rotary: Rotary | None, score_scale: float = 1.0
) -> LatentAttention:
    """Attention with latents by DeepSeek's keys. `score_scale` is a factor on the scores."""
    heads = settings.integer("num_attention_heads")
    kv_heads = settings.optional_integer("num_key_value_heads") or heads
    if kv_heads != heads:
        settings.refuse("num_key_value_heads", f"latent attention expands keys to {heads} heads")
    plain, shared = settings.integer("qk_nope_head_dim"), settings.integer("qk_rope_head_dim")
    settings.only("qk_head_dim", plain + shared, why="it is the sum of the two")
    return LatentAttention(
        heads=heads,
        plain_dim=plain,
        shared_dim=shared,
        value_dim=settings.integer("v_head_dim"),
        kv_rank=settings.integer("kv_lora_rank"),
        query_rank=settings.optional_integer("q_lora_rank"),
        scaling=(plain + shared) ** -0.5 * score_scale,
        rotary=rotary,
        norm=_LATENT_NORM,
        has_bias=settings.flag("attention_bias"),
    )


def _attention(settings: Settings) -> LatentAttention:
    order: Literal["pairs", "halves"] = "pairs" if settings.flag("rope_interleave") else "halves"
    rotated = settings.integer("qk_rope_head_dim")
    rotary = read_rotary(settings, rotated, RotaryKind(order=order))
    return latent_attention(settings, rotary, yarn_score_scale(rope_section(settings)))


def _latent(settings: Settings, is_sparse: Sequence[bool]) -> DecoderSpec:
    norm, attention = rms(settings), _attention(settings)
    for key, values in _ONLY.items():
        settings.only(key, *values, why="the family is built otherwise")
    experts, mlp = with_shared(settings, sigmoid_routing(settings)), gated(settings)
    layers = [pre_norm(attention, experts if sparse else mlp, norm) for sparse in is_sparse]
    mtp_layer = pre_norm(attention, experts, norm)
    return decoder(settings, layers, norm, mtp_layers=mtp_layers(settings, mtp_layer))


def _deepseek_v3(settings: Settings) -> DecoderSpec:
    first = settings.integer("first_k_dense_replace", 0)
    count = layer_count(settings)
    settings.only("head_dim", settings.integer("qk_rope_head_dim"), why="it says what rotates")
    return _latent(settings, [layer >= first for layer in range(count)])


def _glm4_moe_lite(settings: Settings) -> DecoderSpec:
    settings.only("first_k_dense_replace", 1, why="mlp_layer_types says which layers are dense")
    return _latent(settings, sparse_layers(settings))


_ONLY = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}
_NAMES = names(PRE_NORM, GATED, QWEN_EXPERTS, SHARED_EXPERTS, MTP, LATENT_ATTENTION)
_DEEPSEEK = {
    **DEFAULTS,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "max_position_embeddings": 4096,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "num_nextn_predict_layers": 1,
}
_LITE = {
    **_DEEPSEEK,
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.8,
    "q_lora_rank": 768,
    "v_head_dim": 256,
    "qk_nope_head_dim": 192,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "mlp_layer_types": None,
    "num_nextn_predict_layers": 0,
}
_TRAINING = dict.fromkeys(
    ("aux_loss_alpha", "seq_aux", "ep_size", "num_experts_per_group"), "for training"
)
FAMILIES = (
    Family("deepseek_v3", _deepseek_v3, _DEEPSEEK, _NAMES, _TRAINING, DEEPSEEK_ALIASES),
    Family(
        "glm4_moe_lite",
        _glm4_moe_lite,
        _LITE,
        _NAMES,
        _TRAINING,
        {**DEEPSEEK_ALIASES, "head_dim": "qk_rope_head_dim"},
    ),
)
"""See `Family`."""
