"""Attention by flashinfer: its paged wrappers, planned once per step and kind of layer.

Written against flashinfer-python 0.6.18. Its kernels are compiled when they are first needed.
Leading sequences with one new token go to the decode wrapper, the rest to the prefill wrapper.
Decoding uses tensor cores, for then both share their kernels and any number of query heads per
KV head is served. The `sinks` that the wrappers take are ignored by their fa2 and fa3 kernels;
sinks are added from the logarithm of the sum under the softmax, which is in base 2 here.
"""

import importlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pyengine.attention.backend import AttentionOptions, StepInputs
from pyengine.attention.needs import (
    FLOAT8_DTYPES,
    AttentionNeeds,
    cuda_obstacle,
    equal_dims_obstacle,
    half_obstacle,
)
from pyengine.attention.paged import (
    KVWriter,
    PageTable,
    apply_sinks,
    leading_decodes,
    page_table,
    window_left,
)
from pyengine.cache.kv_pool import KVPool
from pyengine.cache.memory import upload

_WORKSPACE_BYTES = 256 << 20
_HEAD_DIMS = (64, 128, 256)
_PLAN_BUFFER = "_pin_memory_int_workspace_buffer"
"""The attribute in which a wrapper keeps the pinned memory that it plans in."""
_COMPANIONS = {"tvm_ffi": "apache-tvm-ffi", "requests": "requests"}
"""What flashinfer imports: modules, and the packages that have them."""
_LN2 = math.log(2)


def flashinfer_obstacle(needs: AttentionNeeds) -> str | None:
    """Why flashinfer cannot serve; None: it can."""
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
    return half_obstacle(needs) or equal_dims_obstacle(needs)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers that one planned wrapper serves."""

    group: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None
    softcap: float | None
    scaling: float


Mark = Callable[[], Callable[[], bool]]
"""Marks a place in the device's queue; what it returns says whether the device has come there."""


