"""Attention by flashinfer: its paged wrappers, planned once per step and kind of layer.

Written against flashinfer-python 0.6.18 to 0.7.4. Leading sequences with one new token are planned
apart. Their kernels are those of prefills, which use tensor cores and serve any number of
query heads per KV head. Outside of graphs they are planned by the prefill wrapper, too: the decode
wrapper copies from pageable memory. Every wrapper names its kernels, so a kind of layer needs one
compiled module. Sinks, which the fa2 and fa3 kernels ignore, are added from the logarithm of the
sum under the softmax, which is in base 2 here.
"""

import importlib
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pyengine.attention.backend import QKV, AttentionBackend, AttentionOptions, StepInputs
from pyengine.attention.cascade import MAX_PREFIXES, Cascade, cascade_of, max_saved_tokens
from pyengine.attention.needs import (
    FLOAT8_DTYPES,
    AttentionNeeds,
    cuda_obstacle,
    equal_dims_obstacle,
    half_obstacle,
    int8_cache_obstacle,
)
from pyengine.attention.paged import (
    KVWriter,
    PageLayout,
    PageTable,
    apply_sinks,
    cumulative,
    leading_decodes,
    window_left,
)
from pyengine.kv_cache.pool import KVPool
from pyengine.utils.devices import for_torch
from pyengine.utils.host_copy import upload

_PLAN_BUFFER = "_pin_memory_int_workspace_buffer"
"""The attribute in which a wrapper keeps the pinned memory that it plans in."""

Mark = Callable[[], Callable[[], bool]]
"""Records an event in the device's queue; the returned function is true once it has passed."""


def mark_in_stream() -> Callable[[], bool]:
    """Mark the current CUDA stream by an event. See `Mark`."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.query


def mark_at_once() -> Callable[[], bool]:
    """For a device that is the host: the event has always passed. See `Mark`."""
    return lambda: True


class PlanMemory:
    """Pinned memory that wrappers plan in.

    `plan` queues a copy of such memory to the device, without a way to see when that is done, and
    the next step may be planned before. So each plan gets memory whose last copy is done.
    """

    def __init__(self, mark: Mark) -> None:
        self._mark = mark
        self._in_use: deque[tuple[torch.Tensor, Callable[[], bool]]] = deque()

    def plan(self, wrapper: Any, plan: Callable[[], object]) -> None:
        """Call `plan`, which plans `wrapper`, in memory that no earlier plan still needs."""
        memory = self._free(getattr(wrapper, _PLAN_BUFFER))
        setattr(wrapper, _PLAN_BUFFER, memory)
        plan()
        self._in_use.append((memory, self._mark()))

    def _free(self, own: torch.Tensor) -> torch.Tensor:
        if self._in_use and self._in_use[0][1]():
            memory, _ = self._in_use.popleft()
            return memory
        return torch.empty_like(own, pin_memory=own.is_pinned())


class GraphPages:
    """The pages of a group's sequences on the device, in memory that stays in place.

    `indptr`, `last_page_len` and `indices` are consecutive, so a step copies them at once.
    """

    def __init__(self, memory: torch.Tensor, batch: int) -> None:
        self.batch = batch
        self._memory = memory
        self.indptr = memory[: batch + 1]
        self.last_page_len = memory[batch + 1 : 2 * batch + 1]
        self.indices = memory[2 * batch + 1 :]

    @staticmethod
    def size(batch: int, width: int) -> int:
        """Elements for `batch` sequences of up to `width` pages."""
        return 2 * batch + 1 + batch * width

    def fill(self, pages: PageTable) -> None:
        """Copy a step's pages to the device."""
        packed = np.concatenate((pages.indptr, pages.last_page_len, pages.indices))
        self._memory[: len(packed)].copy_(upload(packed, self._memory.device))


