"""Shared by rows of the table: readers of the keys that most configurations have."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pyengine.models.decoder.names import Names
from pyengine.models.decoder.rotary_settings import (
    ROPE_DEFAULTS,
    RotaryKind,
    read_rotary,
    rope_section,
    usable_positions,
)
from pyengine.models.decoder.settings import Settings
from pyengine.models.decoder.spec import (
    MLP,
    Activation,
    Attention,
    DecoderSpec,
    FeedForward,
    Layer,
    Mixer,
    Norm,
)


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table: how a configuration becomes a spec, and where weights are in files.

    `defaults` are those of transformers' configuration class, for keys that files may lack.
    `no_effect` are keys of this family that change no answer, with the reason; `aliases` other
    names of keys, and the usual ones.
    """

    model_type: str
    spec: Callable[[Settings], DecoderSpec]
    defaults: Mapping[str, Any]
    names: Names
    no_effect: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        **ROPE_DEFAULTS,
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "layer_types": None,
    }
)
"""Llama's, which most families begin with."""

GRANITE = dict.fromkeys(
    ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), 1.0
)
"""Defaults of the factors of Granite's families."""
NOT_READ = "transformers does not read it"
"""Why a key of a family has no effect."""
WHOLE = RotaryKind()
"""Whole heads rotate."""

NO_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("initializer_range", "attention_dropout", "hidden_dropout", "embd_pdrop"),
                *("resid_pdrop", "attn_pdrop", "residual_dropout", "embedding_dropout"),
                *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
                *("gradient_checkpointing", "tf_legacy_loss", "use_bfloat16", "torchscript"),
                *("hidden_dropout_prob", "attention_probs_dropout_prob", "ffn_dropout", "dropout"),
                *("aux_loss_alpha", "seq_aux", "router_z_loss_coef", "moe_router_dtype"),
                *("use_flash_attn", "use_flash_attention", "fused_qkv", "fp32_attention"),
                *("max_sequence_length_in_training", "moe_aux_loss_coeff", "router_bias_update"),
            ),
            "for training",
        ),
        **dict.fromkeys(
            (
                *("max_length", "min_length", "do_sample", "early_stopping", "num_beams"),
                *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
                *("length_penalty", "no_repeat_ngram_size", "num_return_sequences"),
                *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_beam_groups"),
                *("diversity_penalty", "forced_bos_token_id", "forced_eos_token_id"),
                *("remove_invalid_values", "exponential_decay_length_penalty"),
                *("suppress_tokens", "begin_suppress_tokens", "cache_implementation"),
            ),
            "a default of sampling, read from generation_config.json",
        ),
        **dict.fromkeys(
            (
                *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
                *("decoder_start_token_id", "prefix", "tokenizer_class"),
                *("image_token_id", "boi_token_id", "eoi_token_id", "audio_token_id"),
            ),
            "read with the tokenizer",
        ),
        **dict.fromkeys(
            (
                *("architectures", "transformers_version", "_name_or_path", "name_or_path"),
                *("_model_name_or_path", "auto_map", "model_name", "license", "language", "tags"),
                *("_commit_hash", "unsloth_version", "unsloth_fixed"),
                *("custom_pipelines", "base_model_name_or_path"),
                *("finetuning_task", "task_specific_params", "transformers.js_config"),
            ),
            "says where the file came from",
        ),
        **dict.fromkeys(
            (
                *("output_hidden_states", "output_attentions", "output_scores"),
                *("return_dict", "return_dict_in_generate", "use_return_dict"),
                *("id2label", "label2id", "num_labels", "problem_type"),
                *("use_cache", "tie_last_hidden_states"),
            ),
            "about what transformers returns",
        ),
        **dict.fromkeys(
            (
                *("_attn_implementation", "attn_implementation", "_attn_implementation_autoset"),
                *("_experts_implementation", "experts_implementation"),
            ),
            "backends of attention and experts are chosen by the device",
        ),
        "chunk_size_feed_forward": "causal models do not chunk their feed-forward layers",
        "is_decoder": "the families here are decoders",
        "pretraining_tp": "the order of sums in training",
        **dict.fromkeys(
            ("max_sequence_length", "model_max_length"), "max_position_embeddings counts"
        ),
    }
)
"""Keys that change no answer, whatever the family."""

