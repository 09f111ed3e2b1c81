"""Attention on the CPU in float32 or bfloat16: the Rust kernel.

The kernel (`rust/cpu-kernels`) rotates queries and keys if a layer leaves that to it, writes the
new keys and values into their slots and attends with all rows of the step, reading the blocks in
place. Blocks that several sequences share are read once for all of them. A row has the same bits in
every batch.
"""

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from pyengine.attention.backend import (
    AttentionOptions,
    GraphPlan,
    HeadNorm,
    Int32Array,
    Rotation,
    StepInputs,
)
from pyengine.attention.needs import AttentionNeeds, cache_dtype_obstacle, dtype_name
from pyengine.errors import ConfigurationError
from pyengine.kv_cache import CpuAttention, CpuCache, CpuStep
from pyengine.kv_cache.pool import KVPool
from pyengine.utils.host_copy import cpu_array
from pyengine.utils.openmp import openmp_runtime


def cpu_obstacle(needs: AttentionNeeds) -> str | None:
    """Why the kernel cannot serve; None: it can."""
    if needs.device.type != "cpu":
        return f"it runs on cpu, the device is {needs.device}"
    if needs.dtype not in (torch.float32, torch.bfloat16):
        return f"it takes float32 and bfloat16, the model is in {dtype_name(needs.dtype)}"
    if not CpuAttention.is_fast():
        return "this processor has no AVX2 with FMA"
    return cache_dtype_obstacle(needs)


class CpuBackend:
    """Attention over a `KVPool` in host memory, with as many threads as torch has."""

    name = "cpu"
    supports_graphs = False
    reads_tables = False

    def __init__(self, pool: KVPool) -> None:
        threads = CpuAttention(torch.get_num_threads(), openmp_runtime())
        self._memory = _Memory(pool, pool.cpu_caches, threads)
        full = [group for group, window in enumerate(pool.groups.windows) if window is None]
        self.shared_group: int | None = full[0] if full else None
        """Groups with a window share no blocks."""

    def plan(self, inputs: StepInputs) -> "CpuPlan":
        """Prepare a step; the sequences are checked here, once for all layers."""
        return CpuPlan(self._memory, inputs)

    def graph_plan(self, inputs: StepInputs) -> GraphPlan:
        """Raises `ConfigurationError`: there is no GPU to capture for."""
        raise ConfigurationError("attention_backend='cpu' cannot be captured in a CUDA graph")


def _rows(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """`[T, heads, d]` for the kernel, which takes rows that are parts of longer ones."""
    dense = tensor.stride()[1:] == (tensor.shape[2], 1) and tensor.stride(0) > 0
    return cpu_array(tensor if dense else tensor.contiguous())


class _Angles:
    """Cosines and sines of a step as the kernel takes them, converted once for all layers."""

    def __init__(self) -> None:
        self._where: tuple[Any, ...] = ()
        self._arrays: tuple[npt.NDArray[Any], ...] = ()

    def arrays(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[npt.NDArray[Any], ...]:
        """The arrays of both, `[T, columns]`. In a graph, every layer has a tensor over one memory.

        The arrays are views of that memory, so they stay right when a graph writes there.
        """
        if not (cos.is_contiguous() and sin.is_contiguous()):
            return tuple(cpu_array(angles.contiguous()) for angles in (cos, sin))
        where = (cos.data_ptr(), sin.data_ptr(), cos.shape, cos.dtype)
        if where != self._where:
            self._where, self._arrays = where, (cpu_array(cos), cpu_array(sin))
        return self._arrays


def _weights(norm: HeadNorm | None) -> tuple[Any, ...] | None:
    """The norm as the kernel takes it."""
    if norm is None:
        return None
    query, key = (cpu_array(weight.detach()) for weight in (norm.query_weight, norm.key_weight))
    return query, key, norm.eps, norm.offset


def _shared(inputs: StepInputs, group: int) -> dict[str, Int32Array]:
    """The blocks that sequences share in this group, for the kernel to read once."""
    shared = inputs.shared
    if shared is None or shared.group != group or not len(shared.prefixes):
        return {}
    return {"order": shared.order[: len(inputs.host_seq_lens)], "prefixes": shared.prefixes}


@dataclass(frozen=True, slots=True)
class _Memory:
    """Buffers that all steps share."""

    pool: KVPool
    caches: list[CpuCache]
    threads: CpuAttention


class CpuPlan:
    """One step of the cpu backend."""

    def __init__(self, memory: _Memory, inputs: StepInputs) -> None:
        self._memory, self._angles = memory, _Angles()
        self._steps = [
            CpuStep(
                memory.caches[0],
                query_start_loc=inputs.host_query_start_loc,
                seq_lens=inputs.host_seq_lens,
                block_tables=tables,
                slots=slots.numpy(),
                **_shared(inputs, group),
            )
            for group, (tables, slots) in enumerate(
                zip(inputs.host_block_tables, inputs.slot_mapping, strict=True)
            )
        ]

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See `AttentionPlan.forward`."""
        memory = self._memory
        group = memory.pool.groups.places[layer].group
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        sinks = options.sinks
        memory.threads.forward(
            self._steps[group],
            memory.caches[layer],
            _rows(query),
            _rows(key),
            _rows(value),
            cpu_array(out),
            scaling=options.scaling,
            sliding_window=options.sliding_window,
            softcap=options.softcap,
            sinks=None if sinks is None else sinks.detach().float().contiguous().numpy(),
            rotation=None if options.rotation is None else self._rotation(options.rotation),
        )
        return out

    def _rotation(self, rotation: Rotation) -> tuple[Any, ...]:
        """The rotation as the kernel takes it."""
        layout, arrays = rotation.layout, self._angles.arrays(rotation.cos, rotation.sin)
        are_neighbours = layout.order == "pairs"
        return *arrays, layout.size, are_neighbours, layout.step, _weights(rotation.norm)
