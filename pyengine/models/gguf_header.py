"""The header of a GGUF file, checked against the file before any other reader sees it.

Later readers trust the header, and a false count lets them loop until memory ends. The file is read
by ordinary reads: a file that is cut while it is mapped would end the process by a signal.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import os
import re
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pyengine.errors import ModelLoadError
from pyengine.models.transformers_calls import load_errors

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_LENGTH = struct.Struct("<Q")
_START = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of key-value pairs
_NUMBERS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
"""Letters of `struct` for GGUF's types of numbers."""
_FLOATS = {6: "f4", 12: "f8"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_LARGEST_ALIGNMENT = 1 << 16
_LONGEST_STRING = 1 << 26
_MAX_FLOATS = 1 << 23
_LONGEST_KEPT = 1 << 12  # numbers of an array that are kept: one for each layer
GGML_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""By number: a type's name, the elements of its block, and the bytes of one.

As in the library gguf, whose import takes a tenth of a second.
"""
_WINDOW = 1 << 20  # bytes that are read at once
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor in the header: `type` is ggml's name (`Q4_K`), `shape` has the rows first.

    Its bytes are `num_bytes` at `offset` in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """Numbers in the tensor."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFArray:
    """One array in the header; `values` has its numbers, None for strings and for long arrays.

    Its items, of GGUF's type `kind`, are from `start` to `end` in the file.
    """

    length: int
    values: tuple[Any, ...] | None = None
    kind: int = -1
    start: int = 0
    end: int = 0

    @property
    def is_of_strings(self) -> bool:
        """True for an array of strings."""
        return self.kind == _STRING

    @property
    def dtype(self) -> "np.dtype[Any] | None":
        """The type of its numbers; None for strings."""
        return np.dtype(f"<{_NUMBERS[self.kind]}") if self.kind in _NUMBERS else None


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The header of a GGUF file: numbers, strings and `GGUFArray`s by key, and tensors.

    `num_bytes` is its length, up to the first tensor; `file_size` that of the file.
    """

    values: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]
    num_bytes: int
    file_size: int

    @property
    def architecture(self) -> object:
        """`general.architecture`, a string unless the file is damaged."""
        return self.values.get("general.architecture")

    @property
    def num_elements(self) -> int:
        """Numbers in all tensors."""
        return sum(tensor.num_elements for tensor in self.tensors)

    @property
    def main_type(self) -> str:
        """The type of most of the numbers."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors:
            counts[tensor.type] += tensor.num_elements
        return counts.most_common(1)[0][0]


def read_header(path: Path, descriptor: int | None = None) -> GGUFHeader:
    """The header of the GGUF file at `path`, which `descriptor` may have open.

    Raises `ModelLoadError` for a file of another kind or an unknown version, and for counts, types,
    offsets or a number of layers that do not match the file.
    """
    if descriptor is None:
        with load_errors(f"{path} cannot be read"), path.open("rb") as file:
            return read_header(path, file.fileno())
    with load_errors(f"{path} cannot be read"):
        head = os.pread(descriptor, _START.size, 0)
        size = os.fstat(descriptor).st_size
        if len(head) < _START.size or not head.startswith(_MAGIC):
            raise ModelLoadError(
                f"{path} is not a GGUF file: it starts with {head[:4]!r}, not {_MAGIC!r} "
                f"({size} bytes); download it again or name another model"
            )
        _, version, num_tensors, num_values = _START.unpack(head)
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            raise ModelLoadError(
                f"{path} is a GGUF file for big-endian machines: convert the model again, without "
                "--bigendian"
            )
        if version not in _VERSIONS:
            raise ModelLoadError(
                f"{path} is a GGUF file of version {version}; versions {_VERSIONS} can be read"
            )
        try:
            header = _Reader(descriptor, size).header(num_tensors, num_values)
        except (struct.error, ValueError) as error:
            raise ModelLoadError(
                f"the header of the GGUF file {path} is damaged: {error}; download it again"
            ) from error
    _check_layers(path, header)
    return header


@contextmanager
def _named(key: str) -> Iterator[None]:
    """Name the key in errors about its value."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"the value of {key[:200]!r}: {error}") from error


class _Reader:
    """Reads from its position on; raises `ValueError` past the end of the file."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor, self._size = descriptor, size
        self._at = _START.size
        self._window, self._window_start = b"", 0

    def header(self, num_tensors: int, num_values: int) -> GGUFHeader:
        values: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            if key in values:
                raise ValueError(f"it has the key {key!r} twice")
            with _named(key):
                values[key] = self._value(self._number("I"))
        relative = [self._tensor() for _ in range(num_tensors)]
        if not relative:
            raise ValueError("it declares no tensors")
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= _LARGEST_ALIGNMENT:
            raise ValueError(f"its alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = [replace(tensor, offset=start + tensor.offset) for tensor in relative]
        self._check_offsets(tensors, start)
        return GGUFHeader(values, tuple(tensors), start, self._size)

    def _bytes(self, num_bytes: int) -> bytes:
        """The next bytes, which follow or lie within the window."""
        start = self._at
        self._skip(num_bytes)
        offset = start - self._window_start
        if not 0 <= offset <= len(self._window) - num_bytes:
            self._window = os.pread(self._descriptor, max(num_bytes, _WINDOW), start)
            self._window_start, offset = start, 0
        data = self._window[offset : offset + num_bytes]
        if len(data) < num_bytes:
            raise ValueError(f"{num_bytes} bytes at {start} are missing: it was cut short")
        return data

    def _number(self, kind: str) -> Any:
        layout = f"<{kind}"
        (value,) = struct.unpack(layout, self._bytes(struct.calcsize(layout)))
        return value

    def _skip(self, num_bytes: int) -> None:
        if num_bytes > self._size - self._at:
            raise ValueError(f"{num_bytes} bytes at {self._at} do not end within the file")
        self._at += num_bytes

    def _skip_strings(self, count: int) -> None:
        """Skip an array of strings: a vocabulary has some hundred thousand."""
        if count * _LENGTH.size > self._size - self._at:
            raise ValueError(f"{count} strings at {self._at} do not end within the file")
        unpack, width = _LENGTH.unpack_from, _LENGTH.size
        while count:
            start, last = self._window_start, len(self._window) - width
            offset = self._at - start
            while count and 0 <= offset <= last:
                (length,) = unpack(self._window, offset)
                offset += width + length
                count -= 1
            self._skip(start + offset - self._at)
            if count:
                self._skip(self._number("Q"))
                count -= 1

    def _skip_floats(self, count: int, dtype: "np.dtype[Any]") -> None:
        """Skip an array of numbers, which are finite: a vocabulary has a score for each token."""
        num_bytes = count * dtype.itemsize
        if _MAX_FLOATS * dtype.itemsize < num_bytes <= self._size - self._at:
            raise ValueError(f"{count} numbers are more than any vocabulary has tokens")
        if not np.isfinite(np.frombuffer(self._bytes(num_bytes), dtype)).all():
            raise ValueError("it holds NaN or infinity")

    def _string(self) -> str:
        length = self._number("Q")
        if length > _LONGEST_STRING and length <= self._size - self._at:
            raise ValueError(f"a string at {self._at} has {length} bytes")
        return self._bytes(length).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        """One value; of an array, the numbers if there are few."""
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"a value is of type {kind}, which GGUF does not have")
        item, length = self._number("I"), self._number("Q")
        start, values = self._at, None
        if item in _NUMBERS and length <= _LONGEST_KEPT:
            layout = f"<{length}{_NUMBERS[item]}"
            values = struct.unpack(layout, self._bytes(struct.calcsize(layout)))
        elif item in _FLOATS:
            self._skip_floats(length, np.dtype(f"<{_FLOATS[item]}"))
        elif item in _NUMBERS:
            self._skip(length * struct.calcsize(f"<{_NUMBERS[item]}"))
        elif item == _STRING:
            self._skip_strings(length)
        else:
            raise ValueError(f"an array is of type {item}")
        return GGUFArray(length, values, item, start, self._at)

    def _tensor(self) -> GGUFTensor:
        name, num_dimensions = self._string(), self._number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"{name!r} has {num_dimensions} dimensions")
        shape = [self._number("Q") for _ in range(num_dimensions)]
        kind, offset = self._number("I"), self._number("Q")
        if kind not in GGML_TYPES:
            raise ValueError(f"{name!r} is of type {kind}, which is not known")
        type_name, block, num_bytes = GGML_TYPES[kind]
        if shape[0] % block or prod(shape) < 1:
            raise ValueError(f"{name!r} of type {type_name} cannot have the shape {shape}")
        size = prod(shape) // block * num_bytes
        return GGUFTensor(name, tuple(reversed(shape)), type_name, offset, size)

    def _check_offsets(self, tensors: list[GGUFTensor], start: int) -> None:
        """Raise unless every tensor has a unique name and its own bytes within the file."""
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise ValueError("two of its tensors have one name")
        end, before = start, ""
        for tensor in sorted(tensors, key=lambda item: item.offset):
            if tensor.offset < end:
                raise ValueError(f"{tensor.name!r} lies within {before!r}")
            end, before = tensor.offset + tensor.num_bytes, tensor.name
            if end > self._size:
                raise ValueError(f"{tensor.name!r} does not end within the file: it was cut short")


def _check_layers(path: Path, header: GGUFHeader) -> None:
    """Raise unless the file holds as many layers as it declares."""
    if header.values.get("split.count", 0) not in (0, 1):
        raise ModelLoadError(
            f"{path} is one of {header.values['split.count']} files of a model, which have to be "
            "merged first: llama-gguf-split --merge FIRST_FILE NEW_FILE"
        )
    architecture = header.values.get("general.architecture")
    declared = header.values.get(f"{architecture}.block_count")
    layers = {int(match[1]) for tensor in header.tensors if (match := _LAYER.match(tensor.name))}
    if layers != set(range(len(layers))) or declared != len(layers):
        raise ModelLoadError(
            f"the GGUF file {path} declares {declared} layers of the architecture "
            f"{architecture!r} and holds the tensors of {len(layers)}: it is damaged or was cut, "
            "get it again"
        )