class GraphPrefixes:
    """The shared prefixes of a decode step on the device, in memory that stays in place.

    The rows of a prefix must be adjacent: `rows` `[B]` is the order in which the kernel reads the
    step's rows, `inverse` `[B]` the way back. `is_shared` `[B]` are the rows that have a prefix.
    The others come last and read the null block: the kernel reads the same number of rows in every
    step. `size` prefixes are planned, of which some may have no rows.
    """

    def __init__(self, memory: "PrefixMemory", batch: int) -> None:
        self.size = _max_prefixes(batch) + 1
        self._batch = batch
        self._rows = memory.rows[: 9 * batch]
        words = self._rows[: 8 * batch].view(torch.int32)
        self.rows, self.inverse = words[:batch], words[batch:]
        self.is_shared = self._rows[8 * batch :].view(torch.bool)
        self.buffers = {
            "qo_indptr_buf": memory.starts[: self.size + 1],
            "paged_kv_indptr_buf": memory.indptr[: self.size + 1],
            "paged_kv_indices_buf": memory.indices,
            "paged_kv_last_page_len_buf": memory.last_page_len[: self.size],
        }

    def fill(self, cascade: Cascade | None, null_block: int, block_size: int) -> "_Rows":
        """Copy the order of the rows to the device; returns the rows and pages to plan."""
        shared = np.zeros(0, np.int64) if cascade is None else cascade.rows
        is_shared = np.zeros(self._batch, np.bool_)
        is_shared[shared] = True
        rows = np.concatenate((shared, np.flatnonzero(~is_shared))).astype(np.int32)
        inverse = np.empty_like(rows)
        inverse[rows] = np.arange(self._batch, dtype=np.int32)
        packed = np.concatenate([array.view(np.uint8) for array in (rows, inverse, is_shared)])
        self._rows.copy_(upload(packed, self._rows.device))
        return _with_rest(cascade, self.size, self._batch, null_block, block_size)


def _with_rest(
    cascade: Cascade | None, size: int, batch: int, null_block: int, block_size: int
) -> "_Rows":
    """The prefixes of `cascade`, others without rows, and one for the rest of the rows."""
    counts, blocks = np.zeros(size, np.int32), np.zeros(size, np.int32)
    indices = np.full(1, null_block, np.int32)
    if cascade is not None:
        used = len(cascade.lengths)
        counts[:used], blocks[:used] = np.diff(cascade.starts), cascade.lengths // block_size
        indices = np.concatenate((cascade.pages.indices, indices))
    counts[-1], blocks[-1] = batch - counts.sum(), 1
    pages = PageTable(cumulative(blocks), indices, np.full(size, block_size, np.int32))
    return _Rows(cumulative(counts), blocks * block_size, pages)


@dataclass(frozen=True, slots=True)
class PrefixMemory:
    """The memory of `GraphPrefixes`, the same for graphs of all sizes."""

    rows: torch.Tensor
    starts: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor

    @classmethod
    def of(cls, batch: int, width: int, device: torch.device) -> "PrefixMemory":
        """Memory for `batch` rows, and prefixes of up to `width` pages."""
        size = _max_prefixes(batch) + 1
        starts, indptr, indices, last_page_len = (
            torch.zeros(length, dtype=torch.int32, device=device)
            for length in (size + 1, size + 1, size * width, size)
        )
        rows = torch.zeros(9 * batch, dtype=torch.uint8, device=device)
        return cls(rows, starts, indptr, indices, last_page_len)


