"""The KV tensors: the size of a block, and the pool.

One key and one value tensor per layer of a layer group (`layer_groups`)::

    [num_blocks + 1, block_size, kv_heads, head_dim]
     |           |
     |           the null block: takes the writes of rows without a slot
     the blocks that the manager allocates, by id

A *slot* is a position in this layout seen flat: `block * block_size + offset`. Layers of different
groups share tensors, never blocks: each reads and writes by the block table of its group. A tensor
whose blocks have several smaller layers is seen by them with as many times the blocks.
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyengine.errors import ConfigurationError
from pyengine.kv_cache.block_memory import BlockMemory, DeviceBlocks, HostBlocks, SnapshotBlocks
from pyengine.kv_cache.layer_groups import LayerGroups, Size
from pyengine.kv_cache.memory import in_gib, populate
from pyengine.kv_cache.pool_memory import PoolMemory
from pyengine.kv_cache.snapshots import Snapshots
from pyengine.kv_cache.states import StatePool
from pyengine.utils.devices import Device
from pyengine.utils.dtypes import DType, Rows, float8_numbers, itemsize, torch_dtype, widened

if TYPE_CHECKING:
    import torch

_SCALE_BYTES = 4
"""Of the float32 scale behind the numbers of a head in int8."""
_POPULATED = 2 << 20
"""Bytes of a tensor whose pages are allocated at a time beside the steps: a large page."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The KV cache of one layer per token: KV heads, their dimensions, the element type.

    Keys and values may differ in dimension (multi-head latent attention). In 8-bit floats they
    are stored divided by `scale_k` and `scale_v`, constants of the whole tensor. In int8 each
    head of a token has a scale, whose bytes follow its numbers.
    """

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: DType
    scale_k: float = 1.0
    scale_v: float = 1.0

    @property
    def unscaled(self) -> "KVCacheSpec":
        """The same without scales: layers that differ in those alone can share a tensor."""
        return replace(self, scale_k=1.0, scale_v=1.0)

    def times(self, parts: int) -> "KVCacheSpec":
        """The spec of so many such layers side by side: as many times the KV heads."""
        return replace(self, num_kv_heads=self.num_kv_heads * parts)

    @property
    def token_bytes(self) -> Size:
        """Bytes of a token's key, and of its value."""
        size = self.num_kv_heads * itemsize(self.dtype)
        return size * self.width_k, size * self.width_v

    @property
    def width_k(self) -> int:
        """Elements that a key takes, with its scale."""
        return self.head_dim_k + self._scale_bytes

    @property
    def width_v(self) -> int:
        """Elements that a value takes, with its scale."""
        return self.head_dim_v + self._scale_bytes

    @property
    def _scale_bytes(self) -> int:
        return _SCALE_BYTES if self.dtype == "int8" else 0

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of this layer's keys and values for one block of `block_size` tokens."""
        return block_size * sum(self.token_bytes)


def resolve_kv_cache_dtype(name: str, model_dtype: DType) -> DType:
    """The element type of the KV cache: "auto" (the model's), "int8", "fp8" or "fp8_e4m3".

    Raises `ConfigurationError` for another name.
    """
    if name == "auto":
        return model_dtype
    if name in ("fp8", "fp8_e4m3"):
        return "float8_e4m3fn"
    if name == "int8":
        return "int8"
    raise ConfigurationError(
        f"kv_cache_dtype={name!r} is not known: use one of auto, int8, fp8, fp8_e4m3"
    )


def bytes_per_block(specs: Sequence[KVCacheSpec], block_size: int) -> int:
    """Bytes of one block over these layers, keys and values."""
    return sum(spec.bytes_per_block(block_size) for spec in specs)


