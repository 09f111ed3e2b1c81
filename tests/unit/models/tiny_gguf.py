"""Small GGUF files."""

import numpy as np

VOCAB = 8
EXPERT_SIZE = 3
"""Neurons of an expert for each element of a hidden state, but for Mixtral's."""
BLOCKS = {"Q4_K": (144, (0, 2), 3e-4), "Q5_K": (176, (0, 2), 3e-4), "Q6_K": (210, (208,), 5e-5)}
"""Bytes of a block of 256 numbers, where its scales are, and a scale of usual weights."""
NORMS = {
    "llama": ("attn_norm", "ffn_norm"),
    "qwen2": ("attn_norm", "ffn_norm"),
    "qwen2moe": ("attn_norm", "ffn_norm"),
    "qwen3moe": ("attn_norm", "ffn_norm"),
    "gpt-oss": ("attn_norm", "post_attention_norm"),
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
    experts=0,
    values=None,
    sampling=None,
):
    """A model with a byte-pair vocabulary of eight tokens; returns its tensors by name.

    With `experts`, two of so many are chosen; a `llama` with experts is Mixtral. `kind` is ggml's
    type of the matrices, `kinds` that of some by their names without the layer; vectors are F32.
    `values` are more of the header, `sampling` are defaults for requests. `template` is that of
    chats, or several with names. Without a head, the embedding is it.
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
    if architecture in ("gemma3", "qwen3moe", "gpt-oss"):
        writer.add_key_length(hidden // heads)
        writer.add_value_length(hidden // heads)
    if architecture in ("gemma3", "gpt-oss"):
        writer.add_sliding_window(16)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
        if architecture != "llama":
            writer.add_expert_feed_forward_length(EXPERT_SIZE * hidden)
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(hidden)
    for key, value in (values or {}).items():
        kinds_of_values = {str: "string", int: "uint32", float: "float32"}
        getattr(writer, f"add_{kinds_of_values[type(value)]}")(f"{architecture}.{key}", value)
    for key, value in (sampling or {}).items():
        add_value(writer, f"general.sampling.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|im_start|>", "<|im_end|>", "a", "b", "c", "ab", "bc", "abc"])
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "b c", "a bc"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if template is not None:
        writer.add_chat_template(template)
    tensors = {}
    for name, shape in shapes(architecture, hidden, layers, has_head, experts).items():
        if name in left_out:
            continue
        chosen = (kinds or {}).get(name.split(".", 2)[-1] if name[:4] == "blk." else name, kind)
        is_float = len(shape) == 1 or name.endswith(".bias") or "_inp." in name
        quantization = GGMLQuantizationType["F32" if is_float else chosen]
        values = (scale * rng.standard_normal(shape)).astype(np.float32)
        data = quantized(rng, values, quantization)
        writer.add_tensor(name, data, raw_dtype=quantization)
        tensors[name] = values if chosen not in BLOCKS else dequantize(data, quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def add_value(writer, key, value):
    """Add a key with the type that the value has in Python."""
    from gguf import GGUFValueType

    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    if type(value) is int and not 0 <= value < 2**32:
        kinds[int] = "INT64" if value < 0 else "UINT64"
    writer.add_key_value(key, value, GGUFValueType[kinds[type(value)]])


def shapes(architecture, hidden, layers, has_head, experts):
    """The shapes of the tensors."""
    layer = dict.fromkeys(NORMS[architecture], (hidden,))
    layer |= {name: (hidden, hidden) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    layer |= {"ffn_gate": (2 * hidden, hidden), "ffn_up": (2 * hidden, hidden)}
    layer |= {"ffn_down": (hidden, 2 * hidden)}
    if architecture in ("gemma3", "qwen3moe"):
        layer |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), (hidden // 2,))
    if experts:
        size = EXPERT_SIZE * hidden if architecture != "llama" else 2 * hidden
        del layer["ffn_gate"], layer["ffn_up"], layer["ffn_down"]
        layer |= dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), (experts, size, hidden))
        layer |= {"ffn_down_exps": (experts, hidden, size), "ffn_gate_inp": (experts, hidden)}
    if architecture == "qwen2moe":
        layer |= dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp"), (hidden, hidden))
        layer |= {"ffn_down_shexp": (hidden, hidden), "ffn_gate_inp_shexp": (hidden,)}
    if architecture == "gpt-oss":
        layer["attn_sinks"] = (2,)
    shapes = {"token_embd.weight": (VOCAB, hidden), "output_norm.weight": (hidden,)}
    if has_head:
        shapes["output.weight"] = (VOCAB, hidden)
    for number in range(layers):
        shapes |= {f"blk.{number}.{name}.weight": shape for name, shape in layer.items()}
        if architecture in ("qwen2", "qwen2moe", "gpt-oss"):
            shapes |= {f"blk.{number}.attn_{name}.bias": (hidden,) for name in "qkv"}
        if architecture == "gpt-oss":
            shapes |= {f"blk.{number}.attn_output.bias": (hidden,)}
            shapes |= {
                f"blk.{number}.{name}.bias": layer[name][:-1] for name in layer if "exps" in name
            }
            shapes |= {f"blk.{number}.ffn_gate_inp.bias": (experts,)}
    return shapes


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
    return blocks.reshape(*values.shape[:-1], -1)
