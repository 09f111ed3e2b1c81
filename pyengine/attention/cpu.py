"""Attention on the CPU in float32 or bfloat16, with a cache in that or in int8: the Rust kernel.

The kernel (`rust/cpu-kernels`) rotates queries and keys if a layer leaves that to it, writes the
new keys and values into their slots and attends with all rows of the step, reading the blocks in
place. Shared blocks are read once for all sequences. A row has the same bits in every batch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from pyengine.attention.backend import (
    QKV,
    AttentionBackend,
    AttentionOptions,
    Int32Array,
    KernelOptions,
    StepInputs,
)
from pyengine.attention.needs import AttentionNeeds, cache_dtype_obstacle
from pyengine.cpu import CpuAttention, CpuCache, CpuStep
from pyengine.kernels.rope import HeadNorm, RotaryLayout, Rotation
from pyengine.kv_cache.pool import KVPool
from pyengine.utils.dtypes import Rows
from pyengine.utils.openmp import loaded_torch, openmp_runtime
from pyengine.utils.tensors import array_of

if TYPE_CHECKING:
    import torch


class _Caches(Protocol):
    """The cache of each layer."""

    def __getitem__(self, layer: int, /) -> CpuCache: ...


_caches: WeakKeyDictionary[KVPool, _Caches] = WeakKeyDictionary()


def _caches_of(pool: KVPool) -> _Caches:
    """The tensors of each layer for the kernel; layers of one tensor share a cache.

    They are made once for a pool: the kernel accepts no second cache over the same memory.
    """
    if pool not in _caches:
        tensors = [location.index for location in pool.groups.locations]
        layers = list(zip(tensors, pool.arrays, strict=True))
        shapes = {(tensor, keys.shape) for tensor, (keys, _) in layers}
        if len(shapes) > len(set(tensors)):
            _caches[pool] = _CachesInTurn(tensors, pool.arrays)
        else:
            by_tensor: dict[int, CpuCache] = {}
            for tensor, (keys, values) in layers:
                if tensor not in by_tensor:
                    by_tensor[tensor] = CpuCache(keys, values)
            _caches[pool] = [by_tensor[tensor] for tensor in tensors]
    return _caches[pool]


class _CachesInTurn:
    """The caches of layers that see one tensor in several shapes.

    A tensor has that of the layer that attends: it takes microseconds to make, and the kernel
    accepts no second one over the same memory.
    """

    def __init__(self, tensors: Sequence[int], arrays: Sequence[tuple[Rows, Rows]]) -> None:
        """Each layer's tensor, by its number, and its keys and values there."""
        self._tensors, self._arrays = tensors, arrays
        self._current: dict[int, tuple[tuple[int, ...], CpuCache]] = {}

    def __getitem__(self, layer: int, /) -> CpuCache:
        """The cache of a layer, valid until another layer of the tensor asks for its own."""
        tensor, (keys, values) = self._tensors[layer], self._arrays[layer]
        if tensor not in self._current or self._current[tensor][0] != keys.shape:
            self._current.pop(tensor, None)
            self._current[tensor] = keys.shape, CpuCache(keys, values)
        return self._current[tensor][1]


class CpuBackend(AttentionBackend):
    """Attention over a `KVPool` in host memory.

    Models over arrays attend with their own threads, those of torch's operations with torch's.
    """

    name = "cpu"
    strength = "reads the blocks in place, in Rust"
    takes_arrays = True
    reads_tables = False

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.caches = _caches_of(pool)
        self._threads = None if loaded_torch() is None else _torch_threads()
        self.tables = pool.layer_tables
        """The table of each layer."""
        self.readers = [self.tables.index(table) for table in sorted(set(self.tables))]
        """The first layer of each table."""
        full = [group for group, window in enumerate(pool.groups.windows) if window is None]
        self.shared_group = full[0] if full else None
        """Groups with a window share no blocks."""
        self.shares = [table.group == self.shared_group for table in pool.tables]
        """True for the tables of that group."""

    @property
    def threads(self) -> CpuAttention:
        """The kernel with torch's number of threads, for models that compute with torch."""
        if self._threads is None:
            self._threads = _torch_threads()
        return self._threads

    @staticmethod
    def obstacle(needs: AttentionNeeds) -> str | None:
        """See `AttentionBackend.obstacle`."""
        if needs.device.type != "cpu":
            return f"it runs on cpu, the device is {needs.device}"
        if needs.dtype not in ("float32", "bfloat16"):
            return f"it takes float32 and bfloat16, the model is in {needs.dtype}"
        if not CpuAttention.is_fast():
            return "this processor has no AVX2 with FMA"
        return None if needs.cache_dtype == "int8" else cache_dtype_obstacle(needs)

    def metadata(self, inputs: StepInputs, *, first_key: int = 0) -> "CpuMetadata":
        """Prepare a step; the sequences are checked here, once for all layers.

        For `first_key` see `GatherBackend.metadata`.
        """
        return CpuMetadata(self, inputs, first_key)