def tensor_specs(specs: Sequence[KVCacheSpec], groups: LayerGroups) -> list[KVCacheSpec]:
    """The spec of each of the pool's tensors, from those of all layers.

    Raises `ConfigurationError` if layers that are to share a tensor fill it differently.
    """
    sides = [
        spec.unscaled.times(location.parts)
        for spec, location in zip(specs, groups.locations, strict=True)
    ]
    owners = groups.owners
    for layer, (side, location) in enumerate(zip(sides, groups.locations, strict=True)):
        owner = owners[location.index]
        filled = (side.dtype, side.token_bytes)
        if filled != (sides[owner].dtype, sides[owner].token_bytes):
            raise ConfigurationError(
                f"layers {owner} and {layer} cannot share a KV tensor: {sides[owner]} is not {side}"
            )
    return [sides[owner] for owner in owners]


class KVPool:
    """The KV tensors of every layer.

    `keys[layer]` is `[num_blocks + 1, block_size, kv_heads, head_dim_k]`, `values[layer]` the
    same with `head_dim_v`, in the dtype of the layer's spec, on `device`. On the CPU they are views
    of `arrays[layer]`, which need no torch. In int8 the last dimension holds the scale too
    (`KVCacheSpec.width_k`). Layers that share a tensor (`groups`; by default none do) have it under
    both numbers; one with `parts` of it sees `(num_blocks + 1) * parts` blocks. Tensors start as
    zeros, and values stay finite (`write`): a masked value has no effect only while it is.

    `tables` are those that the layers read and `layer_tables[layer]` is the number of a layer's
    (`LayerGroups`).

    Raises `ConfigurationError` if the memory cannot be allocated, or if layers that share a tensor
    fill it differently.
    """

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        num_blocks: int,
        block_size: int,
        device: Device,
        groups: LayerGroups | None = None,
        states: StatePool | None = None,
    ) -> None:
        """`states` are those of recurrent layers, whose snapshots are in the blocks."""
        self.specs = tuple(specs)
        self.num_layers = len(self.specs)
        """Layers that keep keys and values."""
        self.groups = groups or LayerGroups.single(len(self.specs))
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.tables = self.groups.tables
        self.layer_tables = self.groups.layer_tables
        self._tensor_specs = sides = tensor_specs(self.specs, self.groups)
        shapes = [((block_size, s.num_kv_heads, s.width_k), s.dtype) for s in sides]
        shapes += [((block_size, s.num_kv_heads, s.width_v), s.dtype) for s in sides]
        try:
            self._memory = PoolMemory(shapes, num_blocks + 1, device)
        except (RuntimeError, MemoryError) as error:  # torch's own on a device, NumPy's here
            raise ConfigurationError(
                f"the KV pool of {num_blocks} + 1 blocks ({in_gib(self.num_bytes)}) could not be "
                f"allocated on {device}: {error}; give fewer num_blocks"
            ) from error
        self.snapshots = None if states is None else Snapshots(states, self._memory, num_blocks + 1)
        """The snapshots of states in the blocks, if the model has recurrent layers."""
        self._pieces = _in_pieces(self._memory.arrays)
        self._next_piece = next(self._pieces, None)

    def give_back(self) -> None:
        """Give the memory of all blocks and states back to the system; they are zeros then."""
        self._memory.give_back()
        if self.snapshots is not None:
            self.snapshots.states.give_back()

    @property
    def arrays(self) -> list[tuple[Rows, Rows]]:
        """Keys and values of each layer in the host's memory; for the CPU."""
        keys, values = self._layer_views(self._memory.arrays)
        return list(zip(keys, values, strict=True))

    @cached_property
    def keys(self) -> "list[torch.Tensor]":
        """The keys of each layer, for torch."""
        return self._layer_views(self._memory.tensors)[0]

    @cached_property
    def values(self) -> "list[torch.Tensor]":
        """The values of each layer, for torch."""
        return self._layer_views(self._memory.tensors)[1]

    def _layer_views(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Keys and values of each layer, in the layer's shape."""
        keys: list[Any] = []
        values: list[Any] = []
        count = len(self._tensor_specs)
        for spec, location in zip(self.specs, self.groups.locations, strict=True):
            heads = spec.num_kv_heads
            for views, index, width in (
                (keys, location.index, spec.width_k),
                (values, count + location.index, spec.width_v),
            ):
                tensor = tensors[index]
                if tensor.shape[2:] != (heads, width):
                    tensor = tensor.reshape(-1, self.block_size, heads, width)
                views.append(tensor)
        return keys, values

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together, the null block included."""
        return (self.num_blocks + 1) * bytes_per_block(self._tensor_specs, self.block_size)

    @property
    def null_blocks(self) -> list[int]:
        """The null block in each of `tables`."""
        return [self.num_blocks * table.parts + table.part for table in self.tables]

    def block_memory(self) -> BlockMemory:
        """The memory of each block, for a store to read and write.

        With states, the layer group after the others has the blocks of snapshots.
        """
        tensors = [self._tensors_of(group) for group in range(len(self.groups.windows))]
        snapshot_blocks = 1
        if self.snapshots is not None:
            tensors.append(list(range(2 * len(self._tensor_specs))))
            snapshot_blocks = self.snapshots.num_blocks
        memory: BlockMemory
        if self.device.type != "cpu":
            memory = DeviceBlocks(self._memory.tensors, tensors, snapshot_blocks)
        else:
            memory = HostBlocks(self._memory.arrays, tensors)
        if self.snapshots is None:
            return memory
        of = self.snapshots
        return SnapshotBlocks(memory, len(tensors) - 1, of.loading, of.overwritten)

    def _tensors_of(self, group: int) -> list[int]:
        """The tensors of a layer group: those of keys, then those of values."""
        locations, count = self.groups.locations, len(self._tensor_specs)
        used = sorted({location.index for location in locations if location.group == group})
        return [*used, *(index + count for index in used)]

    def populate(self, num_blocks: int | None = None) -> bool:
        """On the CPU, allocate the memory of the first blocks, or of all, before they are written.

        Otherwise the system clears pages within steps, up to a tenth of a prefill on a virtual
        machine whose host has to allocate them too. Takes 0.2 s for each GiB, there up to 2.
        Returns False, without a change, if the system cannot.
        """
        if self.device.type != "cpu":
            return False
        rows = [array[:num_blocks] for array in self._memory.arrays]
        with ThreadPoolExecutor() as threads:
            return all(threads.map(lambda array: populate(array.ctypes.data, array.nbytes), rows))

    def populate_in_background(self) -> None:
        """As `populate`, in a thread and a piece at a time, while steps run.

        Without it a step that is the first to write to some part of the pool takes up to 0.3 s
        longer on a virtual machine.
        """
        if self.device.type == "cpu":
            Thread(target=self._populate_all, name="pyengine-populate", daemon=True).start()

    def populate_piece(self, num_blocks: int) -> bool:
        """As `populate` for the next piece of the first blocks: a millisecond, or a few.

        Returns False once all is allocated, or if the system cannot.
        """
        if self._next_piece is None or self._next_piece[0] >= num_blocks:
            return False
        _, address, size = self._next_piece
        self._next_piece = next(self._pieces, None)
        return populate(address, size)

    def _populate_all(self) -> None:
        while self.populate_piece(self.num_blocks + 1):
            pass

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination): all are read before any is written.

        A block is copied in every tensor, that is, for all layers of its group.
        """
        if copies:
            self._memory.copy_blocks(copies)
            if self.snapshots is not None:
                self.snapshots.overwritten([destination for _, destination in copies])

    def differences(self, blocks: Sequence[int], peers: Sequence[int], group: int) -> list[float]:
        """The difference of each block's KV from that of its peer, in one layer group.

        The largest of all layers, relative to the norm of the first block; 0 only for equal
        numbers, NaN if one has a NaN.
        """
        worst, count = np.zeros(len(blocks), np.float32), len(self._tensor_specs)
        for spec, location in zip(self.specs, self.groups.locations, strict=True):
            if location.group != group:
                continue
            for index, width in (
                (location.index, spec.width_k),
                (count + location.index, spec.width_v),
            ):
                shape = (len(blocks), location.parts, self.block_size, spec.num_kv_heads, width)
                kv, other = (
                    _numbers(
                        self._memory.rows_of(index, ids).reshape(shape)[:, location.part],
                        spec.dtype,
                    ).reshape(len(blocks), -1)
                    for ids in (blocks, peers)
                )
                scale = np.maximum(np.linalg.norm(kv, axis=1), np.finfo(np.float32).tiny)
                worst = np.maximum(worst, np.linalg.norm(kv - other, axis=1) / scale)
        return [float(error) for error in worst]

    def write(
        self, layer: int, keys: "torch.Tensor", values: "torch.Tensor", slots: "torch.Tensor"
    ) -> None:
        """Write one row per token.

        `keys` is `[T, kv_heads, head_dim_k]`, `values` `[T, kv_heads, head_dim_v]`, `slots` int64
        `[T]` of slots in `0 .. len(keys[layer]) * block_size`. A pool of 8-bit floats takes them
        divided by the scales of the layer's spec, clamped to the largest number of the type.

        Values are always finite in the pool: attention multiplies a masked value by zero, and zero
        times NaN is NaN. A number of a value that is not finite becomes zero, and the key of that
        head NaN, so rows that see the token are NaN. Masked keys have no effect.
        """
        import torch

        spec = self.specs[layer]
        # Reading the sum would wait for the device.
        if self.device.type != "cpu" or not math.isfinite(values.sum(dtype=torch.float32)):
            keys = keys + (values * 0).sum(-1, keepdim=True)
            values = values.nan_to_num(0.0, 0.0, 0.0)
        for cache, rows, scale in (
            (self.keys[layer], keys, spec.scale_k),
            (self.values[layer], values, spec.scale_v),
        ):
            _copyable(cache.flatten(0, 1)).index_copy_(0, slots, _stored(rows, spec.dtype, scale))


def _in_pieces(arrays: Sequence[Rows]) -> Iterator[tuple[int, int, int]]:
    """First block, address and bytes of each piece of a pool's arrays, in order of the blocks."""
    if not arrays:
        return
    largest = max(array[0].nbytes for array in arrays)
    count = max(1, _POPULATED // largest)
    for first in range(0, len(arrays[0]), count):
        for array in arrays:
            blocks = array[first : first + count]
            yield first, blocks.ctypes.data, blocks.nbytes


def _stored(rows: "torch.Tensor", dtype: DType, scale: float) -> "torch.Tensor":
    """`rows` in the format of a pool of `dtype`."""
    import torch

    if itemsize(dtype) > 1:
        return rows
    kind = torch_dtype(dtype)
    largest = torch.finfo(kind).max
    scaled = rows.float().nan_to_num(math.nan, math.nan, math.nan) * (1.0 / scale)
    return _copyable(scaled.clamp(-largest, largest).to(kind))


def _numbers(rows: Rows, dtype: DType) -> npt.NDArray[np.float32]:
    """The numbers that rows of a pool stand for, in float32."""
    if dtype == "float8_e4m3fn":
        return float8_numbers(rows)
    if dtype != "int8":
        return widened(rows)
    scales = np.ascontiguousarray(rows[..., -_SCALE_BYTES:]).view(np.float32)
    return rows[..., :-_SCALE_BYTES].astype(np.float32) * scales


def _copyable(tensor: "torch.Tensor") -> "torch.Tensor":
    """`tensor` as torch can index it on every device: 8-bit numbers as bytes."""
    import torch

    return tensor if tensor.dtype.itemsize > 1 else tensor.view(torch.uint8)
