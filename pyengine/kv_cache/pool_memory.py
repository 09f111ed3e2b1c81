"""The memory of a pool's KV tensors.

Tensors whose blocks have equally many bytes are one allocation::

    [tensors * blocks, bytes of a block]     row = tensor * blocks + block
     |
     tensor 0, all its blocks; tensor 1, all its blocks; ...

So one gather and one scatter copy blocks in all of them. Each tensor is a contiguous part.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pyengine.utils.host_copy import upload

if TYPE_CHECKING:
    import torch

_COPIED = 16 << 20
"""Bytes that are copied at a time; so much memory a copy needs beside the pool."""


class PoolMemory:
    """Tensors `[blocks, *shape]` of zeros, for `shapes`, each with its dtype."""

    def __init__(
        self,
        shapes: Sequence[tuple[tuple[int, ...], "torch.dtype"]],
        blocks: int,
        device: "torch.device",
    ) -> None:
        """Raises torch's or NumPy's error if the memory cannot be allocated."""
        import torch

        by_size: dict[int, list[int]] = {}
        for index, (shape, dtype) in enumerate(shapes):
            by_size.setdefault(math.prod(shape) * dtype.itemsize, []).append(index)
        tensors: dict[int, torch.Tensor] = {}
        self._device, self._blocks = device, blocks
        self._rows: list[torch.Tensor] = []
        for size, indices in by_size.items():
            rows = _zeros(len(indices) * blocks, size, device)
            for place, index in enumerate(indices):
                own, (shape, dtype) = rows[place * blocks : (place + 1) * blocks], shapes[index]
                tensors[index] = own.view(dtype).view(blocks, *shape)
            self._rows.append(rows if size % 8 else rows.view(torch.int64))
        self.tensors = [tensors[index] for index in range(len(shapes))]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) in every tensor: all are read before any is written."""
        pairs = np.array(copies, dtype=np.int64).T
        for rows in self._rows:
            first = np.arange(0, len(rows), self._blocks)[:, None]
            sources, targets = upload((pairs[:, None] + first).reshape(2, -1), self._device)
            tensors = max(1, _COPIED // (len(copies) * rows[0].nbytes))
            for some, others in zip(
                sources.split(tensors * len(copies)),
                targets.split(tensors * len(copies)),
                strict=True,
            ):
                rows.index_copy_(0, others, rows.index_select(0, some))


def _zeros(rows: int, size: int, device: "torch.device") -> "torch.Tensor":
    """Bytes `[rows, size]`, all zero; on the CPU pages cost nothing until they are written.

    torch clears memory by writing to it, which for a pool of some GiB takes seconds at start-up;
    NumPy asks the system for pages that are zero already.
    """
    import torch

    if device.type != "cpu":
        return torch.zeros((rows, size), dtype=torch.uint8, device=device)
    return torch.from_numpy(np.zeros((rows, size), dtype=np.uint8))
