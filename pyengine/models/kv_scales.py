"""The scales of an 8-bit KV cache that a checkpoint has, one for the keys and one for the values.

Keys and values are stored divided by them. Names: compressed-tensors, ModelOpt and AutoFP8.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path

from pyengine.errors import ModelLoadError
from pyengine.models.checkpoint_files import WeightHeaders
from pyengine.models.decoder.checkpoint import Tensors, stored_tensor
from pyengine.models.decoder.cpu_numbers import as_floats

Scales = Mapping[int, tuple[float, float]]
"""Of keys and of values, by layer."""

_NAME = re.compile(
    r"\.layers\.(\d+)\.self_attn\.(?:attn\.)?"
    r"(?:(?P<kind>[kv])_scale|(?P<proj>[kv])_proj\.(?:[kv]_scale|output_scale)|(?P<both>kv_scale))$"
)


def read_kv_scales(folder: Path, headers: WeightHeaders) -> Scales:
    """The scales in the files of `folder`, whose headers these are; a scale not given is 1.

    Raises `ModelLoadError` for one that is not a positive number.
    """
    scales: dict[int, dict[str, float]] = {}
    matches = {name: match for name in headers.tensors if (match := _NAME.search(name))}
    stored = {name: stored_tensor(name, headers.tensors[name]) for name in matches}
    tensors = Tensors(stored, str(folder))
    for name, match in matches.items():
        tensor = tensors.take(name, stored[name].shape)
        numbers = as_floats(tensor.read(), tensor.dtype)
        scale = _positive(numbers.reshape(-1).tolist(), name, folder)
        layer = scales.setdefault(int(match[1]), {})
        for kind in match["kind"] or match["proj"] or "kv":
            layer[kind] = scale
    return {layer: (own.get("k", 1.0), own.get("v", 1.0)) for layer, own in scales.items()}


def is_kv_scale(name: str) -> bool:
    """True if a tensor of this name is such a scale."""
    return _NAME.search(name) is not None


def _positive(numbers: list[float], name: str, folder: Path) -> float:
    if len(numbers) != 1 or not (math.isfinite(numbers[0]) and numbers[0] > 0):
        raise ModelLoadError(
            f"{name} in {folder} is the scale of a KV cache, and {numbers[:3]} is not a positive "
            "number: the file is damaged, or has a scale per head, which is not supported"
        )
    return float(numbers[0])
