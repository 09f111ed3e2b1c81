"""Small random models in folders as released ones are, written without torch.

The names and shapes are those that the decoder of the family reads.
"""

import json
import zlib
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pyengine.models.loader import dummy_weight_shapes
from pyengine.utils.dtypes import Rows, rounded

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""A configuration of three layers."""
_WINDOW = {"sliding_window": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 24},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
    },
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, **_WINDOW},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **_WINDOW},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "first_k_dense_replace": 3,
    },
}
"""Settings of some families, beside `BASE`."""
TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""A configuration whose weights take a few kilobytes."""
_FORMATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F64": np.float64}


def save_tiny(folder: Path, **settings: Any) -> Path:
    """Save a Llama of a few kilobytes; `settings` are of its configuration."""
    return save_model(folder, "llama", **{**TINY, **settings})


def save_random(folder: Path, family: str, **settings: Any) -> Path:
    """Save a small model whose greedy tokens vary; `settings` are of its configuration."""
    return save_model(folder, family, **{**BASE, **settings})


def save_model(folder: Path, family: str, *, dtype: str = "float32", **settings: Any) -> Path:
    """Save a configuration with normally distributed weights.

    Those of norms and the scalars of layers are around 1. Equal names and shapes get equal numbers
    in every process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": family, "dtype": dtype, **settings}
    write_json(folder / "config.json", config)
    ends = {name: settings[name] for name in settings if name.endswith("_token_id")}
    write_json(folder / "generation_config.json", ends)
    scale = settings.get("initializer_range", 0.02)
    # Gemma's norms multiply by 1 + weight
    norm = 0.0 if family in ("gemma", "gemma2", "gemma3_text") else 1.0
    shapes = dummy_weight_shapes(folder)
    means = {name: norm for name, shape in shapes.items() if _is_norm(name, shape)}
    # Around 0 they would drop the residual: each layer would multiply errors of rounding
    means |= {name: 1.0 for name in shapes if name.endswith("layer_scalar")}
    weights = {
        name: _drawn(name, shape, means.get(name, 0.0), scale) for name, shape in shapes.items()
    }
    save_weights(folder / "model.safetensors", weights, dtype)
    return folder


def _is_norm(name: str, shape: tuple[int, ...]) -> bool:
    return "norm" in name and len(shape) == 1


def _drawn(name: str, shape: tuple[int, ...], mean: float, scale: float) -> Rows:
    random = np.random.default_rng(zlib.crc32(name.encode()))
    numbers = random.standard_normal(shape, dtype=np.float32)
    # Sinks of the others' size would hardly count
    return numbers if name.endswith("sinks") else np.float32(mean) + numbers * np.float32(scale)


def save_weights(path: Path, weights: dict[str, Rows], dtype: str | None = None) -> None:
    """Write a safetensors file: float32 arrays rounded to `dtype`, or arrays as they are.

    As they are, uint16 stands for bfloat16.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, end = [], 0
    for name, array in weights.items():
        stored = array if dtype is None else _rounded_to(array, dtype)
        kind = next(kind for kind, known in _STORED.items() if stored.dtype == known)
        parts.append(np.ascontiguousarray(stored).tobytes())
        start, end = end, end + len(parts[-1])
        header[name] = {"dtype": kind, "shape": stored.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as safetensors does: the numbers are aligned
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def _rounded_to(floats: Rows, dtype: str) -> Rows:
    if dtype == "bfloat16":
        return rounded(floats, np.uint16)
    return floats.astype(_STORED[_FORMATS[dtype]])


def read_weights(folder: Path) -> dict[str, Rows]:
    """The weights of a folder by name; bfloat16 as its bits."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                kind, first = _STORED[entry["dtype"]], start + entry["data_offsets"][0]
                array = np.frombuffer(data, kind, prod(entry["shape"]), first)
                found[name] = array.reshape(entry["shape"]).copy()
    return found


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write an object as models' files are."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
