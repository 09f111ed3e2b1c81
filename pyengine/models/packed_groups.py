"""Linear layers of checkpoints with 4-bit weights in groups of inputs: AWQ, GPTQ and W4A16.

Each layout has a linear layer's codes in 32-bit integers of eight, and scales and zero points of
groups of inputs. They become weights of the Rust kernels, `(code - zero) * scale`; the codes stay.

Layouts: https://github.com/casper-hansen/AutoAWQ (`gemm.py`), https://github.com/ModelCloud/GPTQModel
(`PackableQuantLinear`), https://github.com/vllm-project/compressed-tensors (`pack_quantized`).
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.errors import ModelLoadError
from pyengine.models.packed_layout import PackedLayout, Shape
from pyengine.utils.dtypes import Rows, widened

_BITS = 4
_CODES_PER_WORD = 8
_GROUP_SIZES = (32, 64, 128)
_LARGEST_GROUP = 128  # larger groups are several with the same scales
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the position of each output in a word of AWQ

_Words = npt.NDArray[np.int32]
_Bytes = npt.NDArray[np.uint8]
_ReadOwn = Callable[[str], Rows]
"""Reads a tensor of a layer; uint16 stands for bfloat16."""


@dataclass(frozen=True, slots=True)
class _Groups:
    """A weight: codes `[out, in]`, scales and zero points `[out, groups]`.

    `order` are the inputs in the order in which groups have them, if that is not their own.
    """

    codes: _Bytes
    scales: npt.NDArray[np.float32]
    zeros: _Bytes | None
    order: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True)
class GroupLayout(PackedLayout):
    """Codes of 4 bits in groups of inputs."""

    group_size: int
    """Inputs of a group; -1: all."""
    has_order: bool
    """True if groups may have their inputs in another order."""

    @abstractmethod
    def tensor_shapes(self, outputs: int, inputs: int) -> dict[str, Shape]:
        """Names and shapes of the tensors of a layer."""

    @abstractmethod
    def groups(self, read: _ReadOwn) -> _Groups:
        """A layer's weight; `read` takes the names of `shapes`."""

    def num_groups(self, inputs: int) -> int:
        """Groups of a row."""
        return 1 if self.group_size == -1 else inputs // self.group_size

    def kernel_group_size(self, inputs: int) -> int:
        """Inputs of a group of the kernel, which divides one of the layout."""
        size = inputs if self.group_size == -1 else self.group_size
        return size if size in _GROUP_SIZES else _LARGEST_GROUP

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[Shape, ...]]:
        """See `PackedLayout.shapes`."""
        return {name: (shape,) for name, shape in self.tensor_shapes(outputs, inputs).items()}

    def unfit(self, outputs: int, inputs: int) -> str:
        """See `PackedLayout.unfit`."""
        size = inputs if self.group_size == -1 else self.group_size
        is_whole = inputs % size == 0 and size % self.kernel_group_size(inputs) == 0
        if is_whole and outputs % _CODES_PER_WORD == 0:
            return ""
        return f"not whole groups of {self.group_size} and words of {_CODES_PER_WORD}"


class _AWQ(GroupLayout):
    name, key_name = "AWQ", "qweight"

    def tensor_shapes(self, outputs: int, inputs: int) -> dict[str, Shape]:
        groups, words = self.num_groups(inputs), outputs // _CODES_PER_WORD
        return {"qweight": (inputs, words), "qzeros": (groups, words), "scales": (groups, outputs)}

    def groups(self, read: _ReadOwn) -> _Groups:
        codes, zeros = (_columns(_words(read(name)), _AWQ_ORDER) for name in ("qweight", "qzeros"))
        return _Groups(codes.T, widened(read("scales")).T, zeros.T)


