"""Shared by the backends: the KV write, page tables in compressed rows, bounds, sinks.

Keys and values of a step go into the pool by one call per layer: on CUDA a Triton kernel
(`kv_write_kernel`, or `rotation_kernel` with a rotation), elsewhere `rotated` and `KVPool.write`,
the oracles of the kernels.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pyengine.attention.backend import QKV, Int32Array
from pyengine.attention.needs import FLOAT8_DTYPES
from pyengine.kernels import has_kernels
from pyengine.kernels.rope import Rotation
from pyengine.kv_cache.pool import KVPool
from pyengine.utils.devices import for_torch

_FLOAT8_CAPABILITY = (8, 9)
"""Older GPUs convert to 8-bit floats in software, which torch does and Triton does not."""


def rotated(
    query: torch.Tensor, key: torch.Tensor, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """`query` `[T, query_heads, d]` and `key` `[T, kv_heads, d]`, normalised first, then turned."""
    norm = rotation.norm
    weights = (None, None) if norm is None else (norm.query_weight, norm.key_weight)
    turned = [_turned(*item, rotation) for item in zip((query, key), weights, strict=True)]
    return turned[0], turned[1]


def _turned(rows: torch.Tensor, weight: torch.Tensor | None, rotation: Rotation) -> torch.Tensor:
    values, layout, norm = rows.float(), rotation.layout, rotation.norm
    if norm is not None and weight is not None:
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + norm.eps)
        values = values * (norm.offset + weight.float())
    half, lead = layout.size // 2, values.shape[:-1]
    shape, axis = ((2, half), -2) if layout.order == "halves" else ((half, 2), -1)
    first, second = values[..., : layout.size].reshape(*lead, *shape).unbind(axis)
    cos, sin = (
        item.float()[:, None, : half * layout.step : layout.step]
        for item in (rotation.cos, rotation.sin)
    )
    parts = [first * cos - second * sin, second * cos + first * sin]
    turned = torch.stack(parts, axis).flatten(-2)
    return torch.cat([turned, values[..., layout.size :]], -1).to(rows.dtype)


class KVWriter:
    """Writes into the layers of one pool; rows with slot -1 are not written."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._by_kernel = _kernel_serves(pool)
        device, size = for_torch(pool.device), pool.block_size
        slots = [torch.full((1,), block * size, device=device) for block in pool.null_blocks]
        self._null_slots = torch.stack(slots)

    def slots(self, slot_mapping: torch.Tensor) -> torch.Tensor:
        """The slots `[tables, T]` of a step as `write` takes them, computed once per step.

        The kernel skips the slot -1. Torch's copy cannot: there such rows go to the null block.
        """
        if self._by_kernel:
            return slot_mapping
        return torch.where(slot_mapping < 0, self._null_slots, slot_mapping)

    def write(
        self, layer: int, qkv: QKV, slots: torch.Tensor, rotation: Rotation | None = None
    ) -> torch.Tensor:
        """Turn query and key by `rotation`, write key and value; returns the query.

        The query is `[T, query_heads, head_dim_k]`, the key `[T, kv_heads, head_dim_k]`, the value
        `[T, kv_heads, head_dim_v]`, of any strides; `slots` is a row of what `slots()` gave, int64
        `[T]`. An 8-bit cache stores them divided by the layer's scale, clamped to the maximum.
        """
        query, key, value = qkv
        spec = self._pool.specs[layer]
        caches = (self._pool.keys[layer], self._pool.values[layer])
        scales = (spec.scale_k, spec.scale_v)
        if not self._by_kernel:
            if rotation is not None:
                query, key = rotated(query, key, rotation)
            self._pool.write(layer, key, value, slots)
        elif rotation is None:
            from pyengine.kernels.kv_write import write_rows

            write_rows((key, value), caches, slots, scales)
        else:
            from pyengine.kernels.rotation import write_rotated

            query = write_rotated(qkv, caches, slots, rotation, scales)
        return query

    def write_step(
        self,
        layer: int,
        qkv: QKV,
        slot_mapping: torch.Tensor,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """`write` by a step's `slot_mapping` `[tables, T]` as it is.

        A CUDA graph reads `slot_mapping` at each replay, so no derived tensor is kept.
        """
        table = self._pool.layer_tables[layer]
        slots = slot_mapping[table]
        if not self._by_kernel:
            slots = torch.where(slots < 0, self._null_slots[table], slots)
        return self.write(layer, qkv, slots, rotation)


def _kernel_serves(pool: KVPool) -> bool:
    if not has_kernels(pool.device):
        return False
    if any(spec.dtype in FLOAT8_DTYPES for spec in pool.specs):
        return torch.cuda.get_device_capability(for_torch(pool.device)) >= _FLOAT8_CAPABILITY
    return True


@dataclass(frozen=True, slots=True)
class PageTable:
    """The pages of B sequences, one after the other.

    Sequence `b` has the pages `indices[indptr[b] : indptr[b + 1]]`, and `last_page_len[b]` tokens
    in the last of them, 1 to the size of a page. int32, `[B + 1]`, `[indptr[-1]]`, `[B]`.
    """

    indptr: Int32Array
    indices: Int32Array
    last_page_len: Int32Array


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Where the pages of B sequences are in a table `[B, W]`, in all tables alike.

    `positions` `[indptr[-1]]` are those in the table's rows, one after the other. For the rest see
    `PageTable`.
    """

    indptr: Int32Array
    positions: npt.NDArray[np.int64]
    last_page_len: Int32Array

    @classmethod
    def of(
        cls, seq_lens: Int32Array, width: int, block_size: int, first: Int32Array | None = None
    ) -> "PageLayout":
        """Of tables of which `ceil(seq_len / block_size)` columns of `width` are valid.

        `first` `[B]` are the leading blocks to leave out, None: none.
        """
        all_counts = -(-seq_lens // block_size)
        counts = all_counts if first is None else all_counts - first
        indptr = cumulative(counts)
        begins = np.arange(len(counts)) * width - indptr[:-1]
        if first is not None:
            begins += first
        return cls(
            indptr=indptr,
            positions=np.arange(indptr[-1]) + begins.repeat(counts),  # as many as pages
            last_page_len=(seq_lens - (all_counts - 1) * block_size).astype(np.int32),
        )

    def pages(self, block_tables: Int32Array) -> PageTable:
        """The pages in one of the step's tables."""
        indices = block_tables.reshape(-1).take(self.positions)
        return PageTable(self.indptr, indices, self.last_page_len)


def cumulative(lengths: npt.NDArray[Any]) -> Int32Array:
    """`[0, l0, l0 + l1, ...]`, int32."""
    out = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=out[1:])
    return out