def _torch_threads() -> CpuAttention:
    import torch

    return CpuAttention(torch.get_num_threads(), openmp_runtime())


def _rows(tensor: "torch.Tensor") -> npt.NDArray[Any]:
    """`[T, heads, d]` for the kernel, which takes rows that are parts of longer ones."""
    dense = tensor.stride()[1:] == (tensor.shape[2], 1) and tensor.stride(0) > 0
    return array_of(tensor if dense else tensor.contiguous())


class CpuMetadata:
    """One step of the cpu backend."""

    def __init__(self, backend: CpuBackend, inputs: StepInputs, first_key: int = 0) -> None:
        self._backend, self._first_key = backend, first_key
        self._steps = []
        for at, tables in enumerate(inputs.host_block_tables):
            shared: dict[str, Int32Array] = {}
            if inputs.shared is not None and backend.shares[at]:
                prefixes = inputs.shared.prefixes
                if len(prefixes):  # the kernel reads these blocks once for several sequences
                    order = inputs.shared.order[: len(inputs.host_seq_lens)]
                    shared = {"order": order, "prefixes": prefixes}
            self._steps.append(
                CpuStep(
                    backend.caches[backend.readers[at]],
                    query_start_loc=inputs.host_query_start_loc,
                    seq_lens=inputs.host_seq_lens,
                    block_tables=tables,
                    slots=np.asarray(inputs.slot_mapping[at]),
                    **shared,
                )
            )
        self._angles: tuple[npt.NDArray[Any], ...] = ()
        """Cosines and sines as the kernel takes them, converted once for all layers."""
        self._angles_of: tuple[Any, ...] = ()

    def forward(self, layer: int, qkv: QKV, options: AttentionOptions) -> "torch.Tensor":
        """See `AttentionMetadata.forward`."""
        query, key, value = qkv
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        rotation = None if options.rotation is None else self._rotation(options.rotation)
        arrays = _rows(query), _rows(key), _rows(value), array_of(out)
        sinks = None
        if options.sinks is not None:
            sinks = options.sinks.detach().float().contiguous().numpy()
        own = KernelOptions(options.scaling, options.sliding_window, options.softcap, sinks)
        self.attend(layer, arrays, own, rotation, self._backend.threads)
        return out

    def attend(
        self,
        layer: int,
        arrays: tuple[npt.NDArray[Any], ...],
        options: KernelOptions,
        rotation: tuple[Any, ...] | None,
        threads: CpuAttention,
    ) -> None:
        """Attend with `arrays`: query, key, value and the result, as `forward` has them.

        They have the cache's dtype, bfloat16 as its bits, and rows that are contiguous. `rotation`:
        cosines, sines `[T, columns]`, and a layer's `rotation_numbers`. `threads` compute.
        """
        backend = self._backend
        threads.forward(
            self._steps[backend.tables[layer]],
            backend.caches[layer],
            *arrays,
            scaling=options.scaling,
            sliding_window=options.sliding_window,
            first_key=self._first_key,
            softcap=options.softcap,
            sinks=options.sinks,
            rotation=rotation,
        )

    def _rotation(self, rotation: Rotation) -> tuple[Any, ...]:
        """The rotation as the kernel takes it.

        In a graph every layer has a tensor of angles over one memory. The arrays are views of that
        memory, so they stay right when a graph writes there.
        """
        cos, sin = rotation.cos, rotation.sin
        angles: tuple[npt.NDArray[Any], ...]
        if cos.is_contiguous() and sin.is_contiguous():
            memory = (cos.data_ptr(), sin.data_ptr(), cos.shape, cos.dtype)
            if memory != self._angles_of:
                self._angles_of, self._angles = memory, (array_of(cos), array_of(sin))
            angles = self._angles
        else:
            angles = (array_of(cos.contiguous()), array_of(sin.contiguous()))
        return *angles, *rotation_numbers(rotation.layout, rotation.norm)


def rotation_numbers(layout: RotaryLayout, norm: HeadNorm | None) -> tuple[Any, ...]:
    """The kernel's arguments for a rotation besides its angles; the same in every step."""
    weights = None
    if norm is not None:
        arrays = (array_of(weight.detach()) for weight in (norm.query_weight, norm.key_weight))
        weights = (*arrays, norm.eps, norm.offset)
    return layout.size, layout.order == "pairs", layout.step, weights
