"""The headers of GGUF files of models that keep states, as the settings of a configuration.

llama.cpp's converter multiplies Falcon-H1's factors into weights, sorts Qwen3-Next's projections by
kind, and Qwen3.5's value heads so that those of one key head are not consecutive. Decay rates are
in files themselves, not as logarithms. Source: `conversion/` in https://github.com/ggml-org/llama.cpp
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyengine.errors import ModelLoadError
from pyengine.models.gguf_header import GGUFArray
from pyengine.models.gguf_keys import HeaderKeys
from pyengine.models.gguf_rope import rope_parameters

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Header:
    """The keys of a file, and the shapes of its tensors."""

    keys: HeaderKeys
    shapes: Mapping[str, tuple[int, ...]]

    def needed(self, key: str, *, low: int = 1, high: int = 2**31 - 1) -> int:
        """A count that must be there."""
        value = self.keys.count(key, low=low, high=high)
        if value is None:
            raise ModelLoadError(f"{self.keys.path} does not say {self.keys.full_name(key)}")
        return value

    def by_layer(self, key: str, layers: int) -> list[int]:
        """A count for each layer: an array, or one number for all."""
        value = self.keys.raw(key)
        if not isinstance(value, GGUFArray):
            return [self.needed(key, low=0)] * layers
        counts = list(value.values or ())
        if len(counts) != layers or any(type(count) is not int or count < 0 for count in counts):
            raise self.keys.refusal(key, f"has not one count for each of {layers} layers")
        return counts

    def one_of(self, key: str, counts: list[int]) -> int:
        """The only count above 0 of layers."""
        different = {count for count in counts if count}
        if len(different) != 1:
            raise self.keys.refusal(key, "differs between layers: not supported")
        return different.pop()

    def has(self, tensor: str) -> bool:
        """True if the file has this tensor."""
        return tensor in self.shapes

    def layer_has(self, layer: int, tensor: str) -> bool:
        """True if a layer has this tensor."""
        return self.has(f"blk.{layer}.{tensor}")


def _common(header: _Header) -> Settings:
    """The settings that headers of all architectures have."""
    keys, layers = header.keys, header.needed(".block_count", high=_MAX_LAYERS)
    speculating = keys.count(".nextn_predict_layers", low=0) or 0
    layers -= speculating
    if layers < 1:
        raise keys.refusal(".nextn_predict_layers", "leaves no layers")
    heads, hidden = header.needed(".attention.head_count"), header.needed(".embedding_length")
    groups = header.by_layer(".attention.head_count_kv", layers + speculating)
    size = keys.count(".attention.key_length", high=hidden * heads) or hidden // heads
    keys.expect(".attention.value_length", (size,), f"is not the size of keys, {size}")
    epsilon = keys.number(".attention.layer_norm_rms_epsilon", maximum=1.0)
    if epsilon is None:
        raise ModelLoadError(f"{keys.path} does not say the epsilon of its norms: get it again")
    vocabulary = header.shapes["token_embd.weight"][0]
    keys.expect(".vocab_size", (vocabulary,), "is not the number of rows of token_embd")
    keys.expect(".rope.scaling.finetuned", (True, False), "is neither true nor false")
    for key, values, why in _EXPECTED:
        keys.expect(key, values, why)
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": header.one_of(".attention.head_count_kv", groups[:layers]),
        "hidden_size": hidden,
        "head_dim": size,
        "rms_norm_eps": epsilon,
        "max_position_embeddings": header.needed(".context_length"),
        "vocab_size": vocabulary,
        "tie_word_embeddings": not header.has("output.weight"),
    }


def _attends(header: _Header, settings: Settings) -> list[bool]:
    """True for each layer with attention: it has queries."""
    layers = range(settings["num_hidden_layers"])
    return [header.layer_has(layer, "attn_q.weight") for layer in layers]


def _layer_types(attends: list[bool], other: str) -> list[str]:
    return ["full_attention" if attending else other for attending in attends]


def _rope(header: _Header, settings: Settings, *, rotated: int | None = None) -> Settings:
    """Rotary settings of heads, which rotate wholly unless the first `rotated` numbers do."""
    keys, size = header.keys, settings["head_dim"]
    count = keys.count(".rope.dimension_count", high=size) or rotated or size
    parameters = rope_parameters(keys, count, settings["max_position_embeddings"])
    if count != size:
        # The factor times the size is cut to a whole number, which must be `count`.
        parameters["partial_rotary_factor"] = (count + 0.5) / size
    return {"rope_parameters": parameters}


def _no_rope(header: _Header) -> None:
    """Read the keys of rotary positions, which have no effect."""
    for key in (".rope.dimension_count", ".rope.freq_base"):
        header.keys.raw(key)


def _lfm2(header: _Header) -> Settings:
    settings = _common(header)
    epsilon = settings.pop("rms_norm_eps")
    return settings | {
        **_rope(header, settings),
        "norm_eps": epsilon,
        "block_auto_adjust_ff_dim": False,
        "intermediate_size": header.needed(".feed_forward_length"),
        "conv_L_cache": header.needed(".shortconv.l_cache", low=2),
        "layer_types": _layer_types(_attends(header, settings), "conv"),
    }


def _lfm2moe(header: _Header) -> Settings:
    settings = _lfm2(header)
    del settings["block_auto_adjust_ff_dim"]
    header.keys.expect(".expert_gating_func", (2,), "is not a sigmoid")
    return settings | {
        "num_experts": header.needed(".expert_count"),
        "num_experts_per_tok": header.needed(".expert_used_count"),
        "moe_intermediate_size": header.needed(".expert_feed_forward_length"),
        "num_dense_layers": header.keys.count(".leading_dense_block_count", low=0) or 0,
    }


def _delta(header: _Header) -> Settings:
    """Qwen's attention and gated delta rule."""
    settings, keys = _common(header), header.keys
    keys.raw(".full_attention_interval")
    keys.raw(".rope.dimension_sections")  # of images: all are equal for text
    heads = header.needed(".ssm.time_step_rank")
    inner = header.needed(".ssm.inner_size")
    if inner % heads:
        raise keys.refusal(".ssm.inner_size", f"is not a multiple of {heads} heads")
    return settings | {
        **_rope(header, settings, rotated=settings["head_dim"] // 4),
        "linear_num_key_heads": header.needed(".ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": header.needed(".ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": header.needed(".ssm.conv_kernel", low=2),
        "layer_types": _layer_types(_attends(header, settings), "linear_attention"),
    }


def _qwen35(header: _Header) -> Settings:
    return _delta(header) | {"intermediate_size": header.needed(".feed_forward_length")}


def _qwen_experts(header: _Header) -> Settings:
    settings, keys = _delta(header), header.keys
    keys.raw(".feed_forward_length")  # of dense layers, which are not there
    keys.expect(".expert_gating_func", (0, 1), "is not a softmax")
    keys.expect(".expert_weights_norm", (True,), "leaves factors as they are: not supported")
    size = header.needed(".expert_feed_forward_length")
    return settings | {
        "num_experts": header.needed(".expert_count"),
        "num_experts_per_tok": header.needed(".expert_used_count"),
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": keys.count(".expert_shared_feed_forward_length") or size,
    }


def _mamba2(header: _Header) -> Settings:
    """The sizes of Mamba-2, as keys that begin with `mamba_`."""
    heads, inner = header.needed(".ssm.time_step_rank"), header.needed(".ssm.inner_size")
    if inner % heads:
        raise header.keys.refusal(".ssm.inner_size", f"is not a multiple of {heads} heads")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": header.needed(".ssm.group_count"),
        "mamba_d_state": header.needed(".ssm.state_size"),
        "mamba_d_conv": header.needed(".ssm.conv_kernel", low=2),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in header.shapes),
    }


def _granitehybrid(header: _Header) -> Settings:
    settings, keys = _common(header), header.keys
    _no_rope(header)
    for key, name in _GRANITE_SCALES.items():
        default = settings["head_dim"] ** -0.5 if key == ".attention.scale" else 1.0
        settings[name] = keys.number(key) or default
    inner, hidden = header.needed(".ssm.inner_size"), settings["hidden_size"]
    if inner % hidden:
        raise keys.refusal(".ssm.inner_size", f"is not a multiple of embedding_length={hidden}")
    size = header.needed(".feed_forward_length")
    return settings | {
        **_mamba2(header),
        "mamba_expand": inner // hidden,
        "intermediate_size": keys.count(".expert_feed_forward_length") or size,
        "shared_intermediate_size": keys.count(".expert_shared_feed_forward_length") or size,
        "num_local_experts": keys.count(".expert_count", low=0) or 0,
        "num_experts_per_tok": keys.count(".expert_used_count", low=0) or 0,
        "layer_types": _layer_types(_attends(header, settings), "linear_attention"),
    }


def _nemotron_h(header: _Header) -> Settings:
    settings, keys = _common(header), header.keys
    _no_rope(header)
    layers = range(settings.pop("num_hidden_layers"))
    mamba = _mamba2(header)
    count = header.needed(".block_count")
    widths = header.by_layer(".feed_forward_length", count)[: len(layers)]
    settings |= {
        "layer_norm_epsilon": settings.pop("rms_norm_eps"),
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "use_bias": any(name.endswith("ssm_in.bias") for name in header.shapes),
        "layers_block_type": [_nemotron_layer(header, layer) for layer in layers],
    }
    if "moe" not in settings["layers_block_type"]:
        if any(widths):
            settings["intermediate_size"] = header.one_of(".feed_forward_length", widths)
        return settings
    keys.expect(".expert_shared_count", (1,), "is not one shared expert")
    keys.expect(".expert_group_used_count", (0, 1), "chooses groups of experts: not supported")
    keys.expect(".expert_gating_func", (0, 2), "is not a sigmoid")
    norm = keys.flag(".expert_weights_norm")
    return settings | {
        "n_routed_experts": header.needed(".expert_count"),
        "num_experts_per_tok": header.needed(".expert_used_count"),
        "moe_intermediate_size": header.needed(".expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": header.needed(".expert_shared_feed_forward_length"),
        "moe_latent_size": keys.count(".moe_latent_size"),
        "routed_scaling_factor": keys.number(".expert_weights_scale") or 1.0,
        "norm_topk_prob": True if norm is None else norm,
    }


def _nemotron_layer(header: _Header, layer: int) -> str:
    kinds = {
        "ssm_in.weight": "linear_attention",
        "attn_q.weight": "full_attention",
        "ffn_gate_inp.weight": "moe",
        "ffn_up.weight": "mlp",
    }
    found = [kind for tensor, kind in kinds.items() if header.layer_has(layer, tensor)]
    if len(found) != 1:
        raise ModelLoadError(f"{header.keys.path}: layer {layer} has {len(found)} parts, not one")
    return found[0]


def _falcon_h1(header: _Header) -> Settings:
    settings = _common(header)
    return settings | {
        **_rope(header, settings),
        **_mamba2(header),
        "mamba_d_ssm": header.needed(".ssm.inner_size"),
        "mamba_rms_norm": any(name.endswith("ssm_norm.weight") for name in header.shapes),
        "mamba_norm_before_gate": False,
        "intermediate_size": header.needed(".feed_forward_length"),
    }


def _jamba(header: _Header) -> Settings:
    settings, keys = _common(header), header.keys
    _no_rope(header)
    inner, hidden = header.needed(".ssm.inner_size"), settings["hidden_size"]
    if inner % hidden:
        raise keys.refusal(".ssm.inner_size", f"is not a multiple of embedding_length={hidden}")
    layers = range(settings["num_hidden_layers"])
    sparse = [header.layer_has(layer, "ffn_gate_inp.weight") for layer in layers]
    attending = _periodic(header, "attn", _attends(header, settings))
    has_experts = any(sparse)
    experts = _periodic(header, "expert", sparse) if has_experts else {}
    count = keys.count(".expert_count", low=0) or 0
    used = keys.count(".expert_used_count", low=0) or 1
    return settings | {
        **attending,
        **experts,
        "num_experts": count if has_experts else 1,
        "num_experts_per_tok": used,
        "intermediate_size": header.needed(".feed_forward_length"),
        "mamba_expand": inner // hidden,
        "mamba_d_state": header.needed(".ssm.state_size"),
        "mamba_d_conv": header.needed(".ssm.conv_kernel", low=2),
        "mamba_dt_rank": header.needed(".ssm.time_step_rank"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in header.shapes),
    }


def _periodic(header: _Header, kind: str, flags: list[bool]) -> Settings:
    """The period and the offset of layers of a kind, which must be regular."""
    numbers = [layer for layer, flag in enumerate(flags) if flag]
    first = numbers[0] if numbers else len(flags)
    period = numbers[1] - first if len(numbers) > 1 else len(flags) + 1
    if first >= period or flags != [layer % period == first for layer in range(len(flags))]:
        raise ModelLoadError(
            f"{header.keys.path}: layers with {kind} tensors are {numbers}: they are not regular, "
            "take the model as a folder of safetensors files"
        )
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": first}


_MAX_LAYERS = 4096
_EXPECTED: tuple[tuple[str, tuple[object, ...], str], ...] = (
    (".attention.causal", (True,), "makes a model that embeds texts"),
    (".attention.sliding_window", (0,), "is a window, which is not supported"),
    (".embedding_length_out", (), "makes a model that embeds texts"),
    (".expert_group_count", (0, 1), "chooses experts by groups, which is not supported"),
)
_GRANITE_SCALES = {
    ".residual_scale": "residual_multiplier",
    ".embedding_scale": "embedding_multiplier",
    ".logit_scale": "logits_scaling",
    ".attention.scale": "attention_multiplier",
}


@dataclass(frozen=True, slots=True)
class RecurrentArchitecture:
    """The family of an architecture, and the reader of its header."""

    family: str
    settings: Callable[[_Header], Settings] = field(repr=False)


RECURRENT_ARCHITECTURES: Mapping[str, RecurrentArchitecture] = {
    "lfm2": RecurrentArchitecture("lfm2", _lfm2),
    "lfm2moe": RecurrentArchitecture("lfm2_moe", _lfm2moe),
    "qwen3next": RecurrentArchitecture("qwen3_next", _qwen_experts),
    "qwen35": RecurrentArchitecture("qwen3_5_text", _qwen35),
    "qwen35moe": RecurrentArchitecture("qwen3_5_moe_text", _qwen_experts),
    "granitehybrid": RecurrentArchitecture("granitemoehybrid", _granitehybrid),
    "nemotron_h": RecurrentArchitecture("nemotron_h", _nemotron_h),
    "nemotron_h_moe": RecurrentArchitecture("nemotron_h", _nemotron_h),
    "falcon-h1": RecurrentArchitecture("falcon_h1", _falcon_h1),
    "jamba": RecurrentArchitecture("jamba", _jamba),
}
"""By `general.architecture`: architectures whose layers keep states."""


def recurrent_settings(keys: HeaderKeys) -> Settings | None:
    """The settings of a model that keeps states; None: of another architecture.

    Raises `ModelLoadError` as `gguf_settings`.
    """
    row = RECURRENT_ARCHITECTURES.get(str(keys.header.architecture))
    if row is None:
        return None
    keys.raw("general.architecture")
    shapes = {tensor.name: tensor.shape for tensor in keys.header.tensors}
    if "token_embd.weight" not in shapes:
        raise ModelLoadError(f"{keys.path} lacks the weights of token_embd.weight: get it again")
    return {"model_type": row.family, **row.settings(_Header(keys, shapes))}
