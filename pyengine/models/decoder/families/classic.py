"""Families of older design: layer norms, biases, and a plain feed-forward part."""

from dataclasses import replace

from pyengine.models.decoder.families.parts import (
    DEFAULTS,
    Family,
    activation,
    attention,
    decoder,
    equal_layers,
    gated,
    heads,
    layer_count,
    pre_norm,
)
from pyengine.models.decoder.names import (
    ATTENTION,
    LLAMA,
    NO_EFFECT,
    PRE_NORM,
    Names,
    Stored,
    names,
    stored,
)
from pyengine.models.decoder.rotary_settings import RotaryKind
from pyengine.models.decoder.settings import Settings
from pyengine.models.decoder.spec import MLP, DecoderSpec, Layer, Norm


def _starcoder2(settings: Settings) -> DecoderSpec:
    norm = _layer_norm(settings, "norm_epsilon")
    settings.only("mlp_type", "default", why="the family has no gated MLP")
    settings.only("norm_type", "layer_norm", why="the family has layer norms")
    window = settings.optional_integer("sliding_window")
    mixer = attention(settings, bias="use_bias", window=window)
    return equal_layers(settings, mixer, _plain(settings, bias="use_bias"), norm)


def _layer_norm(settings: Settings, key: str, offset: float = 0.0) -> Norm:
    eps = settings.number(key, above=0)
    return Norm(kind="layer", eps=eps, offset=offset, has_bias=True)


def _plain(settings: Settings, *, bias: str) -> MLP:
    """An MLP without a gate; `bias` is the key of its biases."""
    return replace(gated(settings, bias=bias), is_gated=False)


def _nemotron(settings: Settings) -> DecoderSpec:
    norm = _layer_norm(settings, "norm_eps", offset=1.0)
    mixer = attention(settings, RotaryKind(share=0.5), bias="attention_bias")
    return equal_layers(settings, mixer, _plain(settings, bias="mlp_bias"), norm)


def _stablelm(settings: Settings) -> DecoderSpec:
    norm = _layer_norm(settings, "layer_norm_eps")
    settings.only("qk_layernorm", False, why="each head has its own norm")
    is_parallel = settings.flag("use_parallel_residual")
    layer = Layer(
        mixer=attention(settings, RotaryKind(share=0.25), qkv_bias=settings.flag("use_qkv_bias")),
        feed_forward=gated(settings),
        before_mixer=norm,
        before_feed_forward=None if is_parallel else norm,
        is_parallel=is_parallel,
    )
    return decoder(settings, [layer] * layer_count(settings), norm)


def _gpt2(settings: Settings) -> DecoderSpec:
    shape, hidden = heads(settings), settings.integer("hidden_size")
    if shape["heads"] * shape["head_dim"] != hidden:
        settings.refuse("num_attention_heads", f"it must divide the hidden size, {hidden}")
    norm = _layer_norm(settings, "layer_norm_epsilon")
    scaling = shape["head_dim"] ** -0.5 if settings.flag("scale_attn_weights") else 1.0
    is_divided = settings.flag("scale_attn_by_inverse_layer_idx")
    mlp = MLP(
        size=settings.optional_integer("n_inner") or 4 * hidden,
        activation=activation(settings, "activation_function"),
        is_gated=False,
        has_bias=True,
    )
    mixer = attention(settings, rotary=None, scaling=scaling, qkv_bias=True, out_bias=True)
    scales = [scaling / (layer + 1 if is_divided else 1) for layer in range(layer_count(settings))]
    layers = [pre_norm(replace(mixer, scaling=scale), mlp, norm) for scale in scales]
    positions = settings.integer("max_position_embeddings")
    return decoder(settings, layers, norm, learned_positions=positions)


def _transposed(name: str) -> tuple[Stored, ...]:
    return (Stored((name,), is_transposed=True),)


_GPT2_NAMES = Names(
    outside={
        "embedding": stored("transformer.wte"),
        "positions": stored("transformer.wpe"),
        "norm": stored("transformer.ln_f"),
        "head": stored("lm_head"),
    },
    inside={
        "before_mixer": stored("ln_1"),
        "before_feed_forward": stored("ln_2"),
        "qkv": _transposed("attn.c_attn"),
        "out": _transposed("attn.c_proj"),
        "up": _transposed("mlp.c_fc"),
        "down": _transposed("mlp.c_proj"),
    },
    layer="transformer.h.{}.",
    base="transformer.",
    no_effect={**NO_EFFECT, r"transformer\.h\.\d+\.attn\.(masked_)?bias": "the causal mask"},
)
FAMILIES = (
    Family(
        "starcoder2",
        _starcoder2,
        {
            **DEFAULTS,
            "vocab_size": 49152,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        names(ATTENTION, PRE_NORM, up=stored("mlp.c_fc"), down=stored("mlp.c_proj")),
        {
            **dict.fromkeys(
                ("activation_function", "layer_norm_epsilon", "scale_attn_weights"),
                "of an older implementation: transformers does not read it",
            ),
            **dict.fromkeys(
                ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
                "scores are float32 here, always",
            ),
        },
    ),
    Family(
        "nemotron",
        _nemotron,
        {
            **DEFAULTS,
            "vocab_size": 256000,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_attention_heads": 48,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
        },
        names(ATTENTION, PRE_NORM, up=stored("mlp.up_proj"), down=stored("mlp.down_proj")),
    ),
    Family(
        "stablelm",
        _stablelm,
        {
            **DEFAULTS,
            "vocab_size": 50304,
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "use_qkv_bias": False,
            "use_parallel_residual": False,
        },
        LLAMA,
    ),
    Family(
        "gpt2",
        _gpt2,
        {
            **DEFAULTS,
            "vocab_size": 50257,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 1024,
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": True,
        },
        _GPT2_NAMES,
        {
            "n_ctx": "n_positions says it",
            "reorder_and_upcast_attn": "scores are float32 here, always",
            **dict.fromkeys(
                (
                    *("summary_type", "summary_use_proj", "summary_activation"),
                    *("summary_proj_to_labels", "summary_first_dropout"),
                ),
                "for classification",
            ),
        },
        {
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
        },
    ),
)
"""See `Family`."""