NEUTRAL: Mapping[str, tuple[object, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("attention_bias", "mlp_bias", "use_bias", "bias", "qkv_bias", "use_qkv_bias"),
                *("attention_out_bias", "lm_head_bias", "head_bias", "add_bias_linear"),
                *("use_sliding_window", "use_mrope", "qk_layernorm", "use_qk_norm", "qk_norm"),
                *("rope_interleaved", "tie_encoder_decoder", "cross_attention_hidden_size"),
                *("alibi", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"),
                *("parallel_attn", "use_parallel_residual", "scale_embedding", "attention_sink"),
                *("use_bidirectional_attention", "use_double_wide_mlp", "enable_moe_block"),
            ),
            (False, "it switches off what the family does not have"),
        ),
        **dict.fromkeys(
            (
                *("partial_rotary_factor", "rotary_pct", "rope_ratio", "attention_multiplier_base"),
                *("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"),
            ),
            (1.0, "a factor of 1"),
        ),
        **dict.fromkeys(
            (
                *("num_experts", "num_local_experts", "n_routed_experts", "num_kv_shared_layers"),
                *("num_nextn_predict_layers", "num_mtp_layers", "n_shared_experts"),
                "shared_expert_intermediate_size",
            ),
            (0, "there are none"),
        ),
        **dict.fromkeys(
            ("mlp_only_layers", "no_rope_layers", "skip_layers"),
            ([], "no layer is otherwise"),
        ),
    }
)
"""Keys of other families, with the value that has no effect in a family that does not read them."""

_LAYER_TYPES = {
    **dict.fromkeys(("linear_attention", "mamba", "conv"), True),
    **dict.fromkeys(("full_attention", "attention"), False),
}
"""Kinds of layers, and whether they keep a state."""

MAX_LAYERS = 4096
"""Maximum number of layers: a spec has an entry for each."""

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_accurate": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_python_tanh": "gelu_tanh",
        "relu": "relu",
        "relu2": "relu2",
    }
)
"""Activations by their names in files."""


def activation(settings: Settings, key: str = "hidden_act") -> Activation:
    """The activation of the feed-forward layers."""
    return ACTIVATIONS[settings.text(key, list(ACTIVATIONS), falls_back=True)]


def rms(settings: Settings, key: str = "rms_norm_eps", offset: float = 0.0) -> Norm:
    """A root-mean-square norm with this key's epsilon."""
    return Norm(eps=settings.number(key, above=0), offset=offset)


def heads(settings: Settings) -> dict[str, Any]:
    """`heads`, `kv_heads` and `head_dim`, which is by default the hidden size divided by heads."""
    count = settings.integer("num_attention_heads")
    hidden = settings.integer("hidden_size")
    head_dim = settings.optional_integer("head_dim") or hidden // count
    if head_dim == 0:
        settings.refuse("num_attention_heads", f"there are more than hidden_size={hidden}")
    kv_heads = settings.optional_integer("num_key_value_heads") or count
    return {"heads": count, "kv_heads": kv_heads, "head_dim": head_dim}


def attention(
    settings: Settings, kind: RotaryKind = WHOLE, *, bias: str = "", **more: Any
) -> Attention:
    """Attention whose heads rotate by `kind`, scaled by the root of their size.

    `bias` is the key of the biases of all matrices, if there is one. `more` are further fields, or
    replace these.
    """
    shape = heads(settings)
    has_bias = settings.flag(bias) if bias else False
    if "rotary" not in more:
        more["rotary"] = read_rotary(settings, shape["head_dim"], kind)
    usual = {"scaling": shape["head_dim"] ** -0.5, "qkv_bias": has_bias, "out_bias": has_bias}
    return Attention(**{**shape, **usual, **more})


def without_rotation(settings: Settings) -> None:
    """Accept any rotary settings: no head of the model rotates."""
    settings.pass_over(dict.fromkeys(ROPE_DEFAULTS, "no head rotates"))
    if (section := rope_section(settings)) is not None:
        section.pass_over(dict.fromkeys(section.names, "no head rotates"))


def layer_count(settings: Settings) -> int:
    """The number of layers, of which a spec has one by one."""
    count = settings.integer("num_hidden_layers")
    if count > MAX_LAYERS:
        settings.refuse("num_hidden_layers", f"a model has at most {MAX_LAYERS}")
    return count


def layer_numbers(settings: Settings, key: str) -> list[int] | None:
    """The numbers of some layers, or null."""
    numbers = settings.items(key, None)
    if numbers is not None and not all(type(number) is int for number in numbers):
        settings.refuse(key, "it must be a list of numbers of layers")
    return numbers


def gated(
    settings: Settings, *, size: str = "intermediate_size", act: str = "hidden_act", bias: str = ""
) -> MLP:
    """A gated MLP; `size`, `act` and `bias` are keys, the last one if there is one."""
    return MLP(
        size=settings.integer(size),
        activation=activation(settings, act),
        has_bias=settings.flag(bias) if bias else False,
    )


def pre_norm(mixer: Mixer, feed_forward: FeedForward, norm: Norm, **more: Any) -> Layer:
    """A layer that normalises before each part."""
    return Layer(
        mixer=mixer, feed_forward=feed_forward, before_mixer=norm, before_feed_forward=norm, **more
    )


