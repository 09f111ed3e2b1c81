"""Safetensors files with packed linear layers: AWQ, GPTQ, compressed-tensors, FP8.

The layouts are in `models/packed_groups.py` and `models/packed_bytes.py`. Here a layer's several
tensors are one matrix, which a kernel set takes as it is or as floats. Layers without such tensors
are floats.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from pyengine.cpu import PackedWeight, QuantizedWeight
from pyengine.errors import ModelLoadError
from pyengine.models.decoder.checkpoint import Array, Checkpoint, StoredTensor, float8_values
from pyengine.models.decoder.cpu_products import OrderedWeight
from pyengine.models.decoder.packing_keys import check_packing
from pyengine.models.decoder.settings import BeyondTableError
from pyengine.models.integer_linear import q8_0_of_rows
from pyengine.models.packed_bytes import (
    Float8Layout,
    Int8Layout,
    float8_layout,
    fp8_layout,
    int8_layout,
)
from pyengine.models.packed_groups import GroupLayout, awq_layout, gptq_layout, w4a16_layout
from pyengine.models.packed_layout import PackedLayout
from pyengine.utils.dtypes import widened
from pyengine.utils.validation import shown

_WEIGHT = ".weight"
_FORMATS = {
    "pack-quantized": w4a16_layout,
    "int-quantized": int8_layout,
    "float-quantized": float8_layout,
}
"""Formats of compressed-tensors."""


@dataclass(frozen=True, slots=True)
class PackedStored(StoredTensor):
    """A matrix `shape` whose tensors are `own`, by the layout's names for them."""

    reads_floats: ClassVar[bool] = True
    layout: PackedLayout | None = None
    own: tuple[tuple[str, StoredTensor], ...] = ()

    @property
    def packed_as(self) -> str | None:
        """See `StoredTensor.packed_as`; each matrix may have its own order of inputs."""
        if not self.is_whole:
            return None
        is_ordered = isinstance(self.layout, GroupLayout) and self.layout.has_order
        return f"{self.dtype} in the order of {self.name}" if is_ordered else self.dtype

    def read(self) -> Array:
        """The numbers that the codes stand for, in float32."""
        layout = self.layout
        if isinstance(layout, GroupLayout):
            groups = layout.groups(self._tensor)
            repeats = groups.codes.shape[1] // groups.scales.shape[1]
            zeros = 8 if groups.zeros is None else groups.zeros.repeat(repeats, axis=1)
            scales = groups.scales.repeat(repeats, axis=1)
            numbers: Array = (groups.codes.astype(np.float32) - zeros) * scales
            if groups.order is not None:
                numbers = numbers[:, np.argsort(groups.order)]
        else:
            codes, scales = self.codes_and_scales()
            is_float8 = isinstance(layout, Float8Layout)
            whole = float8_values("F8_E4M3")[codes] if is_float8 else codes.view(np.int8)
            inputs = codes.shape[1]
            numbers = whole * scales.repeat(self._block(inputs), axis=1)[:, :inputs]
        return self.cut(numbers)

    @staticmethod
    def laid_out(
        parts: "Sequence[PackedStored]", shape: tuple[int, int]
    ) -> PackedWeight | QuantizedWeight | OrderedWeight:
        """See `StoredTensor.laid_out`."""
        layout = parts[0].layout
        if isinstance(layout, GroupLayout):
            return _grouped(layout, parts)
        pairs = [part.codes_and_scales() for part in parts]
        codes, scales = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
        if isinstance(layout, Int8Layout):
            return q8_0_of_rows(codes.view(np.int8), scales)
        return PackedWeight.from_float8(codes, scales, parts[0]._block(shape[1]))

    def _block(self, inputs: int) -> int:
        """The inputs that have a scale in common."""
        layout = self.layout
        return layout.block[1] if isinstance(layout, Float8Layout) and layout.block else inputs

    @property
    def float8_block(self) -> tuple[int, int | None] | None:
        """The outputs and inputs that share a scale of 8-bit floats; inputs None: all of them.

        None: these are not 8-bit floats.
        """
        if not isinstance(self.layout, Float8Layout):
            return None
        return (1, None) if self.layout.block is None else self.layout.block

    def codes_and_scales(self) -> tuple[Array, Array]:
        """Codes `[outputs, inputs]` as bytes, and scales `[outputs, blocks]`."""
        assert isinstance(self.layout, Float8Layout | Int8Layout)
        codes = np.array(dict(self.own)["weight"].read()).view(np.uint8)
        scales: Array = widened(self._tensor(self.layout.key_name))
        outputs = len(codes)
        if isinstance(self.layout, Float8Layout) and self.layout.block is not None:
            scales = scales.repeat(self.layout.block[0], axis=0)[:outputs]
        else:
            scales = np.broadcast_to(scales.reshape(-1, 1), (outputs, 1))
        return codes, np.array(scales, order="C")

    def _tensor(self, name: str) -> Array:
        """One of its tensors; bfloat16 as its bits."""
        return np.array(dict(self.own)[name].read())


