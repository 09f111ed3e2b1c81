"""The memory of a pool's KV tensors.

Tensors whose blocks have equally many bytes are one allocation::

    [tensors * blocks, bytes of a block]     row = tensor * blocks + block
     |
     tensor 0, all its blocks; tensor 1, all its blocks; ...

So one gather and one scatter copy blocks in all of them. Each tensor is a contiguous part. On `CPU`
the allocations are arrays, on devices of torch its tensors.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyengine.kv_cache.memory import give_back
from pyengine.utils.device_arrays import concatenated, on_host, zeros
from pyengine.utils.devices import CPU, Device, for_torch
from pyengine.utils.dtypes import STORED, DType, Rows, itemsize, torch_dtype
from pyengine.utils.host_copy import upload

if TYPE_CHECKING:
    import torch

_CACHE_LINE = 64
_COPIED = 16 << 20
"""Bytes that are copied at a time: the memory that a copy needs beside the pool."""

Shape = tuple[tuple[int, ...], DType]
"""The shape of a block in a tensor, and the tensor's element type."""


class PoolMemory:
    """Tensors `[blocks, *shape]` of zeros, for `shapes`, each with its element type."""

    def __init__(self, shapes: Sequence[Shape], blocks: int, device: Device) -> None:
        """Raises torch's or NumPy's error if the memory cannot be allocated."""
        by_size: dict[int, list[int]] = {}
        for index, (shape, dtype) in enumerate(shapes):
            by_size.setdefault(math.prod(shape) * itemsize(dtype), []).append(index)
        self._shapes, self._blocks, self._device = tuple(shapes), blocks, device
        self._locations: dict[
            int, tuple[int, int]
        ] = {}  # by tensor: its allocation and place there
        for number, indices in enumerate(by_size.values()):
            self._locations |= {index: (number, position) for position, index in enumerate(indices)}
        sizes = [(len(indices) * blocks, size) for size, indices in by_size.items()]
        self._rows: list[Any] = [_zeros(count, size, device) for count, size in sizes]
        """Bytes `[tensors * blocks, bytes of a block]`; integers of 8 bytes where they fit."""

    @cached_property
    def arrays(self) -> list[Rows]:
        """The tensors in the host's memory, as `STORED` has their types; none on a device."""
        if self._device.type != "cpu":
            return []
        parts = [np.asarray(self._part(index)) for index in self._indices]
        return [
            part.view(STORED[dtype]) for part, (_, dtype) in zip(parts, self._shapes, strict=True)
        ]

    @cached_property
    def tensors(self) -> "list[torch.Tensor]":
        """The tensors, for torch; on the CPU over the memory of `arrays`."""
        import torch

        with torch.inference_mode(False):  # to be written inside of it and outside
            parts = [self._part(index) for index in self._indices]
            if self._device is CPU:
                parts = [torch.from_numpy(part) for part in parts]
            return [
                part.view(torch_dtype(dtype))
                for part, (_, dtype) in zip(parts, self._shapes, strict=True)
            ]

    @property
    def _indices(self) -> range:
        return range(len(self._shapes))

    def _part(self, index: int) -> Any:
        """The bytes of a tensor: `[blocks, *shape]`, the last dimension in bytes."""
        number, position = self._locations[index]
        shape, dtype = self._shapes[index]
        rows = self._rows[number][position * self._blocks : (position + 1) * self._blocks]
        return _as_bytes(rows).reshape(self._blocks, *shape[:-1], shape[-1] * itemsize(dtype))

    def rows_of(self, index: int, blocks: Sequence[int]) -> Rows:
        """A copy of some blocks of a tensor on the host, `[len(blocks), *shape]`."""
        shape, dtype = self._shapes[index]
        number, position = self._locations[index]
        rows = self._rows[number]
        index = upload(np.array(blocks, np.int64) + position * self._blocks, self._device)
        host = on_host(rows[index])
        numbers: Rows = host.view(STORED[dtype]).reshape(len(blocks), *shape)
        return numbers

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) in every tensor: all are read before any is written."""
        pairs = np.array(copies, dtype=np.int64).T
        for rows in self._rows:
            first = np.arange(0, len(rows), self._blocks)[:, None]
            sources, targets = (pairs[:, None] + first).reshape(2, -1)
            step = max(1, _COPIED // (len(copies) * rows[0].nbytes)) * len(copies)
            for start in range(0, len(sources), step):
                part = slice(start, start + step)
                read, written = upload(np.stack([sources[part], targets[part]]), self._device)
                if isinstance(rows, np.ndarray):
                    rows[written] = rows.take(read, axis=0)
                else:
                    rows.index_copy_(0, written, rows.index_select(0, read))

    def give_back(self) -> None:
        """Give the pages back to the system, on the CPU; the tensors are zeros then."""
        for rows in self._rows:
            if isinstance(rows, np.ndarray):
                give_back(rows.ctypes.data, rows.nbytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all tensors."""
        return sum(math.prod(shape) * itemsize(dtype) for shape, dtype in self._shapes)

    def bytes_of(self, blocks: Sequence[int]) -> Any:
        """A copy of some blocks, one after the other: uint8 `[len(blocks) * block_bytes]`."""
        parts = []
        for rows, places in self._places(blocks):
            taken = rows.take(places, axis=0) if isinstance(rows, np.ndarray) else rows[places]
            parts.append(_as_bytes(taken).reshape(len(blocks), -1))
        return concatenated(parts, 1).reshape(-1)

    def write_bytes(self, blocks: Sequence[int], data: Any) -> None:
        """Write some blocks as `bytes_of` has them; `data` is uint8, and zeros follow it."""
        missing = len(blocks) * self.block_bytes - len(data)
        data = concatenated([data, _as_bytes(zeros((missing,), "int8", self._device))])
        data, begin = data.reshape(len(blocks), -1), 0
        for rows, places in self._places(blocks):
            as_bytes = _as_bytes(rows)
            size = as_bytes.shape[1] * (len(places) // len(blocks))
            part = data[:, begin : begin + size]
            as_bytes[places] = part.reshape(len(places), -1)
            begin += size

    def zero(self, blocks: Sequence[int]) -> None:
        """Write zeros to some blocks of all tensors."""
        for rows, places in self._places(blocks):
            rows[places] = 0

    def _places(self, blocks: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        """Each allocation, and the places of some blocks in it, block by block."""
        for rows in self._rows:
            first = np.arange(0, len(rows), self._blocks)
            places = np.array(blocks, np.int64)[:, None] + first
            yield rows, upload(places.reshape(-1), self._device)


def _zeros(rows: int, size: int, device: Device) -> Any:
    """Bytes `[rows, size]`, all zero, or integers of 8 bytes.

    On the CPU pages cost nothing until they are written: NumPy asks the system for pages that are
    zero already. torch would write zeros, which for a pool of some GiB takes seconds at start-up.
    """
    width, kind = (size // 8, np.int64) if size % 8 == 0 else (size, np.uint8)
    if device.type == "cpu":
        zeros = _aligned_zeros(rows * width, kind).reshape(rows, width)
        return upload(zeros, device)
    import torch

    kinds = {np.int64: torch.int64, np.uint8: torch.uint8}
    return torch.zeros((rows, width), dtype=kinds[kind], device=for_torch(device))


def _aligned_zeros(count: int, kind: type[np.generic]) -> npt.NDArray[Any]:
    """Zeros that begin at a cache line, which vectors of numbers do not straddle then."""
    zeros = np.zeros(count + _CACHE_LINE, kind)
    begin = -zeros.ctypes.data % _CACHE_LINE // zeros.itemsize
    return zeros[begin : begin + count]


def _as_bytes(rows: Any) -> Any:
    if isinstance(rows, np.ndarray):
        return rows.view(np.uint8)
    import torch

    return rows.view(torch.uint8)