def mark_in_stream() -> Callable[[], bool]:
    """Mark the current CUDA stream by an event. See `Mark`."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.query


def mark_at_once() -> Callable[[], bool]:
    """The device is the host, which is always there. See `Mark`."""
    return lambda: True


class PlanMemory:
    """Pinned memory that wrappers plan in.

    `plan` writes into such memory and queues its copy to the device, without a word of when that is
    done; the wrapper would write into the same memory for the next step, which may be planned while
    the copy still waits. So each plan gets memory whose last copy has been made. There are as many
    pieces as there are plans under way.
    """

    def __init__(self, mark: Mark) -> None:
        self._mark = mark
        self._lent: deque[tuple[torch.Tensor, Callable[[], bool]]] = deque()

    def plan(self, wrapper: Any, *arguments: Any, **settings: Any) -> None:
        """`wrapper.plan`, in memory that no earlier plan needs any more."""
        memory = self._free(getattr(wrapper, _PLAN_BUFFER))
        setattr(wrapper, _PLAN_BUFFER, memory)
        wrapper.plan(*arguments, **settings)
        self._lent.append((memory, self._mark()))

    def _free(self, own: torch.Tensor) -> torch.Tensor:
        if self._lent and self._lent[0][1]():
            memory, _ = self._lent.popleft()
            return memory
        return torch.empty_like(own, pin_memory=own.is_pinned())


class FlashInferBackend:
    """Attention over a `KVPool` by flashinfer. Raises `ImportError` where that is missing."""

    name = "flashinfer"
    supports_graphs = True
    shared_group = None

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.writer = KVWriter(pool)
        self.library: Any = importlib.import_module("flashinfer")
        # of all wrappers: it holds intermediate results of one layer; zeros at first
        self.workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._wrappers: dict[tuple[str, _Kind], Any] = {}
        on_cuda = pool.device.type == "cuda"
        self.plan_memory = PlanMemory(mark_in_stream if on_cuda else mark_at_once)

    def plan(self, inputs: StepInputs) -> "FlashInferPlan":
        """Prepare a step; a wrapper is planned when a layer of its kind first asks."""
        return FlashInferPlan(self, inputs)

    def graph_plan(self, inputs: StepInputs) -> "FlashInferGraphPlan":
        """Wrappers of its own, over fixed memory, that `refresh` plans anew."""
        return FlashInferGraphPlan(self, inputs)

    def decoder(self, kind: _Kind) -> Any:
        """The wrapper for sequences with one new token."""
        wrapper = self._wrappers.get(("decode", kind))
        if wrapper is None:
            wrapper = self.library.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace, "NHD", use_tensor_cores=True
            )
            self._wrappers["decode", kind] = wrapper
        return wrapper

    def prefiller(self, kind: _Kind) -> Any:
        """The wrapper for all others."""
        wrapper = self._wrappers.get(("prefill", kind))
        if wrapper is None:
            wrapper = self.library.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD")
            self._wrappers["prefill", kind] = wrapper
        return wrapper

    def kind(self, layer: int, query: torch.Tensor, options: AttentionOptions) -> _Kind:
        """What `layer` needs planned."""
        spec = self.pool.specs[layer]
        return _Kind(
            group=self.pool.groups.places[layer].group,
            query_heads=query.shape[1],
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim_k,
            dtype=query.dtype,
            window=options.sliding_window,
            softcap=options.softcap,
            scaling=options.scaling,
        )

    def plan_decode(self, wrapper: Any, kind: _Kind, pages: PageTable) -> None:
        """Plan a decode wrapper over `pages`."""
        self.plan_memory.plan(
            wrapper,
            torch.from_numpy(pages.indptr),
            upload(pages.indices, self.pool.device),
            torch.from_numpy(pages.last_page_len),
            kind.query_heads,
            kind.kv_heads,
            kind.head_dim,
            self.pool.block_size,
            **self._settings(kind),
        )

    def plan_prefill(
        self, wrapper: Any, kind: _Kind, starts: torch.Tensor, pages: PageTable
    ) -> None:
        """Plan a prefill wrapper over `pages`; `starts` is where each sequence's rows begin."""
        self.plan_memory.plan(
            wrapper,
            starts,
            torch.from_numpy(pages.indptr),
            upload(pages.indices, self.pool.device),
            torch.from_numpy(pages.last_page_len),
            kind.query_heads,
            kind.kv_heads,
            kind.head_dim,
            self.pool.block_size,
            causal=True,
            **self._settings(kind),
        )

    def run(
        self,
        wrapper: Any,
        layer: int,
        query: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Attention of `query` by a planned wrapper, into `out`."""
        spec = self.pool.specs[layer]
        cache = (self.pool.keys[layer], self.pool.values[layer])
        scales = {"k_scale": spec.scale_k, "v_scale": spec.scale_v}
        if sinks is None:
            wrapper.run(query, cache, out=out, **scales)
            return
        attended, lse = wrapper.run(query, cache, return_lse=True, **scales)
        out.copy_(apply_sinks(attended, lse * _LN2, sinks))

    def _settings(self, kind: _Kind) -> dict[str, Any]:
        return {
            "window_left": window_left(kind.window),
            "logits_soft_cap": kind.softcap or 0.0,
            "sm_scale": kind.scaling,
            "q_data_type": kind.dtype,
            "kv_data_type": self.pool.keys[0].dtype,
        }


class FlashInferPlan:
    """One step by flashinfer."""

    def __init__(self, backend: FlashInferBackend, inputs: StepInputs) -> None:
        self._backend = backend
        self._slots = backend.writer.slots(inputs.slot_mapping)
        starts = inputs.host_query_start_loc
        self._decodes = decodes = leading_decodes(starts)
        self._starts = torch.from_numpy(starts[decodes:] - decodes)
        size = backend.pool.block_size
        lens = inputs.host_seq_lens
        self._decode_pages = [
            page_table(lens[:decodes], tables[:decodes], size)
            for tables in inputs.host_block_tables
        ]
        self._prefill_pages = [
            page_table(lens[decodes:], tables[decodes:], size)
            for tables in inputs.host_block_tables
        ]
        self._planned: dict[_Kind, tuple[Any, Any]] = {}

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See `AttentionPlan.forward`."""
        backend, decodes = self._backend, self._decodes
        kind = backend.kind(layer, query, options)
        backend.writer.write(layer, key, value, self._slots[kind.group])
        decoder, prefiller = self._wrappers(kind)
        query = query.contiguous()
        out = torch.empty_like(query)
        if decoder is not None:
            backend.run(decoder, layer, query[:decodes], options.sinks, out[:decodes])
        if prefiller is not None:
            backend.run(prefiller, layer, query[decodes:], options.sinks, out[decodes:])
        return out

    def _wrappers(self, kind: _Kind) -> tuple[Any, Any]:
        """The wrappers for this kind of layer, None where the step has no rows for one."""
        planned = self._planned.get(kind)
        if planned is None:
            backend, decoder, prefiller = self._backend, None, None
            if self._decodes:
                decoder = backend.decoder(kind)
                backend.plan_decode(decoder, kind, self._decode_pages[kind.group])
            if len(self._starts) > 1:
                prefiller = backend.prefiller(kind)
                pages = self._prefill_pages[kind.group]
                backend.plan_prefill(prefiller, kind, self._starts, pages)
            planned = self._planned[kind] = decoder, prefiller
        return planned


class FlashInferGraphPlan:
    """A decode step by flashinfer whose wrappers keep their memory from step to step."""

    def __init__(self, backend: FlashInferBackend, inputs: StepInputs) -> None:
        self._backend = backend
        self._slots = inputs.slot_mapping
        self._wrappers: dict[_Kind, Any] = {}
        self._pages: list[PageTable] = []
        self._refresh_pages(inputs)

    def refresh(self, inputs: StepInputs) -> None:
        """See `GraphPlan.refresh`."""
        self._refresh_pages(inputs)
        for kind, wrapper in self._wrappers.items():
            self._backend.plan_decode(wrapper, kind, self._pages[kind.group])

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See `AttentionPlan.forward`."""
        backend = self._backend
        kind = backend.kind(layer, query, options)
        backend.writer.write_step(layer, key, value, self._slots)
        wrapper = self._wrappers.get(kind)
        if wrapper is None:
            wrapper = self._wrappers[kind] = self._wrapper()
            backend.plan_decode(wrapper, kind, self._pages[kind.group])
        query = query.contiguous()
        out = torch.empty_like(query)
        backend.run(wrapper, layer, query, options.sinks, out)
        return out

    def _refresh_pages(self, inputs: StepInputs) -> None:
        size = self._backend.pool.block_size
        self._pages = [
            page_table(inputs.host_seq_lens, tables, size) for tables in inputs.host_block_tables
        ]
        self._shape = inputs.block_tables.shape[1:]  # the host's are as wide as the step

    def _wrapper(self) -> Any:
        batch, width = self._shape
        lengths = {"indptr": batch + 1, "indices": batch * width, "last_page_len": batch}
        buffers = {
            f"paged_kv_{name}_buffer": torch.zeros(
                length, dtype=torch.int32, device=self._backend.pool.device
            )
            for name, length in lengths.items()
        }
        return self._backend.library.BatchDecodeWithPagedKVCacheWrapper(
            self._backend.workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            **buffers,
        )
