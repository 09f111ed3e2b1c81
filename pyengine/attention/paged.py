"""What the paged kernels share: page tables in compressed rows, bounds, sinks."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pyengine.attention.metadata import Int32Array


@dataclass(frozen=True, slots=True)
class PageTable:
    """The pages of B sequences, one after the other.

    Sequence `b` has the pages `indices[indptr[b] : indptr[b + 1]]`, and `last_page_len[b]` tokens
    in the last of them, 1 to the size of a page. int32, `[B + 1]`, `[indptr[-1]]`, `[B]`.
    """

    indptr: Int32Array
    indices: Int32Array
    last_page_len: Int32Array


def page_table(seq_lens: Int32Array, block_tables: Int32Array, block_size: int) -> PageTable:
    """Compress `block_tables` `[B, W]`, of which `ceil(seq_len / block_size)` columns are valid."""
    counts = -(-seq_lens // block_size)
    valid = np.arange(block_tables.shape[1]) < counts[:, None]
    return PageTable(
        indptr=cumulative(counts),
        indices=block_tables[valid],
        last_page_len=(seq_lens - (counts - 1) * block_size).astype(np.int32),
    )


def cumulative(lengths: npt.NDArray[Any]) -> Int32Array:
    """`[0, l0, l0 + l1, ...]`, int32."""
    out = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=out[1:])
    return out


def leading_decodes(query_start_loc: Int32Array) -> int:
    """How many of the first sequences have one new token: a decode kernel takes those."""
    longer = np.diff(query_start_loc) != 1
    return int(longer.argmax()) if longer.any() else len(longer)


def window_left(window: int | None) -> int:
    """A window as kernels count it: positions before the query's own; -1: all."""
    return -1 if window is None else window - 1


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` on `device`. The host does not wait for a CUDA device: the memory is pinned."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def apply_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Attention with sinks, from attention without them.

    A sink is one more score in the sum under the softmax: with `lse` the logarithm of that sum
    without it, the weights of all values shrink by `e^lse / (e^lse + e^sink)`, a sigmoid. Exact
    but for one more rounding of `out`.

    `out` is `[T, heads, d]`, `lse` float32 `[T, heads]` in natural logarithms, `sinks` `[heads]`.
    """
    share = torch.sigmoid(lse - sinks.float())
    return (out.float() * share[..., None]).to(out.dtype)