def _grouped(layout: GroupLayout, parts: Sequence[PackedStored]) -> QuantizedWeight | OrderedWeight:
    """A weight of 4-bit codes in groups; those of the kernel divide those of the layout.

    A weight with an order of inputs is of one part.
    """
    groups = [layout.groups(part._tensor) for part in parts]
    codes = np.concatenate([part.codes for part in groups])
    scales = np.concatenate([part.scales for part in groups])
    zeros = [part.zeros for part in groups if part.zeros is not None]
    size = layout.kernel_group_size(codes.shape[1])
    repeats = codes.shape[1] // size // scales.shape[1]
    points = np.concatenate(zeros).repeat(repeats, axis=1) if zeros else None
    packed = QuantizedWeight.from_groups(
        np.ascontiguousarray(codes[:, ::2] | (codes[:, 1::2] << 4)).data,
        np.ascontiguousarray(scales.repeat(repeats, axis=1)),
        None if points is None else np.ascontiguousarray(points).data,
        group_size=size,
    )
    order = groups[0].order
    return packed if order is None else OrderedWeight(packed, order)


def layout_of(settings: Any, path: Path) -> PackedLayout:
    """The layout that a `quantization_config` in the file at `path` names.

    Raises `ModelLoadError` as `check_packing`, and `BeyondTableError` for an unknown layout.
    """
    layout = packed_layout(check_packing(settings, str(path)))
    if isinstance(layout, str):
        raise BeyondTableError(
            f"{path} says quantization_config={shown(settings)}: pyengine does not read {layout}"
        )
    return layout


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


class PackedCheckpoint(Checkpoint):
    """The tensors of a folder with packed layers, as `settings`, a `quantization_config`, says.

    Raises `ModelLoadError` as `Checkpoint`, and for a layout that is not known.
    """

    no_effect = MappingProxyType(
        {
            r".*\.weight_shape": "config.json says it",
            r".*\.(input|output)_(scale|zero_point|global_scale)": "activations stay floats",
        }
    )

    has_plain_float8 = False

    def __init__(self, folder: Path, settings: Any) -> None:
        super().__init__(folder)
        self._layout = layout = layout_of(settings, folder / "config.json")
        if not any(name.endswith(f".{layout.key_name}") for name in self._tensors):
            raise ModelLoadError(
                f"{folder / 'config.json'} says quantization_config={shown(settings)}, and no "
                f"layer has {layout.key_name}: the two are not of the same model"
            )

    @property
    def _missing_scales(self) -> str:
        layout = self._layout
        return f"{layout.key_name}, by which {layout.name} multiplies them, is not beside them"

    @property
    def formats(self) -> str:
        """See `Checkpoint.formats`."""
        return self._layout.name

    def has(self, name: str) -> bool:
        """See `Tensors.has`; a packed layer has a weight."""
        return super().has(name) or self._key(name) is not None

    def take(self, name: str, *shapes: tuple[int, ...]) -> StoredTensor:
        """See `Tensors.take`; of a packed layer all tensors are taken."""
        if self._key(name) is None:
            return super().take(name, *shapes)
        layer, [shape] = name.removesuffix(_WEIGHT), shapes
        outputs, inputs = shape
        if why := self._layout.unfit(outputs, inputs):
            raise ModelLoadError(
                f"{self._where}: {layer} has {inputs} inputs and {outputs} outputs, which are {why}"
            )
        own = []
        for suffix, possible in self._layout.shapes(outputs, inputs).items():
            own.append((suffix, self._take_own(f"{layer}.{suffix}", possible)))
        for suffix, dtype in self._layout.dtypes.items():
            if (actual := dict(own)[suffix].dtype) != dtype:
                raise ModelLoadError(
                    f"the weights {layer}.{suffix} in {self._where} are {actual}, and config.json "
                    f"asks for {dtype} ({self._layout.name}): the two are not of the same model"
                )
        self._check_order(layer, inputs)
        first = own[0][1]
        return PackedStored(
            first.path, name, self._layout.name, shape, 0, layout=self._layout, own=tuple(own)
        )

    def _check_order(self, layer: str, inputs: int) -> None:
        """Refuse groups whose inputs are in another order, where the layout has none."""
        stored = self.stored(f"{layer}.g_idx")
        if stored is None or not isinstance(self._layout, GroupLayout) or self._layout.has_order:
            return
        size = inputs // self._layout.num_groups(inputs)
        order = self._take_own(stored.name, ((inputs,),)).read()
        if not np.array_equal(order, np.arange(inputs) // size):
            raise ModelLoadError(
                f"the weights {stored.name} in {self._where} order groups, and config.json says "
                "desc_act=false: the two are not of the same model"
            )

    def _key(self, name: str) -> StoredTensor | None:
        """The tensor that a packed layer has, by the name of its weight."""
        if not name.endswith(_WEIGHT):
            return None
        return self.stored(f"{name.removesuffix(_WEIGHT)}.{self._layout.key_name}")

    def _take_own(self, name: str, possible: tuple[tuple[int, ...], ...]) -> StoredTensor:
        tensor = self.stored(name)
        if tensor is not None and tensor.shape in possible:
            self._taken.add(name)
            return replace(tensor)
        return super().take(name, *possible)
