"""Checkpoints with quantised weights that the kernels multiply by as they are.

`models/packed_groups.py` has the layouts of 4 bits, `models/packed_bytes.py` those of 8.
"""

from collections.abc import Mapping
from typing import Any

from pyengine.models.packed_bytes import float8_layout, fp8_layout, int8_layout
from pyengine.models.packed_groups import awq_layout, gptq_layout, w4a16_layout
from pyengine.models.packed_layout import PackedLayout

_FORMATS = {
    "pack-quantized": w4a16_layout,
    "int-quantized": int8_layout,
    "float-quantized": float8_layout,
}
"""Formats of compressed-tensors."""


def packed_layout(settings: Mapping[str, Any]) -> PackedLayout | str:
    """The layout that a `quantization_config` names, or why the kernels do not multiply by it."""
    method = settings.get("quant_method")
    known = {"awq": awq_layout, "gptq": gptq_layout, "fp8": fp8_layout}
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
    return known[method](settings) if method in known else f"quant_method={method!r}"


def _compressed_tensors(settings: Mapping[str, Any]) -> PackedLayout | str:
    groups, kind = list((settings.get("config_groups") or {}).values()), settings.get("format")
    if kind not in _FORMATS or len(groups) != 1:
        return f"compressed-tensors with format={kind!r} and {len(groups)} config_groups"
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "compressed-tensors with a sparsity_config"
    return _FORMATS[kind](groups[0])
