"""GGUF files with a vocabulary, and one tensor."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write_vocabulary(path: Path, values: dict[str, Any], *, architecture: str = "llama") -> Path:
    """A file with the keys of `values`, which begin with `tokenizer.` unless they have a dot.

    None leaves a key out.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    for name, value in values.items():
        key = name if "." in name else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_values(tokenizer: Tokenizer, **types: int) -> dict[str, Any]:
    """The keys for a byte-level tokenizer; `types` are those of further tokens."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [CONTROL if text == "<|end|>" else NORMAL for text in tokens]
    return {
        "model": "gpt2",
        "tokens": [*tokens, *types],
        "token_type": [*kinds, *types.values()],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "eos_token_id": 0,
        "bos_token_id": 0,
    }


def words_values(tokenizer: Tokenizer, **types: int) -> dict[str, Any]:
    """The keys for words of SentencePiece."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    return {
        "model": "llama",
        "tokens": [*tokens, *types],
        "token_type": [*kinds, *types.values()],
        "scores": [*[0.0] * 259, *(-float(at) for at in range(len(tokens) + len(types) - 259))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
