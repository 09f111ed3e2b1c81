"""The tensors of safetensors files, read one by one; every tensor is accounted for.

A tensor is part of the model, known to have no effect, or refused by name. A `Checkpoint` knows
headers only; `StoredTensor.read` maps one tensor of a file, and its memory is released with the
array. Layout: https://github.com/huggingface/safetensors#format
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt

from pyengine.errors import ModelLoadError
from pyengine.models.checkpoint_files import TensorHeader, check_weights

Array = npt.NDArray[Any]
Numbers = TypeVar("Numbers", bound=Any)

_NUMPY: Mapping[str, type[Any]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
}
"""How the bits of a float format are held; NumPy has no bfloat16."""
_CODES: Mapping[str, type[Any]] = {
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "I8": np.int8,
    "U8": np.uint8,
    "I32": np.int32,
    "I64": np.int64,
}
"""Formats that need a scale, or, if they are floats, may need one: see `packed`."""
_FLOAT8 = ("F8_E4M3", "F8_E5M2")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file, or the part of it that belongs to one expert.

    `name`, `dtype` and `shape` are those of the file; `start` is where its bytes begin. A tensor
    that `is_transposed` is read transposed; then only some `rows` and `columns` are, or all.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    is_transposed: bool = False
    rows: slice | None = None
    columns: slice | None = None

    def reshaped(self, shape: tuple[int, ...]) -> "StoredTensor":
        """The same numbers in another shape."""
        return replace(self, shape=shape)

    def transposed(self) -> "StoredTensor":
        """The same tensor, read the other way around."""
        return replace(self, is_transposed=True)

    def only(self, rows: slice) -> "StoredTensor":
        """Some rows of what `read` returns."""
        return replace(self, rows=_within(self._whole_shape[0], self.rows, rows))

    def only_columns(self, columns: slice) -> "StoredTensor":
        """Some columns of what `read` returns."""
        return replace(self, columns=_within(self._whole_shape[1], self.columns, columns))

    @property
    def is_whole(self) -> bool:
        """True if `read` returns all rows and columns."""
        return self.rows is None and self.columns is None

    @property
    def read_shape(self) -> tuple[int, ...]:
        """The shape of what `read` returns."""
        whole = self._whole_shape
        sizes = zip(whole, (self.rows, self.columns), strict=False)
        cut = [count if part is None else len(range(count)[part]) for count, part in sizes]
        return (*cut, *whole[2:])

    @property
    def _whole_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.is_transposed else self.shape

    def cut(self, whole: Numbers) -> Numbers:
        """The rows and columns of a tensor, an array or one of torch's, that `read` returns."""
        rows: Any = whole if self.rows is None else whole[self.rows]
        cut: Numbers = rows if self.columns is None else rows[:, self.columns]
        return cut

    def expert(self, index: int) -> "StoredTensor":
        """The part of one expert of a tensor `[experts, ...]`."""
        part = replace(self, name=f"{self.name}[{index}]", shape=self.shape[1:])
        return replace(part, start=self.start + index * part.num_bytes)

    reads_floats: ClassVar[bool] = False
    """True if `read` gives floats, whatever the `dtype`."""

    @property
    def is_of_floats(self) -> bool:
        """True if `read` gives floats."""
        return self.reads_floats or self.dtype in _NUMPY

    @property
    def packed_as(self) -> str | None:
        """The format of its bytes, if a kernel multiplies by them; None: floats only."""
        return None

    @staticmethod
    def laid_out(parts: Sequence[Any], shape: tuple[int, int]) -> Any:
        """The weight `[outputs, inputs]` of the Rust kernels whose outputs are those of `parts`.

        All parts have one `packed_as`, which is not None. Raises `ValueError` for NaN or infinity.
        """
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        kind = np.dtype(_NUMPY.get(self.dtype) or _CODES[self.dtype])
        return prod(self.shape) * kind.itemsize

    def read(self) -> Array:
        """The tensor, mapped from the file, BF16 as its bits; writing to it changes a copy."""
        kind = np.dtype(_NUMPY.get(self.dtype) or _CODES[self.dtype])
        if 0 in self.shape:
            array: Array = np.empty(self.shape, kind)
        elif self.start % kind.itemsize:  # allowed by the format; a mapping cannot be viewed then
            whole = np.memmap(self.path, np.uint8, "c", self.start, (self.num_bytes,))
            array = np.array(whole).view(kind).reshape(self.shape)
        else:
            array = np.memmap(self.path, kind, "c", self.start, self.shape)
        return self.cut(array.T if self.is_transposed else array)


def _within(count: int, before: slice | None, part: slice) -> slice:
    """A part of those of `count` rows that `before` selects."""
    rows = range(count)[before or slice(None)][part]
    return slice(rows.start, rows.stop, rows.step)


class Float8Stored(StoredTensor):
    """A tensor of 8-bit floats without scales."""

    reads_floats = True

    def read(self) -> Array:
        """The tensor in float32."""
        numbers: Array = float8_values(self.dtype)[StoredTensor.read(self)]
        return numbers