def sliding_layers(
    settings: Settings, is_sliding: Callable[[int], bool], *, none: int | None = None
) -> list[int | None]:
    """The window of each layer, by `layer_types`, or by `is_sliding` where that is not given.

    `none` is a number that stands for no window, beside null.
    """
    count = layer_count(settings)
    types = settings.items("layer_types", count)
    slides = [is_sliding(layer) for layer in range(count)]
    if types is not None:
        known = {"full_attention": False, "attention": False, "sliding_attention": True}
        if not all(isinstance(kind, str) and kind in known for kind in types):
            settings.refuse("layer_types", f"known are {', '.join(known)}")
        slides = [known[kind] for kind in types]
    key = "sliding_window"
    size = None if settings.raw(key) == none else settings.optional_integer(key)
    if size is None and any(slides):
        settings.refuse(key, "the model has layers whose attention slides: it must be above 0")
    return [size if slide else None for slide in slides]


def recurrent_layers(settings: Settings, keeps_state: Callable[[int], bool]) -> list[bool]:
    """True for each layer that keeps a state, by `layer_types`, or where it is not given, by
    `keeps_state`."""
    count = layer_count(settings)
    types = settings.items("layer_types", count)
    if types is None:
        return [keeps_state(layer) for layer in range(count)]
    if not all(isinstance(kind, str) and kind in _LAYER_TYPES for kind in types):
        settings.refuse("layer_types", f"known are {', '.join(_LAYER_TYPES)}")
    return [_LAYER_TYPES[kind] for kind in types]


def switched_layers(
    settings: Settings, is_sliding: Callable[[int], bool], *, none: int | None = None
) -> list[int | None]:
    """As `sliding_layers`, for families in which none slides without `use_sliding_window`."""
    slides = settings.flag("use_sliding_window")
    windows = sliding_layers(settings, lambda layer: slides and is_sliding(layer), none=none)
    if not slides and any(windows):
        settings.refuse("use_sliding_window", "layer_types has layers whose attention slides")
    return windows


def decoder(
    settings: Settings,
    layers: Sequence[Layer],
    norm: Norm,
    *,
    kind: RotaryKind | None = None,
    **more: Any,
) -> DecoderSpec:
    """The spec of these layers, with what is outside of them."""
    refuse_other_models(settings)
    return DecoderSpec(
        family=str(settings.raw("model_type")),
        vocab_size=settings.integer("vocab_size"),
        hidden_size=settings.integer("hidden_size"),
        max_positions=usable_positions(settings, kind),
        layers=tuple(layers),
        norm=norm,
        is_tied=settings.flag("tie_word_embeddings"),
        saved_dtype=saved_dtype(settings),
        **more,
    )


def equal_layers(
    settings: Settings, mixer: Mixer, feed_forward: FeedForward, norm: Norm, **more: Any
) -> DecoderSpec:
    """The spec of a decoder whose layers are alike, with a norm before each part."""
    layer = pre_norm(mixer, feed_forward, norm)
    return decoder(settings, [layer] * layer_count(settings), norm, **more)


def granite_decoder(
    settings: Settings, mixers: Sequence[Mixer], feed_forward: FeedForward
) -> DecoderSpec:
    """The spec of a Granite model, by its factors."""
    norm, scale = rms(settings), settings.number("residual_multiplier")
    layers = [pre_norm(mixer, feed_forward, norm, residual_scale=scale) for mixer in mixers]
    return decoder(
        settings,
        layers,
        norm,
        embedding_scale=settings.number("embedding_multiplier"),
        logit_scale=1 / settings.number("logits_scaling", above=0),
    )


def refuse_other_models(settings: Settings) -> None:
    """Refuse settings of models that are not causal, or whose weights are packed."""
    causal = "the model attends to later tokens too"
    settings.only("is_encoder_decoder", False, why="the model has an encoder")
    settings.only("add_cross_attention", False, why="the model attends to an encoder")
    settings.only("pruned_heads", {}, why="some heads of the model are not there")
    settings.only("use_bidirectional_attention", False, "vision", why=causal)  # of images only
    settings.only("is_causal", True, why=causal)
    if settings.has("quantization_config"):
        settings.refuse("quantization_config", "packed weights are not read by this decoder")


def saved_dtype(settings: Settings) -> str | None:
    """The number format of `dtype`, or of `torch_dtype`, its name in older files."""
    known = ("float32", "bfloat16", "float16", "float64")
    for key in ("dtype", "torch_dtype"):
        if settings.has(key):
            settings.pass_over({"torch_dtype": "dtype has it"})
            return settings.text(key, known)
    return None