def _max_prefixes(batch: int) -> int:
    """Maximum shared prefixes of `batch` sequences: each has two of them or more."""
    return min(MAX_PREFIXES, batch // 2)


_MIN_WORKSPACE = 16 << 20
_INT_WORKSPACE = 8 << 20  # bytes of a wrapper's plan on the device
_HEAD_DIMS = (64, 128, 256)
_COMPANIONS = {"tvm_ffi": "apache-tvm-ffi", "requests": "requests"}
"""Modules that flashinfer imports, and the packages that have them."""
_LN2 = math.log(2)
_KERNELS = "fa2"
"""The kernels of all wrappers.

On Hopper, flashinfer's "auto" takes "fa3" for prefills and for 8-bit caches: a second module for
each kind of layer, which takes minutes to compile. Prefills over pages were measured as fast by
"fa2" (flashinfer#1340), decodes 2.5 times as fast (flashinfer#2400).
"""
_WORTH_A_CASCADE = 2 << 30
"""Bytes of KV that shared blocks save in a step, from which they are read once. An estimate: what
five more kernels in each layer take, at 3 TB/s."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers that one planned wrapper serves."""

    table: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None
    softcap: float | None
    scaling: float


def workspace_bytes(kind: _Kind, processors: int, max_decodes: int, max_prefixes: int = 0) -> int:
    """Bytes of the kernels' workspace for sequences whose keys are split over several blocks.

    flashinfer splits keys as long as that keeps a GPU of `processors` busy, and in a graph reserves
    a part for each of `max_decodes` sequences. A part is a tile of rows by all query heads, in
    float32, with the logarithm of its sum (`PrefillPlan` in its `scheduler.cuh`). Where the decodes
    read `max_prefixes` of several sequences, a tile has up to 128 rows.
    """
    group = kind.query_heads // kind.kv_heads
    decode_tile = 16 if group <= 16 else 64 if group <= 64 else 128
    split = 2 * processors // kind.kv_heads
    in_graph = -(-max_decodes * group // decode_tile) + max_decodes
    rows = max(split * 128, max(split, in_graph) * decode_tile)
    if max_prefixes:
        rows = max(rows, max_decodes * group + 128 * max_prefixes)
    return max(_MIN_WORKSPACE, 4 * kind.query_heads * rows * (kind.head_dim + 1) + 1024)


class FlashInferBackend(AttentionBackend):
    """Attention over a `KVPool` by flashinfer. Raises `ImportError` where that is missing."""

    name = "flashinfer"
    strength = "its paged kernels serve this model"
    is_uncertain = True
    supports_graphs = True
    reads_tables = False

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.writer = KVWriter(pool)
        self.library: Any = importlib.import_module("flashinfer")
        self._workspace = torch.empty(0, dtype=torch.uint8, device=for_torch(pool.device))
        self._processors = 1
        self._wrappers: dict[tuple[str, _Kind], Any] = {}
        self._int_workspaces: dict[tuple[str, _Kind], torch.Tensor] = {}
        self._pages: dict[tuple[int, bool], torch.Tensor] = {}
        self._prefixes: PrefixMemory | None = None
        self.shared_group = _shared_group(pool)
        self._token_bytes = sum(  # of layers that may share
            tensor[0, 0].nbytes
            for location, caches in zip(
                pool.groups.locations, zip(pool.keys, pool.values, strict=True), strict=True
            )
            for tensor in caches
            if location.group == self.shared_group
        )
        on_cuda = pool.device.type == "cuda"
        if on_cuda:
            properties = torch.cuda.get_device_properties(for_torch(pool.device))
            self._processors = properties.multi_processor_count
        self.plan_memory = PlanMemory(mark_in_stream if on_cuda else mark_at_once)

    @staticmethod
    def obstacle(needs: AttentionNeeds) -> str | None:
        """See `AttentionBackend.obstacle`."""
        obstacle = cuda_obstacle(needs, (8, 0))
        if obstacle is not None:
            return obstacle
        if "flashinfer" not in needs.packages:
            return "the package flashinfer-python is not installed"
        missing = [name for module, name in _COMPANIONS.items() if module not in needs.packages]
        if missing:
            names = " and ".join(missing)
            return f"flashinfer-python needs {names} beside it: pip install {' '.join(missing)}"
        for layer in needs.layers:
            if layer.head_dim_k not in _HEAD_DIMS:
                return f"its head sizes are 64, 128 and 256, the model has {layer.head_dim_k}"
            if needs.cache_dtype in FLOAT8_DTYPES and layer.head_dim_k == 64:
                return "it does not read an 8-bit KV cache with heads of size 64"
        return int8_cache_obstacle(needs) or half_obstacle(needs) or equal_dims_obstacle(needs)

    def metadata(self, inputs: StepInputs) -> "FlashInferMetadata":
        """Prepare a step; a wrapper is planned for the first layer of its kind."""
        return FlashInferMetadata(self, inputs)

    def graph_metadata(self, inputs: StepInputs) -> "FlashInferGraphMetadata":
        """Metadata with its own wrappers over fixed memory, which `refresh` plans again.

        The wrappers of all sizes share that memory, as one graph runs at a time: largest first.
        """
        return FlashInferGraphMetadata(self, inputs)

    def sharing_graph_metadata(self, inputs: StepInputs) -> "FlashInferGraphMetadata | None":
        """The same, for steps whose shared blocks are read once."""
        _, batch, width = inputs.block_tables.shape
        if not _max_prefixes(batch):
            return None
        if self._prefixes is None or len(self._prefixes.rows) < 9 * batch:
            self._prefixes = PrefixMemory.of(batch, width, for_torch(self.pool.device))
        return FlashInferGraphMetadata(self, inputs, GraphPrefixes(self._prefixes, batch))

    def shares(self, kind: _Kind) -> bool:
        """True for layers that see all blocks of a shared prefix."""
        return kind.table == self.shared_group and kind.window is None

    def cascade(self, inputs: StepInputs) -> Cascade | None:
        """See `AttentionBackend.cascade`."""
        size = self.pool.block_size
        if max_saved_tokens(inputs, size) * self._token_bytes < _WORTH_A_CASCADE:
            return None
        cascade = cascade_of(inputs, size)
        if cascade is None or cascade.saved_tokens * self._token_bytes < _WORTH_A_CASCADE:
            return None
        return cascade

    def wrapper(self, role: Literal["decodes", "prefills", "prefixes"], kind: _Kind) -> Any:
        """The wrapper for decodes, which have one new token, for prefills, or shared prefixes."""
        wrapper = self._wrappers.get((role, kind))
        if wrapper is None:
            workspace = self._workspace_for(kind, 0)
            make = self.library.BatchPrefillWithPagedKVCacheWrapper
            wrapper = self._wrappers[role, kind] = make(workspace, "NHD", backend=_KERNELS)
        return wrapper

    def graph_decoder(self, kind: _Kind, pages: GraphPages) -> Any:
        """A wrapper for a graph that reads `pages`."""
        workspace = self._workspace_for(kind, pages.batch)
        wrapper = self.library.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            backend=_KERNELS,
            paged_kv_indptr_buffer=pages.indptr,
            paged_kv_indices_buffer=pages.indices,
            paged_kv_last_page_len_buffer=pages.last_page_len,
        )
        wrapper.reset_workspace_buffer(workspace, self._int_workspace("decodes", kind))
        return wrapper

    def graph_sharer(self, kind: _Kind, prefixes: GraphPrefixes, batch: int) -> Any:
        """A wrapper for a graph of `batch` rows that reads `prefixes`."""
        workspace = self._workspace_for(kind, batch, prefixes.size)
        wrapper = self.library.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=True, backend=_KERNELS, **prefixes.buffers
        )
        wrapper.reset_workspace_buffer(workspace, self._int_workspace("prefixes", kind))
        return wrapper

    def _int_workspace(self, role: str, kind: _Kind) -> torch.Tensor:
        """The memory of a plan on the device, the same for graphs of all sizes."""
        if (role, kind) not in self._int_workspaces:
            self._int_workspaces[role, kind] = torch.empty(
                _INT_WORKSPACE, dtype=torch.uint8, device=for_torch(self.pool.device)
            )
        return self._int_workspaces[role, kind]

    def graph_pages(self, table: int, batch: int, width: int, *, own: bool) -> GraphPages:
        """Memory for the pages of a table in a graph, the same for graphs of all sizes.

        `own`: without those of shared prefixes.
        """
        size = GraphPages.size(batch, width)
        memory = self._pages.get((table, own))
        if memory is None or len(memory) < size:
            memory = torch.zeros(size, dtype=torch.int32, device=for_torch(self.pool.device))
            self._pages[table, own] = memory
        return GraphPages(memory, batch)

    def _workspace_for(self, kind: _Kind, max_decodes: int, max_prefixes: int = 0) -> torch.Tensor:
        """The workspace that all wrappers share for one layer at a time; zeros at first.

        Wrappers that were made before keep their smaller one.
        """
        size = workspace_bytes(kind, self._processors, max_decodes, max_prefixes)
        if len(self._workspace) < size:
            device = for_torch(self.pool.device)
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        return self._workspace

    def kind(self, layer: int, query: torch.Tensor, options: AttentionOptions) -> _Kind:
        """The kind of `layer`, for which a wrapper is planned."""
        spec = self.pool.specs[layer]
        return _Kind(
            table=self.pool.layer_tables[layer],
            query_heads=query.shape[1],
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim_k,
            dtype=query.dtype,
            window=options.sliding_window,
            softcap=options.softcap,
            scaling=options.scaling,
        )

    def plan_graph(self, wrapper: Any, kind: _Kind, pages: PageTable) -> None:
        """Plan a graph's wrapper over `pages` for the first time."""
        arguments = (*self._on_host(pages), *self._shape(kind))
        self.plan_memory.plan(wrapper, lambda: wrapper.plan(*arguments, **self._settings(kind)))

    def plan_rows(
        self, wrapper: Any, kind: _Kind, rows: "_Rows | Cascade", *, causal: bool = True
    ) -> None:
        """Plan a wrapper for some rows and their pages."""
        arguments = (self._pinned(rows.starts), *self._on_host(rows.pages), *self._shape(kind))
        settings = {
            "causal": causal,
            "seq_lens": self._pinned(rows.lengths),
            **self._settings(kind),
        }
        self.plan_memory.plan(wrapper, lambda: wrapper.plan(*arguments, **settings))

    def plan_again(self, wrapper: Any, kind: _Kind, pages: PageTable) -> None:
        """Plan a graph's wrapper again, over pages that are in place.

        `plan` itself would read every length in turn, and copy the pages again.
        """
        indptr, indices, last = map(
            torch.from_numpy, (pages.indptr, pages.indices, pages.last_page_len)
        )
        arguments = (wrapper, indptr, indices, last, *self._shape(kind))
        settings = {"global_override_indptr_cpu": indptr, **self._settings(kind)}
        self.plan_memory.plan(
            wrapper, lambda: self.library.fast_decode_plan(*arguments, **settings)
        )

    def _on_host(self, pages: PageTable) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        indices = upload(pages.indices, for_torch(self.pool.device))
        return self._pinned(pages.indptr), indices, self._pinned(pages.last_page_len)

    def _pinned(self, array: npt.NDArray[np.int32]) -> torch.Tensor:
        """On the host: wrappers read it there and copy it to the device without waiting."""
        host = torch.from_numpy(array)
        return host.pin_memory() if self.pool.device.type == "cuda" else host

    def _shape(self, kind: _Kind) -> tuple[int, int, int, int]:
        return kind.query_heads, kind.kv_heads, kind.head_dim, self.pool.block_size

    def run(
        self,
        wrapper: Any,
        layer: int,
        query: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Attention of `query` by a planned wrapper, into `out`."""
        if sinks is None:
            wrapper.run(query, self._cache(layer), out=out, **self._scales(layer))
            return
        attended, lse = self.run_with_lse(wrapper, layer, query)
        out.copy_(apply_sinks(attended, lse * _LN2, sinks))

    def run_with_lse(
        self, wrapper: Any, layer: int, query: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of `query` by a planned wrapper, and the logarithms of sums in base 2."""
        cache, scales = self._cache(layer), self._scales(layer)
        out = torch.empty_like(query)
        attended, lse = wrapper.run(query, cache, out=out, return_lse=True, **scales)
        return attended, lse

    def _cache(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pool.keys[layer], self.pool.values[layer]

    def _scales(self, layer: int) -> dict[str, float]:
        spec = self.pool.specs[layer]
        return {"k_scale": spec.scale_k, "v_scale": spec.scale_v}

    def _settings(self, kind: _Kind) -> dict[str, Any]:
        return {
            "window_left": window_left(kind.window),
            "logits_soft_cap": kind.softcap or 0.0,
            "sm_scale": kind.scaling,
            "q_data_type": kind.dtype,
            "kv_data_type": self.pool.keys[0].dtype,
        }


def _shared_group(pool: KVPool) -> int | None:
    """The first group that sees everything, if it has one table; it has the group's number then."""
    full = [group for group, window in enumerate(pool.groups.windows) if window is None]
    tables = [at for at, table in enumerate(pool.tables) if full and table.group == full[0]]
    return full[0] if full and tables == full[:1] else None


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of some sequences of a step, on the host: where each sequence's begin, the keys that
    they see, and the pages of those in one table."""

    starts: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    pages: PageTable


class _Planned(NamedTuple):
    """The wrappers for a kind of layer; None where a step has no rows for them.

    `shared_rows` are the rows of `sharer`, on the device.
    """

    decoder: Any
    prefiller: Any
    sharer: Any = None
    shared_rows: torch.Tensor | None = None


class FlashInferMetadata:
    """One step by flashinfer."""

    def __init__(self, backend: FlashInferBackend, inputs: StepInputs) -> None:
        self._backend = backend
        self._inputs = inputs
        self._slots = backend.writer.slots(inputs.slot_mapping)
        self._decodes = leading_decodes(inputs.host_query_start_loc)
        self._cascade = backend.cascade(inputs)
        self._rows: dict[tuple[int, bool], tuple[_Rows, _Rows]] = {}
        self._planned: dict[_Kind, _Planned] = {}

    def forward(self, layer: int, qkv: QKV, options: AttentionOptions) -> torch.Tensor:
        """See `AttentionMetadata.forward`."""
        backend, decodes = self._backend, self._decodes
        kind = backend.kind(layer, qkv[0], options)
        query = backend.writer.write(layer, qkv, self._slots[kind.table], options.rotation)
        planned = self._wrappers(kind)
        query = query.contiguous()
        if planned.shared_rows is not None:
            return self._attend_sharing(planned, planned.shared_rows, layer, query, options.sinks)
        out = torch.empty_like(query)
        if planned.decoder is not None:
            backend.run(planned.decoder, layer, query[:decodes], options.sinks, out[:decodes])
        if planned.prefiller is not None:
            backend.run(planned.prefiller, layer, query[decodes:], options.sinks, out[decodes:])
        return out

    def _attend_sharing(
        self,
        planned: _Planned,
        rows: torch.Tensor,
        layer: int,
        query: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        backend, decodes = self._backend, self._decodes
        parts = [
            backend.run_with_lse(wrapper, layer, part)
            for wrapper, part in (
                (planned.decoder, query[:decodes]),
                (planned.prefiller, query[decodes:]),
            )
            if wrapper is not None
        ]
        out, lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        shared = backend.run_with_lse(planned.sharer, layer, query.index_select(0, rows))
        own = out.index_select(0, rows), lse.index_select(0, rows)
        backend.library.merge_state_in_place(*own, *shared)
        out.index_copy_(0, rows, own[0])
        lse.index_copy_(0, rows, own[1])
        return out if sinks is None else apply_sinks(out, lse * _LN2, sinks)

    def _wrappers(self, kind: _Kind) -> _Planned:
        planned = self._planned.get(kind)
        if planned is None:
            backend, decoder, prefiller = self._backend, None, None
            cascade = self._cascade if backend.shares(kind) else None
            decoding, prefilling = self._rows_of(kind.table, cascade)
            if len(decoding.lengths):
                decoder = backend.wrapper("decodes", kind)
                backend.plan_rows(decoder, kind, decoding)
            if len(prefilling.lengths):
                prefiller = backend.wrapper("prefills", kind)
                backend.plan_rows(prefiller, kind, prefilling)
            planned = _Planned(decoder, prefiller)
            if cascade is not None:
                sharer = backend.wrapper("prefixes", kind)
                backend.plan_rows(sharer, kind, cascade, causal=False)
                rows = upload(cascade.rows, for_torch(backend.pool.device))
                planned = planned._replace(sharer=sharer, shared_rows=rows)
            self._planned[kind] = planned
        return planned

    def _rows_of(self, table: int, cascade: Cascade | None) -> tuple[_Rows, _Rows]:
        """Leading sequences with one new token, and the others, without blocks of `cascade`."""
        key = table, cascade is not None
        if key not in self._rows:
            inputs, size = self._inputs, self._backend.pool.block_size
            starts, tables = inputs.host_query_start_loc, inputs.host_block_tables[table]
            parts = []
            for part in (slice(self._decodes), slice(self._decodes, None)):
                lengths = inputs.host_seq_lens[part]
                first = None if cascade is None else cascade.own_blocks[part]
                layout = PageLayout.of(lengths, tables.shape[1], size, first)
                pages = layout.pages(tables[part])
                if first is not None:
                    lengths = lengths - first * size
                begins = starts[part.start or 0 : None if part.stop is None else part.stop + 1]
                parts.append(_Rows(begins - begins[0], lengths, pages))
            self._rows[key] = parts[0], parts[1]
        return self._rows[key]


class FlashInferGraphMetadata:
    """A decode step by flashinfer whose wrappers keep their memory from step to step."""

    def __init__(
        self,
        backend: FlashInferBackend,
        inputs: StepInputs,
        prefixes: GraphPrefixes | None = None,
    ) -> None:
        """With `prefixes`, shared blocks are read once."""
        self._backend = backend
        self._inputs = inputs
        self._slots = inputs.slot_mapping
        _, self._batch, self._width = inputs.block_tables.shape  # the host's are as the step
        self._prefixes = prefixes
        self._decoders: dict[_Kind, Any] = {}
        self._sharers: dict[_Kind, Any] = {}
        self._fixed: dict[tuple[int, bool], GraphPages] = {}
        """The pages of a table, and those without shared prefixes."""

    def refresh(self, inputs: StepInputs) -> None:
        """See `GraphMetadata.refresh`."""
        backend = self._backend
        self._inputs = inputs
        layouts = {own: self._layout(own) for own in {own for _, own in self._fixed}}
        tables = inputs.host_block_tables
        pages = {(table, own): layouts[own].pages(tables[table]) for table, own in self._fixed}
        for key, fixed in self._fixed.items():
            fixed.fill(pages[key])
        for kind, decoder in self._decoders.items():
            backend.plan_again(decoder, kind, pages[kind.table, self._shares(kind)])
        self._plan_sharers(self._sharers)

    def forward(self, layer: int, qkv: QKV, options: AttentionOptions) -> torch.Tensor:
        """See `AttentionMetadata.forward`."""
        backend, prefixes, sinks = self._backend, self._prefixes, options.sinks
        kind = backend.kind(layer, qkv[0], options)
        query = backend.writer.write_step(layer, qkv, self._slots, options.rotation)
        if kind not in self._decoders:
            self._begin(kind)
        decoder = self._decoders[kind]
        query = query.contiguous()
        if prefixes is None or kind not in self._sharers:
            out = torch.empty_like(query)
            backend.run(decoder, layer, query, sinks, out)
            return out
        out, lse = backend.run_with_lse(decoder, layer, query)
        by_prefix = query.index_select(0, prefixes.rows)
        shared = backend.run_with_lse(self._sharers[kind], layer, by_prefix)
        of_rows = (tensor.index_select(0, prefixes.inverse) for tensor in shared)
        backend.library.merge_state_in_place(out, lse, *of_rows, prefixes.is_shared)
        return out if sinks is None else apply_sinks(out, lse * _LN2, sinks)

    def _begin(self, kind: _Kind) -> None:
        """Make and plan the wrappers of a kind of layer."""
        backend, shares = self._backend, self._shares(kind)
        key = kind.table, shares
        if key not in self._fixed:
            self._fixed[key] = backend.graph_pages(kind.table, self._batch, self._width, own=shares)
        decoder = self._decoders[kind] = backend.graph_decoder(kind, self._fixed[key])
        tables = self._inputs.host_block_tables[kind.table]
        backend.plan_graph(decoder, kind, self._layout(shares).pages(tables))
        if self._prefixes is not None and shares:
            sharer = backend.graph_sharer(kind, self._prefixes, self._batch)
            self._sharers[kind] = sharer
            self._plan_sharers({kind: sharer})

    def _shares(self, kind: _Kind) -> bool:
        return self._prefixes is not None and self._backend.shares(kind)

    def _layout(self, own: bool) -> PageLayout:
        """Where pages are in the tables of the step; `own`: without those of shared prefixes."""
        inputs, size = self._inputs, self._backend.pool.block_size
        first = inputs.cascade.own_blocks if own and inputs.cascade is not None else None
        width = inputs.host_block_tables.shape[2]
        return PageLayout.of(inputs.host_seq_lens, width, size, first)

    def _plan_sharers(self, sharers: Mapping[_Kind, Any]) -> None:
        if self._prefixes is None:
            return
        pool = self._backend.pool
        rows = self._prefixes.fill(self._inputs.cascade, pool.num_blocks, pool.block_size)
        for kind, sharer in sharers.items():
            self._backend.plan_rows(sharer, kind, rows, causal=False)
