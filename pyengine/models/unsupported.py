"""Missing features that layers are refused for: one line each, for messages and for the docs."""

from collections.abc import Collection

_INDEXED = "attention over tokens that an indexer chooses"
_COMPRESSED = "attention over compressed keys"
_CONVOLVED = "attention over convolved keys and values"
_SHARED = "attention layers that share their weights"
_ALONE = "models without attention layers"

_BY_FAMILY = {
    "bailing_hybrid": "delta attention with this forget gate, and no gated latent attention",
    "bamba": "decoder of this family, but its layers: Mamba-2 and attention",
    "falcon_mamba": f"Mamba whose norms have no weights, and no {_ALONE}",
    "lara_mini": "decoder of this family, but its layers: gated delta nets and attention",
    "lfm3": "attention with a gate per head",
    "mamba": f"Mamba without norms, and no {_ALONE}",
    "mamba2": _ALONE,
    "minimax": "lightning attention",
    "recurrent_gemma": "gated linear recurrent units (RG-LRU)",
    "rwkv": f"WKV recurrence, and no {_ALONE}",
    "xlstm": f"mLSTM recurrence, and no {_ALONE}",
    "zamba": f"Mamba with heads, and no {_SHARED}",
    "zamba2": _SHARED,
    "zaya": "attention over convolved queries and keys",
    **dict.fromkeys(("inkling_text", "inkling2_text", "inkling2_loop_text"), _CONVOLVED),
}
"""By the `model_type` of the text part."""
_BY_LAYER_TYPE = {
    "indexed_attention": _INDEXED,
    "chunked_attention": "attention in chunks",
    **dict.fromkeys(("compressed_sparse_attention", "heavily_compressed_attention"), _COMPRESSED),
}
_OWN_ONLY = "such layers outside its own decoders"
"""For other families, and for settings that a decoder of pyengine leaves to transformers."""


def missing(family: str, layer_types: Collection[str] = ()) -> str:
    """The missing feature of a family with these types of layers, after "pyengine has no"."""
    lines = [_BY_LAYER_TYPE[kind] for kind in sorted(layer_types) if kind in _BY_LAYER_TYPE]
    return lines[0] if lines else _BY_FAMILY.get(family, _OWN_ONLY)
