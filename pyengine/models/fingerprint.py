"""The properties that determine the KV of a model: its configuration and its weights."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_OF_THE_FOLDER = ("_name_or_path", "transformers_version")
"""Entries of a configuration that say where a model came from."""


def model_properties(model: Any) -> list[tuple[str, bytes]]:
    """The configuration of a transformers model, and a SHA-256 digest of each of its weights.

    Names and values, in order. Reads all weights once: 0.5 to 2 GB/s on each core.
    """
    config = model.config.to_dict()
    for name in _OF_THE_FOLDER:
        config.pop(name, None)
    weights = sorted(model.state_dict().items())
    with ThreadPoolExecutor() as threads:
        digests = list(threads.map(_digest, [tensor for _, tensor in weights]))
    return [
        ("class", type(model).__name__.encode()),
        ("config", json.dumps(config, sort_keys=True, default=str).encode()),
        *((name, digest) for (name, _), digest in zip(weights, digests, strict=True)),
    ]


def _digest(tensor: torch.Tensor) -> bytes:
    """The digest of a tensor: its type, its shape and its elements."""
    about = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    content: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    digest = hashlib.sha256(about)
    digest.update(memoryview(content))  # the interpreter's lock is released meanwhile
    return digest.digest()
