"""Small GGUF files."""

import numpy as np

VOCAB = 8
BLOCKS = {"Q4_K": (144, (0, 2), 3e-4), "Q5_K": (176, (0, 2), 3e-4), "Q6_K": (210, (208,), 5e-5)}
"""Bytes of a block of 256 numbers, where its scales are, and a scale of usual weights."""
NORMS = {
    "llama": ("attn_norm", "ffn_norm"),
    "qwen2": ("attn_norm", "ffn_norm"),
    "gemma3": ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
}


def write_tiny_gguf(
    path,
    *,
    architecture="llama",
    hidden=32,
    layers=1,
    declared=None,
    left_out=(),
    kind="F32",
    kinds=None,
    scale=1.0,
    template=None,
    has_head=False,
):
    """A model with a byte-pair vocabulary of eight tokens; returns its tensors by name.

    `kind` is ggml's type of the matrices, `kinds` that of some by their names without the layer;
    vectors are F32. `template` is that of chats, or several with names. Without a head, the
    embedding is it.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, dequantize

    rng, heads = np.random.default_rng(0), 2
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(layers if declared is None else declared)
    writer.add_context_length(48)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(2 * hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    if architecture == "gemma3":
        writer.add_key_length(hidden // heads)
        writer.add_value_length(hidden // heads)
        writer.add_sliding_window(16)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|im_start|>", "<|im_end|>", "a", "b", "c", "ab", "bc", "abc"])
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "b c", "a bc"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if template is not None:
        writer.add_chat_template(template)
    tensors = {}
    for name, shape in shapes(architecture, hidden, layers, has_head).items():
        if name in left_out:
            continue
        asked = (kinds or {}).get(name.split(".", 2)[-1] if name[:4] == "blk." else name, kind)
        found = GGMLQuantizationType[asked if len(shape) > 1 else "F32"]
        values = (scale * rng.standard_normal(shape)).astype(np.float32)
        data = quantized(rng, values, found)
        writer.add_tensor(name, data, raw_dtype=found)
        tensors[name] = values if asked not in BLOCKS else dequantize(data, found)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def shapes(architecture, hidden, layers, has_head):
    """The shapes of the tensors."""
    layer = dict.fromkeys(NORMS[architecture], (hidden,))
    layer |= {name: (hidden, hidden) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    layer |= {"ffn_gate": (2 * hidden, hidden), "ffn_up": (2 * hidden, hidden)}
    layer |= {"ffn_down": (hidden, 2 * hidden)}
    if architecture == "gemma3":
        layer |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), (hidden // 2,))
    found = {"token_embd.weight": (VOCAB, hidden), "output_norm.weight": (hidden,)}
    if has_head:
        found["output.weight"] = (VOCAB, hidden)
    for number in range(layers):
        found |= {f"blk.{number}.{name}.weight": shape for name, shape in layer.items()}
        if architecture == "qwen2":
            found |= {f"blk.{number}.attn_{name}.bias": (hidden,) for name in "qkv"}
    return found


def quantized(rng, values, kind):
    """`values` in a type of ggml; random blocks where gguf has no way to quantise."""
    from gguf import quantize

    if kind.name not in BLOCKS:
        return quantize(values, kind)
    num_bytes, scales, size = BLOCKS[kind.name]
    blocks = rng.integers(0, 256, (values.size // 256, num_bytes), dtype=np.uint8)
    for at in scales:
        small = (size * (1 + rng.random(len(blocks)))).astype("<f2")
        blocks[:, at : at + 2] = small.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(len(values), -1)
