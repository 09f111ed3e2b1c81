"""Attention on the CPU in float32 or bfloat16: the Rust kernel for short rows, SDPA for prefills.

The kernel (`rust/cpu-attention`) writes the new keys and values into their slots and attends with
the sequences that have few new tokens, reading the blocks where they lie. Longer prefills are
matrix products, at which torch's SDPA is good: those go the way of the gather backend. Blocks that
several sequences share are read once for all of them; what a row gives keeps its bits.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from pyengine.attention.backend import AttentionOptions, GraphPlan, Int32Array, StepInputs
from pyengine.attention.gather import Scratch, SpanPiece, StepLayout
from pyengine.attention.needs import AttentionNeeds, cache_dtype_obstacle, dtype_name
from pyengine.cache import CpuAttention, CpuCache, CpuStep
from pyengine.cache.kv_pool import KVPool
from pyengine.core.errors import ConfigurationError


def cpu_obstacle(needs: AttentionNeeds) -> str | None:
    """Why the kernel cannot serve; None: it can."""
    if needs.device.type != "cpu":
        return f"it runs on cpu, the device is {needs.device}"
    if needs.dtype not in (torch.float32, torch.bfloat16):
        return f"it takes float32 and bfloat16, the model is in {dtype_name(needs.dtype)}"
    if not CpuAttention.is_fast():
        return "this processor has no AVX2 with FMA"
    return cache_dtype_obstacle(needs)


MOST_ROWS = 9
"""New tokens of a sequence up to which the kernel attends, as a decode with eight drafts has them;
beyond, SDPA is faster."""


class CpuBackend:
    """Attention over a `KVPool` in host memory, with as many threads as torch has."""

    name = "cpu"
    supports_graphs = False

    def __init__(self, pool: KVPool) -> None:
        caches = [
            CpuCache(_array(keys), _array(values))
            for keys, values in zip(pool.keys, pool.values, strict=True)
        ]
        threads = CpuAttention(torch.get_num_threads(), _openmp())
        self._memory = _Memory(pool, caches, threads, Scratch(pool.device))
        full = [group for group, window in enumerate(pool.groups.windows) if window is None]
        self.shared_group: int | None = full[0] if full else None
        """In a group with a window nothing is shared."""

    def plan(self, inputs: StepInputs) -> "CpuPlan":
        """Prepare a step; the sequences are checked here, once for all layers."""
        return CpuPlan(self._memory, inputs)

    def graph_plan(self, inputs: StepInputs) -> GraphPlan:
        """Raises `ConfigurationError`: there is no GPU to capture for."""
        raise ConfigurationError("attention_backend='cpu' cannot be captured in a CUDA graph")


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The same memory for the kernel: bfloat16, which NumPy lacks, as its bits."""
    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    return bits.numpy()


def _openmp() -> Path | None:
    """The OpenMP runtime that torch has brought along and computes by; None: it has none."""
    return next((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"), None)


def _shared(inputs: StepInputs, group: int) -> dict[str, Int32Array]:
    """What the sequences share in this group, for the kernel to read it once."""
    shared = inputs.shared
    if shared is None or shared.group != group or not len(shared.prefixes):
        return {}
    return {"order": shared.order[: len(inputs.host_seq_lens)], "prefixes": shared.prefixes}


@dataclass(frozen=True, slots=True)
class _Memory:
    """What all steps share."""

    pool: KVPool
    caches: list[CpuCache]
    threads: CpuAttention
    scratch: Scratch


class CpuPlan:
    """One step of the cpu backend."""

    def __init__(self, memory: _Memory, inputs: StepInputs) -> None:
        self._memory = memory
        self._layouts = [
            StepLayout(
                inputs.host_query_start_loc, inputs.host_seq_lens, tables, memory.pool.block_size
            )
            for tables in inputs.host_block_tables
        ]
        self._steps = [
            CpuStep(
                memory.caches[0],
                query_start_loc=layout.query_start_loc,
                seq_lens=layout.seq_lens,
                block_tables=layout.block_tables,
                slots=slots.numpy(),
                most_rows=MOST_ROWS,
                **_shared(inputs, group),
            )
            for group, (layout, slots) in enumerate(
                zip(self._layouts, inputs.slot_mapping, strict=True)
            )
        ]
        self._spans: dict[tuple[int, int | None], list[SpanPiece]] = {}

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
        query, sinks = query.contiguous(), options.sinks
        memory.threads.forward(
            self._steps[group],
            memory.caches[layer],
            _array(query),
            _array(key.contiguous()),
            _array(value.contiguous()),
            _array(out),
            scaling=options.scaling,
            sliding_window=options.sliding_window,
            softcap=options.softcap,
            sinks=None if sinks is None else sinks.detach().float().contiguous().numpy(),
        )
        keys, values = memory.pool.keys[layer], memory.pool.values[layer]
        for piece in self._pieces(group, options.sliding_window):
            k, v = piece.gather(keys, values, memory.scratch)
            piece.attend(query, k, v, options, out)
        return out

    def _pieces(self, group: int, window: int | None) -> list[SpanPiece]:
        """The rows that are left to SDPA, made when a layer first asks for its window."""
        pieces = self._spans.get((group, window))
        if pieces is None:
            spans = self._layouts[group].spans(window, more_than=MOST_ROWS)
            pieces = [SpanPiece(span, window, self._memory.pool.device) for span in spans]
            self._spans[group, window] = pieces
        return pieces