def leading_decodes(query_start_loc: Int32Array) -> int:
    """The number of leading sequences with one new token, for a decode kernel."""
    longer = np.diff(query_start_loc) != 1
    return int(longer.argmax()) if longer.any() else len(longer)


def window_left(window: int | None) -> int:
    """A window as kernels count it: positions before the query's own; -1: all."""
    return -1 if window is None else window - 1


def with_sinks(result: Any, sinks: torch.Tensor | None) -> torch.Tensor:
    """The attention `[T, heads, d]` in the result of a flash kernel, with sinks if there are any.

    The kernel then also returns `lse`, `[heads, T]`: see `apply_sinks`.
    """
    if sinks is None:
        attended: torch.Tensor = result
        return attended
    return apply_sinks(result[0], result[1].T, sinks)


def apply_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Attention with sinks, from attention without them.

    A sink is one more score in the sum under the softmax: with `lse` the logarithm of that sum
    without it, the weights of all values shrink by `e^lse / (e^lse + e^sink)`, a sigmoid. Exact
    but for one more rounding of `out`.

    `out` is `[T, heads, d]`, `lse` float32 `[T, heads]` in natural logarithms, `sinks` `[heads]`.
    """
    share = torch.sigmoid(lse - sinks.float())
    return (out.float() * share[..., None]).to(out.dtype)