@dataclass(frozen=True)
class _GPTQ(GroupLayout):
    zero_offset: int
    """The first format has zero points less one."""

    name, key_name = "GPTQ", "qweight"

    def tensor_shapes(self, outputs: int, inputs: int) -> dict[str, Shape]:
        groups = self.num_groups(inputs)
        order = {"g_idx": (inputs,)} if self.has_order else {}
        return {
            "qweight": (inputs // _CODES_PER_WORD, outputs),
            "qzeros": (groups, outputs // _CODES_PER_WORD),
            "scales": (groups, outputs),
            **order,
        }

    def groups(self, read: _ReadOwn) -> _Groups:
        codes = _columns(_words(read("qweight")).T)
        zeros = _columns(_words(read("qzeros"))).T + np.uint8(self.zero_offset)
        return _ordered(self, _Groups(codes, widened(read("scales")).T, zeros), read, "g_idx")


@dataclass(frozen=True)
class _CompressedTensors(GroupLayout):
    is_symmetric: bool

    name, key_name = "compressed-tensors", "weight_packed"

    def tensor_shapes(self, outputs: int, inputs: int) -> dict[str, Shape]:
        groups = self.num_groups(inputs)
        zeros = {} if self.is_symmetric else {"weight_zero_point": (outputs // 8, groups)}
        order = {"weight_g_idx": (inputs,)} if self.has_order else {}
        return {
            "weight_packed": (outputs, inputs // _CODES_PER_WORD),
            "weight_scale": (outputs, groups),
            **zeros,
            **order,
        }

    def groups(self, read: _ReadOwn) -> _Groups:
        codes = _columns(_words(read("weight_packed")))
        zeros = None
        if not self.is_symmetric:
            zeros = _columns(_words(read("weight_zero_point")).T).T
        weight = _Groups(codes, widened(read("weight_scale")), zeros)
        return _ordered(self, weight, read, "weight_g_idx")


def _words(tensor: Rows) -> _Words:
    with np.errstate(invalid="ignore"):  # a damaged file may have floats here
        return tensor.astype(np.int32, copy=False)


def _columns(words: _Words, positions: Sequence[int] = range(_CODES_PER_WORD)) -> _Bytes:
    """The codes of words `[R, C]`, `[R, 8 * C]`; `positions` are those of the eight in a word."""
    rows, columns = words.shape
    codes = np.empty((rows, columns, _CODES_PER_WORD), np.uint8)
    for number, position in enumerate(positions):
        codes[:, :, number] = (words >> (_BITS * position)) & 0xF
    return codes.reshape(rows, -1)


def _ordered(layout: GroupLayout, weight: _Groups, read: _ReadOwn, name: str) -> _Groups:
    """The same weight with the inputs of each group side by side."""
    if not layout.has_order:
        return weight
    with np.errstate(invalid="ignore"):
        groups = read(name).astype(np.int64)
    inputs, count = len(groups), layout.num_groups(len(groups))
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], np.arange(inputs) // (inputs // count)):
        raise ModelLoadError(f"{name} does not give each of {count} groups as many inputs")
    if np.array_equal(order, np.arange(inputs)):
        return weight
    return _Groups(weight.codes[:, order], weight.scales, weight.zeros, order)


def awq_layout(settings: Mapping[str, Any]) -> PackedLayout | str:
    """As `packed_layout`, for AWQ."""
    bits, version = settings.get("bits", 4), str(settings.get("version", "gemm")).lower()
    if bits != _BITS or version != "gemm":
        return f"AWQ with bits={bits} and version={version!r}"
    return _with_group_size(_AWQ(settings.get("group_size", 128), has_order=False))


def gptq_layout(settings: Mapping[str, Any]) -> PackedLayout | str:
    """As `packed_layout`, for GPTQ."""
    bits, kind = settings.get("bits"), settings.get("checkpoint_format") or "gptq"
    offsets = {"gptq": 1, "gptq_v2": 0}
    if bits != _BITS or kind not in offsets:
        return f"GPTQ with bits={bits} and checkpoint_format={kind!r}"
    has_order = bool(settings.get("desc_act"))
    return _with_group_size(_GPTQ(settings.get("group_size", 128), has_order, offsets[kind]))


def w4a16_layout(group: Mapping[str, Any]) -> PackedLayout | str:
    """As `packed_layout`, for a group of compressed-tensors of the format `pack-quantized`."""
    weights = group.get("weights") or {}
    bits, number, strategy = (weights.get(name) for name in ("num_bits", "type", "strategy"))
    if (bits, number) != (_BITS, "int") or strategy not in ("group", "channel"):
        return f"compressed-tensors with num_bits={bits}, type={number!r}, strategy={strategy!r}"
    if group.get("input_activations") is not None:
        return "compressed-tensors with quantized activations"
    size = weights.get("group_size") if strategy == "group" else -1
    has_order = weights.get("actorder") in ("group", "dynamic")
    is_symmetric = bool(weights.get("symmetric", True))
    return _with_group_size(_CompressedTensors(size or -1, has_order, is_symmetric))


def _with_group_size(layout: GroupLayout) -> PackedLayout | str:
    size = layout.group_size
    if type(size) is int and (
        size in (-1, *_GROUP_SIZES) or (size > 0 and size % _LARGEST_GROUP == 0)
    ):
        return layout
    return f"{layout.name} with group_size={size}"
