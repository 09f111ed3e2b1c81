"""The names that tensors have in files, by the names that layers give them here.

Names of a layer's tensors, all of them linear layers or norms unless it says otherwise:

| here | what |
|---|---|
| `before_mixer`, `after_mixer`, `before_feed_forward`, `after_feed_forward` | norms |
| `qkv` or `query_key`, `out`; `query_norm`, `key_norm`; `sinks` (a vector) | attention |
| `query`, `out`; `query_norm` | attention that shares keys and values |
| `query`, or `query_down`, `query_latent`, `query_up` | latent attention |
| `kv_down`, `kv_latent`, `kv_up`; `out` | latent attention |
| `delta_qkvz`, `delta_ba`, `delta_out`, `delta_norm` | a gated delta rule |
| `delta_qkv`, `delta_b`, `delta_out`, `delta_norm` | delta attention |
| `decay_down`, `decay_up`, `gate_down`, `gate_up_heads` | its decay and gate |
| `mamba_in`, `mamba_out`, `mamba_norm`; `skip` (a vector) | Mamba-2; Mamba has no norm |
| `mamba_rows`, `time_up`, `time_norm`, `b_norm`, `c_norm` | Mamba, too |
| `conv_in`, `conv_out` | a gated convolution |
| `conv` (`[channels, size]`, perhaps with a bias); `rate`, `time_bias` (vectors) | of all these |
| `gate_up` or `up`; `down` | an MLP |
| `router`, `correction` (a vector), `expert_gate_up` or `expert_up`, `expert_down` | experts |
| `to_latent`, `from_latent` | of experts with latent rows |
| `shared_gate_up`, `shared_down`, `shared_gate` | the shared expert |
| `token_input_gate_up`, `token_input_out`, `after_token_input` | the input of each token |
| `scalar` (a vector) | of the layer |
| `mtp_embedding_norm`, `mtp_state_norm`, `mtp_projection`, `mtp_norm` | an MTP layer |
| `mtp_embedding`, `mtp_head` (tables) | of an MTP layer, where it has its own |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a layer's weight is in a file.

    - `parts`: tensors whose outputs follow each other. For experts, with `{}` in the name there is
      one for each of them, else one `[experts, outputs, inputs]` for all.
    - `weight`, `bias`: what follows the name of a part.
    - `is_transposed`: inputs come before outputs. `is_interleaved`: the outputs of two halves
      alternate, those of the first half first. `is_row`: a matrix of one output is a vector.
    - `kinds`: the number of kinds of outputs that each part has; by default one, or all if there is
      one part. `is_grouped`: the kinds of a part follow each other head by head.
    """

    parts: tuple[str, ...]
    weight: str = ".weight"
    bias: str = ".bias"
    is_transposed: bool = False
    is_interleaved: bool = False
    is_row: bool = False
    kinds: tuple[int, ...] = ()
    is_grouped: bool = False


def stored(*parts: str) -> tuple[Stored, ...]:
    """Linear layers, or a norm, under these names."""
    return (Stored(parts),)


def vector(name: str) -> tuple[Stored, ...]:
    """A vector that is a tensor of this name."""
    return (Stored((name,), weight=""),)


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a family's tensors. A tensor is where the first alternative is that exists.

    `layer` is what the names of a layer begin with, `{}` for its number; `base` what all names but
    the head's begin with, unless the file was saved without a head. `no_effect` are patterns
    of names that a file may have and that change nothing, with the reason.
    """

    outside: Mapping[str, tuple[Stored, ...]]
    inside: Mapping[str, tuple[Stored, ...]]
    layer: str = "model.layers.{}."
    base: str = "model."
    no_effect: Mapping[str, str] = field(default_factory=dict)

    def of(self, name: str, layer: int | None) -> tuple[str, tuple[Stored, ...]]:
        """The prefix of the names in the file, and the alternatives for the rest."""
        if layer is None:
            return "", self.outside[name]
        return self.layer.format(layer), self.inside[name]


OTHER_MTP_LAYERS = r"(model\.)?mtp\."
"""Prefixes of layers for multi-token prediction that pyengine does not run."""
NO_EFFECT = {
    OTHER_MTP_LAYERS + ".*": "layers for speculation, which pyengine does not run",
    r".*\.rotary_emb\.inv_freq": "frequencies are computed from config.json",
    r".*\.[kv]_scale": "scales of an 8-bit KV cache, read with it (`models/kv_scales.py`)",
}
"""Tensors that files of many families have."""

_OUTSIDE = {
    "embedding": stored("model.embed_tokens"),
    "norm": stored("model.norm"),
    "head": stored("lm_head"),
}
ATTENTION = {
    "qkv": stored("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": stored("self_attn.o_proj"),
    "query_norm": stored("self_attn.q_norm"),
    "key_norm": stored("self_attn.k_norm"),
    "sinks": vector("self_attn.sinks"),
}
LATENT_ATTENTION = {
    "query": stored("self_attn.q_proj"),
    "query_down": stored("self_attn.q_a_proj"),
    "query_latent": stored("self_attn.q_a_layernorm"),
    "query_up": stored("self_attn.q_b_proj"),
    "kv_down": stored("self_attn.kv_a_proj_with_mqa"),
    "kv_latent": stored("self_attn.kv_a_layernorm"),
    "kv_up": stored("self_attn.kv_b_proj"),
    "out": stored("self_attn.o_proj"),
}
GATED = {"gate_up": stored("mlp.gate_proj", "mlp.up_proj"), "down": stored("mlp.down_proj")}
MTP = {
    "mtp_embedding_norm": stored("enorm"),
    "mtp_state_norm": stored("hnorm"),
    "mtp_projection": stored("eh_proj"),
    "mtp_norm": stored("shared_head.norm"),
    "mtp_embedding": stored("embed_tokens"),
    "mtp_head": stored("shared_head.head"),
}
"""DeepSeek-V3's names in a layer for multi-token prediction, beside those of a decoder layer."""
PRE_NORM = {
    "before_mixer": stored("input_layernorm"),
    "before_feed_forward": stored("post_attention_layernorm"),
}


def names(*inside: Mapping[str, tuple[Stored, ...]], **more: tuple[Stored, ...]) -> Names:
    """Names like Llama's outside of layers, and these in them; later ones replace earlier ones."""
    merged: dict[str, tuple[Stored, ...]] = {}
    for mapping in (*inside, more):
        merged.update(mapping)
    return Names(_OUTSIDE, merged, no_effect=NO_EFFECT)


LLAMA = names(ATTENTION, GATED, PRE_NORM)