@cache
def float8_values(dtype: str) -> Array:
    """The numbers of the 256 codes of an 8-bit format (arXiv 2209.05433)."""
    codes = np.arange(256, dtype=np.uint16)
    if dtype == "F8_E5M2":  # the upper half of a float16
        return (codes << 8).view(np.float16).astype(np.float32)
    exponent, rest = (codes >> 3 & 15).astype(np.int32), (codes & 7) / np.float32(8)
    sizes = np.where(exponent == 0, np.ldexp(rest, -6), np.ldexp(1 + rest, exponent - 7))
    numbers = np.where(codes & 128, -sizes, sizes).astype(np.float32)
    numbers[[127, 255]] = np.nan
    return numbers


class Tensors:
    """Tensors by name, and which of them were taken.

    `where` they are, and `asks` what describes the model, are for messages.
    """

    no_effect: Mapping[str, str] = MappingProxyType({})
    """Patterns of names that change nothing in this kind of file, with the reason."""

    has_plain_float8 = True
    """True if 8-bit floats are numbers by themselves; else they need a scale."""

    def __init__(
        self, tensors: Mapping[str, StoredTensor], where: str, asks: str = "config.json"
    ) -> None:
        self._tensors, self._where, self._asks = dict(tensors), where, asks
        self._taken: set[str] = set()

    @property
    def _missing_scales(self) -> str:
        """Why integers and 8-bit floats cannot be read, for a message."""
        return f"{self._asks} has no quantization_config that says what they stand for"

    def named_from(self, base: str) -> "Tensors":
        """The same tensors, with names that begin with `base`.

        A model that was saved without its head has names without it.
        """
        if not any(name.startswith(base) for name in self._tensors):
            self._tensors = {base + name: tensor for name, tensor in self._tensors.items()}
        return self

    def __iter__(self) -> Iterator[StoredTensor]:
        """All tensors."""
        return iter(self._tensors.values())

    def with_others(self, others: Mapping[str, StoredTensor]) -> Self:
        """The same tensors, but these in place of those of the same names, or beside them."""
        changed = copy(self)
        changed._tensors, changed._taken = {**self._tensors, **others}, set()
        return changed

    def has(self, name: str) -> bool:
        """True if the files have a tensor of this name."""
        return name in self._tensors

    def has_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """True if the files have a tensor of this name and shape."""
        tensor = self._tensors.get(name)
        return tensor is not None and tensor.shape == shape

    def first_of(self, pattern: str) -> str | None:
        """The first tensor whose name begins as `pattern` says, if there is one."""
        return min((name for name in self._tensors if re.match(pattern, name)), default=None)

    def take(self, name: str, *shapes: tuple[int, ...]) -> StoredTensor:
        """The tensor of this name, which is then part of the model.

        Raises `ModelLoadError` if it is missing, of none of these shapes, or of integers.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelLoadError(
                f"the weights in {self._where} lack {name}, which {self._asks} asks for: "
                "the two are not of the same model, or a file is missing"
            )
        if tensor.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise ModelLoadError(
                f"the weights {name} in {self._where} have the shape {list(tensor.shape)}, and "
                f"{self._asks} asks for {expected}: the two are not of the same model"
            )
        if tensor.dtype in _FLOAT8 and self.has_plain_float8:
            fields = tensor.path, tensor.name, tensor.dtype, tensor.shape, tensor.start
            tensor = Float8Stored(*fields)
        if not tensor.is_of_floats:
            raise ModelLoadError(
                f"the weights {name} in {self._where} are {tensor.dtype}: they are not floats that "
                f"a model computes with ({', '.join(_NUMPY)}), and {self._missing_scales}"
            )
        self._taken.add(name)
        return tensor

    def finish(self, no_effect: Mapping[str, str]) -> None:
        """Raise `ModelLoadError` if a tensor was not taken and matches no pattern of `no_effect`.

        Values of `no_effect` are the reasons why such tensors have none.
        """
        known = re.compile("|".join(f"(?:{pattern})" for pattern in no_effect) or r"(?!)")
        unread = sorted(
            name for name in self._tensors if name not in self._taken and not known.fullmatch(name)
        )
        if unread:
            more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
            raise ModelLoadError(
                f"the weights in {self._where} have {unread[0]}{more}, which {self._asks} does "
                "not ask for: the two are not of the same model"
            )


class Checkpoint(Tensors):
    """The tensors of the safetensors files in a folder.

    Raises `ModelLoadError` for files that are missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.headers = check_weights(folder)
        """The headers of all files, checked."""
        tensors = {
            name: stored_tensor(name, header) for name, header in self.headers.tensors.items()
        }
        super().__init__(tensors, str(folder))

    @property
    def formats(self) -> str:
        """The formats of quantised weights, as text; empty: all are floats."""
        return ""

    def stored(self, name: str) -> StoredTensor | None:
        """The tensor of this name, if there is one; it is not taken yet."""
        return self._tensors.get(name)


def stored_tensor(name: str, header: TensorHeader) -> StoredTensor:
    """The tensor of a checked header; raises `ModelLoadError` unless its bytes fit its shape."""
    tensor = StoredTensor(header.path, name, header.dtype, header.shape, header.start)
    known = tensor.dtype in _NUMPY or tensor.dtype in _CODES
    if known and header.end - header.start != tensor.num_bytes:
        raise ModelLoadError(
            f"{header.path} is damaged: {name} of shape {list(header.shape)} takes "
            f"{tensor.num_bytes} bytes, and its header says {header.end - header.start}; "
            "get it again"
        )
    return tensor
