"""Linear layers of checkpoints with 8-bit weights: floats (FP8), and integers (W8A8).

Layouts: https://github.com/vllm-project/compressed-tensors (`float_quantized`, `int_quantized`),
and that of DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 3.3), whose blocks of 128 by 128
weights have a scale.

Activations stay floats for FP8. For integers they are rounded to 8 bits for each 32 inputs, where
the checkpoint asks for a scale for the whole row: the product is nearer to that of floats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pyengine.models.integer_linear import GROUP
from pyengine.models.packed_layout import PackedLayout, Shape

_STRATEGIES = ("tensor", "channel", "block")
_MULTIPLE = 4  # of inputs: the kernel has this many weights in a word


@dataclass(frozen=True)
class Float8Layout(PackedLayout):
    """E4M3 weights; `block` are the outputs and inputs of a scale, None: one or all outputs."""

    block: tuple[int, int] | None
    key_name: str
    name: str

    dtypes: ClassVar[Mapping[str, str]] = {"weight": "F8_E4M3"}

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[Shape, ...]]:
        """See `PackedLayout.shapes`."""
        scales: tuple[Shape, ...] = ((), (1,), (1, 1), (outputs,), (outputs, 1))
        if self.block is not None:
            scales = ((-(-outputs // self.block[0]), -(-inputs // self.block[1])),)
        return {"weight": ((outputs, inputs),), self.key_name: scales}

    def unfit(self, outputs: int, inputs: int) -> str:
        """See `PackedLayout.unfit`."""
        return f"not a multiple of {_MULTIPLE}" if inputs % _MULTIPLE else ""


@dataclass(frozen=True)
class Int8Layout(PackedLayout):
    """8-bit integers, with a scale for each output or one for all."""

    name, key_name = "compressed-tensors (W8A8)", "weight_scale"
    dtypes: ClassVar[Mapping[str, str]] = {"weight": "I8"}

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[Shape, ...]]:
        """See `PackedLayout.shapes`."""
        scales = ((), (1,), (1, 1), (outputs,), (outputs, 1))
        return {"weight": ((outputs, inputs),), "weight_scale": scales}

    def unfit(self, outputs: int, inputs: int) -> str:
        """See `PackedLayout.unfit`."""
        return f"not a multiple of {GROUP}" if inputs % GROUP else ""


def int8_layout(group: Mapping[str, Any]) -> PackedLayout | str:
    """As `packed_layout`, for a group of compressed-tensors of the format `int-quantized`."""
    weights, rows = group.get("weights") or {}, group.get("input_activations") or {}
    bits, number, strategy = (weights.get(name) for name in ("num_bits", "type", "strategy"))
    if (bits, number) != (8, "int") or strategy not in ("tensor", "channel"):
        return f"compressed-tensors with num_bits={bits}, type={number!r}, strategy={strategy!r}"
    if not weights.get("symmetric", True):
        return "compressed-tensors with 8-bit weights that have zero points"
    if rows and (rows.get("num_bits"), rows.get("type")) != (8, "int"):
        return f"compressed-tensors with activations of num_bits={rows.get('num_bits')}"
    return Int8Layout()


def float8_layout(group: Mapping[str, Any]) -> PackedLayout | str:
    """As `packed_layout`, for a group of compressed-tensors of the format `float-quantized`."""
    weights = group.get("weights") or {}
    bits, number, strategy = (weights.get(name) for name in ("num_bits", "type", "strategy"))
    if (bits, number) != (8, "float") or strategy not in _STRATEGIES:
        return f"compressed-tensors with num_bits={bits}, type={number!r}, strategy={strategy!r}"
    block = weights.get("block_structure") if strategy == "block" else None
    return _float8(block, "weight_scale", "compressed-tensors (FP8)", strategy == "block")


def fp8_layout(settings: Mapping[str, Any]) -> PackedLayout | str:
    """As `packed_layout`, for the method `fp8`."""
    if (kind := settings.get("fmt", "e4m3")) != "e4m3":
        return f"FP8 with fmt={kind!r}"
    block = settings.get("weight_block_size")
    name = "weight_scale" if block is None else "weight_scale_inv"
    return _float8(block, name, "FP8", block is not None)


def _float8(block: Any, key_name: str, name: str, has_blocks: bool) -> PackedLayout | str:
    if not has_blocks:
        return Float8Layout(None, key_name, name)
    sizes = block if isinstance(block, list | tuple) and len(block) == 2 else (0, 0)
    if not all(type(size) is int and size > 0 for size in sizes) or sizes[1] % _MULTIPLE:
        return f"{name} with blocks of {block}"
    return Float8Layout((sizes[0], sizes[1]), key_name, name)
