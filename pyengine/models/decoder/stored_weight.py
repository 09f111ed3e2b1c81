"""A weight as a checkpoint stores it, before a kernel set lays it out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyengine.models.decoder.checkpoint import Array, StoredTensor


@dataclass(frozen=True, slots=True)
class Weight:
    """Tensors in files, whose parts follow each other along the first axis of `shape`.

    A kernel set makes a product of it: of the numbers, or of the bytes of a format that it knows.
    """

    parts: tuple[StoredTensor, ...]
    shape: tuple[int, ...]
    is_interleaved: bool = False

    def half(self, number: int) -> "Weight":
        """The first or the second half of the rows."""
        size = self.shape[0] // 2
        shape = (size, *self.shape[1:])
        if len(self.parts) == 2:
            return Weight((self.parts[number],), shape)
        [whole] = self.parts
        rows = (
            slice(number, None, 2)
            if self.is_interleaved
            else slice(number * size, size * (number + 1))
        )
        return Weight((whole.only(rows),), shape)

    def zeros(self) -> "Weight":
        """Zeros of the same shape, in no file."""
        return Weight((_Zeros(self.parts[0].path, self.name, "F32", self.shape, 0),), self.shape)

    @property
    def packed_as(self) -> str | None:
        """The format of the bytes of all parts; None: they are floats, or differ."""
        formats = {part.packed_as for part in self.parts}
        return formats.pop() if len(formats) == 1 and not self.is_interleaved else None

    def laid_out(self) -> Any:
        """The weight of the Rust kernels, for a matrix that is `packed_as` something."""
        return type(self.parts[0]).laid_out(self.parts, (self.shape[0], self.shape[1]))

    def split(self) -> "list[Weight]":
        """The parts, each a weight."""
        return [Weight((part,), part.read_shape) for part in self.parts]

    @property
    def name(self) -> str:
        """For messages."""
        return ", ".join(part.name for part in self.parts)

    def pieces(
        self, read: Callable[[StoredTensor], Any] | None = None
    ) -> Iterator[tuple[slice, Any, str]]:
        """Each part: its rows, its numbers, and their format in the file. Read one at a time.

        Numbers are arrays, or what `read` returns for a part.
        """
        start = 0
        for part in self.parts:
            numbers = part.read() if read is None else read(part)
            halves = (numbers[0::2], numbers[1::2]) if self.is_interleaved else (numbers,)
            for half in halves:
                yield slice(start, start + len(half)), half, part.dtype
                start += len(half)


class _Zeros(StoredTensor):
    """Zeros, for the part of a sum that another rank adds."""

    __slots__ = ()

    def read(self) -> Array:
        """The zeros."""
        return np.zeros(self.shape, np.float32)
