"""Attention by gathering blocks: any device, any model; the oracle of the other backends.

Keys and values of the visible blocks are copied together and handed to torch's scaled dot
product attention, with the query heads that share a KV head as its rows, so that KV heads are
never repeated. Softcap and sinks, which that function lacks, are computed in float32.

NumPy splits the rows into *pieces*, a call of that function each, once per step and window:

- a sequence with several new tokens gives `Span`s of at most `MAX_SPAN_ROWS` rows;
- sequences with one new token are collected into `Batch`es of similar length.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from pyengine.attention.backend import (
    QKV,
    AttentionBackend,
    AttentionOptions,
    Int32Array,
    StepInputs,
)
from pyengine.attention.needs import FLOAT8_DTYPES, AttentionNeeds, int8_cache_obstacle
from pyengine.attention.paged import KVWriter
from pyengine.kv_cache.pool import KVPool
from pyengine.utils.devices import for_torch
from pyengine.utils.host_copy import upload

MAX_SPAN_ROWS = 512
"""Rows of one prefill piece: bounds the mask, and the keys gathered outside a sliding window."""

_BATCH_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Gathered keys and values of one decode batch: about a core's L2 cache, or a launch's worth."""

Visible: TypeAlias = torch.Tensor | Literal["all", "causal"]
"""The keys that a query row sees: a mask (True: seen), all, or those up to its own."""


class GatherBackend(AttentionBackend):
    """Attention over a `KVPool` by gather and `scaled_dot_product_attention`."""

    name = "gather"
    strength = "serves every model on every device"
    reads_tables = False

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        device = for_torch(pool.device)
        self.scratches = Scratch(device), Scratch(device)
        self.writer = KVWriter(pool)

    @staticmethod
    def obstacle(needs: AttentionNeeds) -> str | None:
        """See `AttentionBackend.obstacle`."""
        return int8_cache_obstacle(needs) or AttentionBackend.obstacle(needs)

    def metadata(self, inputs: StepInputs, *, first_key: int = 0) -> "GatherMetadata":
        """Prepare a step; index tensors are made per sliding window, at first use.

        Positions before `first_key` have no keys in these layers. Only their own rows see them, and
        the results of those rows are not used.
        """
        return GatherMetadata(self, inputs, first_key)


class Scratch:
    """Memory for gathered keys, or values, used again by every layer of every step.

    On the CPU an allocation of some MiB is returned to the system when it is freed, and each layer
    would pay for fresh pages. CUDA tensors, which torch caches, and large ones are not kept here.
    """

    def __init__(self, device: torch.device) -> None:
        self._limit = _BATCH_BYTES["cpu"] if device.type == "cpu" else 0
        with torch.inference_mode(False):  # to be written inside of it and outside
            self._memory = torch.empty(self._limit, dtype=torch.uint8, device=device)

    def select(self, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """`cache[blocks]`, valid until the next call."""
        shape = (len(blocks), *cache.shape[1:])
        num_bytes = math.prod(shape) * cache.dtype.itemsize
        if num_bytes > self._limit:
            return cache.index_select(0, blocks)
        out = self._memory[:num_bytes].view(cache.dtype).view(shape)
        return torch.index_select(cache, 0, blocks, out=out)


class GatherMetadata:
    """One step of the gather backend."""

    def __init__(self, backend: GatherBackend, inputs: StepInputs, first_key: int = 0) -> None:
        self._backend = backend
        self._pool = pool = backend.pool
        self._first_key = first_key
        self._layouts = [
            StepLayout(inputs.host_query_start_loc, inputs.host_seq_lens, tables, pool.block_size)
            for tables in inputs.host_block_tables
        ]
        self._slots = backend.writer.slots(inputs.slot_mapping)
        self._pieces: dict[tuple[int, int | None], list[SpanPiece | _BatchPiece]] = {}

    def forward(self, layer: int, qkv: QKV, options: AttentionOptions) -> torch.Tensor:
        """See `AttentionMetadata.forward`."""
        table = self._pool.layer_tables[layer]
        query = self._backend.writer.write(layer, qkv, self._slots[table], options.rotation)
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        spec = self._pool.specs[layer]
        out = query.new_empty(*query.shape[:2], values.shape[-1])
        for piece in self._pieces_for(table, options.sliding_window):
            k, v = _gather(keys, values, piece, self._backend.scratches)
            if spec.dtype in FLOAT8_DTYPES:
                k, v = k.to(query.dtype) * spec.scale_k, v.to(query.dtype) * spec.scale_v
            piece.attend(query, k, v, options, out)
        return out

    def _pieces_for(self, table: int, window: int | None) -> "list[SpanPiece | _BatchPiece]":
        """The pieces of a layer of this table with this window, made at first use."""
        pieces = self._pieces.get((table, window))
        if pieces is None:
            device, layout = for_torch(self._pool.device), self._layouts[table]
            max_blocks = _BATCH_BYTES[device.type] // max(
                spec.bytes_per_block(self._pool.block_size) for spec in self._pool.specs
            )
            pieces = [
                SpanPiece(span, window, device, first_key=self._first_key)
                for span in layout.spans(window)
            ]
            pieces += [
                _BatchPiece(rows, self._pool.block_size, device)
                for rows in layout.batches(window, max_blocks, first_key=self._first_key)
            ]
            self._pieces[table, window] = pieces
        return pieces


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows `start .. start + count` of one sequence.

    `blocks` are the ids of the blocks the rows see, in order of position; the first of them
    holds the keys from position `first_key` on (a multiple of the block size), and keys up to
    `num_keys` after it are visible to the last row. `position` is that of the first row.
    """

    start: int
    count: int
    position: int
    first_key: int
    num_keys: int
    blocks: Int32Array


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of sequences with one new token each, padded to the same number of blocks.

    `rows` `[R]` are their rows in the step; `blocks` `[R, W]` the blocks they see (padding
    repeats the row's first block); row `r` sees the keys `lows[r] .. highs[r]` of its
    `W * block_size`.
    """

    rows: npt.NDArray[np.int64]
    blocks: Int32Array
    lows: npt.NDArray[np.int64]
    highs: npt.NDArray[np.int64]

    @property
    def is_uniform(self) -> bool:
        """True if every row sees the same columns of its keys: no mask needed."""
        return all(bool((bounds == bounds[0]).all()) for bounds in (self.lows, self.highs))

    def unseen(self, block_size: int) -> npt.NDArray[np.int64]:
        """The slots that no row sees, as indices into `[R * W * block_size]`.

        Blocks that pad a row are the row's first one again.
        """
        counts, columns = -(-self.highs // block_size)[:, None], np.arange(self.blocks.shape[1])
        starts = np.where(columns < counts, columns, 0) * block_size
        is_cut = (starts + block_size > self.highs[:, None]) | (starts < self.lows[:, None])
        rows, columns = is_cut.nonzero()
        offsets = np.arange(block_size)
        positions = starts[rows, columns, None] + offsets
        unseen = (positions >= self.highs[rows, None]) | (positions < self.lows[rows, None])
        slots = (rows * self.blocks.shape[1] + columns)[:, None] * block_size + offsets
        unseen_slots: npt.NDArray[np.int64] = slots[unseen]
        return unseen_slots


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The host side of a step, and the size of a block."""

    query_start_loc: Int32Array
    seq_lens: Int32Array
    block_tables: Int32Array
    block_size: int

    def spans(self, window: int | None) -> Iterator[Span]:
        """Pieces of the sequences that have several new tokens."""
        lengths = np.diff(self.query_start_loc)
        for row in np.flatnonzero(lengths > 1).tolist():
            begin, end = self.query_start_loc[row : row + 2].tolist()
            context = int(self.seq_lens[row]) - (end - begin)
            for start in range(begin, end, MAX_SPAN_ROWS):
                count = min(MAX_SPAN_ROWS, end - start)
                position = context + start - begin
                first = 0 if window is None else max(0, position - window + 1)
                first_block = first // self.block_size
                last = position + count
                yield Span(
                    start=start,
                    count=count,
                    position=position,
                    first_key=first_block * self.block_size,
                    num_keys=last - first_block * self.block_size,
                    blocks=self.block_tables[row, first_block : -(-last // self.block_size)],
                )

    def batches(
        self, window: int | None, max_blocks: int, *, first_key: int = 0
    ) -> Iterator[Batch]:
        """Sequences with one new token, shortest first, at most `max_blocks` blocks a batch.

        A row that alone exceeds `max_blocks` is a separate batch. Batches are kept small
        because a padded gather is fast only while it stays in the processor's cache.
        """
        decoding = np.flatnonzero(np.diff(self.query_start_loc) == 1)
        if not decoding.size:
            return
        ends = self.seq_lens[decoding].astype(np.int64)
        first_keys = np.zeros_like(ends) if window is None else np.maximum(0, ends - window)
        first_blocks = first_keys // self.block_size
        widths = -(-ends // self.block_size) - first_blocks
        order = np.argsort(widths, kind="stable")
        for chosen in _by_width(order, widths, max_blocks):
            columns = np.arange(widths[chosen[-1]])
            columns = np.where(columns < widths[chosen, None], columns, 0)
            columns += first_blocks[chosen, None]
            base = first_blocks[chosen] * self.block_size
            yield Batch(
                rows=self.query_start_loc[decoding[chosen]].astype(np.int64),
                blocks=self.block_tables[decoding[chosen, None], columns],
                lows=np.maximum(first_keys, np.minimum(first_key, ends - 1))[chosen] - base,
                highs=ends[chosen] - base,
            )


def _by_width(
    order: npt.NDArray[np.intp], widths: npt.NDArray[np.int64], max_blocks: int
) -> Iterator[npt.NDArray[np.intp]]:
    """Cut rows sorted by width so that rows times the widest stays within `max_blocks`."""
    begin = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or (end + 1 - begin) * widths[order[end]] > max_blocks:
            yield order[begin:end]
            begin = end


class SpanPiece:
    """Consecutive rows of one sequence."""

    def __init__(
        self, span: Span, window: int | None, device: torch.device, *, first_key: int = 0
    ) -> None:
        self._rows = slice(span.start, span.start + span.count)
        self.keys = slice(span.num_keys)
        self.unseen: torch.Tensor | None = None
        self.blocks = _block_index(span.blocks[None], device)
        self._visible: Visible = "causal"
        is_cut = first_key > 0 or (window is not None and span.num_keys > window)
        if span.num_keys != span.count or is_cut:
            positions = torch.arange(span.position, span.position + span.count, device=device)
            key_positions = torch.arange(span.num_keys, device=device) + span.first_key
            self._visible = key_positions <= positions[:, None]
            if window is not None:
                self._visible &= key_positions > positions[:, None] - window
            if first_key:
                self._visible &= key_positions >= positions.clamp(max=first_key)[:, None]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of the rows over the gathered `key` and `value` into `out`."""
        kv_heads = key.shape[1]
        rows = _by_kv_head(query[self._rows], kv_heads).permute(1, 2, 0, 3)
        k, v = key.transpose(0, 1), value.transpose(0, 1)
        k = k.expand(-1, rows.shape[1], -1, -1)  # [kv, group, keys, d], repeated by stride 0
        v = v.expand(-1, rows.shape[1], -1, -1)
        sinks = options.sinks
        if sinks is not None:
            sinks = sinks.view(kv_heads, -1, 1, 1)
        visible = self._visible
        if isinstance(visible, torch.Tensor):  # torch adds a mask, and NaN stays NaN
            broken = ~key.isfinite().all(-1).transpose(0, 1)[:, None]  # [kv, 1, 1, keys]
            k = k.masked_fill(broken.transpose(2, 3), 0.0)
        attended = _attention(rows, k, v, visible, options, sinks)
        if isinstance(visible, torch.Tensor):
            sees_broken = (visible & broken).any(-1, keepdim=True)
            attended = attended.masked_fill(sees_broken, float("nan"))
        out[self._rows] = attended.permute(2, 0, 1, 3).flatten(1, 2)


class _BatchPiece:
    """One row each of several sequences; the query heads of a KV head are its rows."""

    def __init__(self, batch: Batch, block_size: int, device: torch.device) -> None:
        self._rows = upload(batch.rows, device)
        self.blocks = _block_index(batch.blocks, device)
        self._visible: Visible = "all"
        self.keys = slice(int(batch.lows[0]), int(batch.highs[0]))
        self.unseen: torch.Tensor | None = None
        if not batch.is_uniform:
            self.keys = slice(batch.blocks.shape[1] * block_size)
            self.unseen = upload(batch.unseen(block_size), device)
            lows, highs = (upload(bound, device)[:, None] for bound in (batch.lows, batch.highs))
            key = torch.arange(self.keys.stop, device=device)
            self._visible = ((key >= lows) & (key < highs))[:, None, None]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of the rows over the gathered `key` and `value` into `out`."""
        kv_heads = key.shape[1]
        rows = _by_kv_head(query.index_select(0, self._rows), kv_heads)
        sinks = options.sinks
        if sinks is not None:
            sinks = sinks.view(1, kv_heads, -1, 1)
        attended = _attention(rows, key, value, self._visible, options, sinks)
        out.index_copy_(0, self._rows, attended.flatten(1, 2))


def _by_kv_head(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[rows, query_heads, d]` as `[rows, kv_heads, group, d]`, a view."""
    rows, heads, head_dim = query.shape
    return query.reshape(rows, kv_heads, heads // kv_heads, head_dim)


def _block_index(blocks: npt.NDArray[np.int32], device: torch.device) -> torch.Tensor | slice:
    """`blocks` `[R, W]` on the device; a slice for one row of neighbouring blocks: no copy then."""
    if len(blocks) == 1 and (np.diff(blocks[0]) == 1).all():
        return slice(int(blocks[0, 0]), int(blocks[0, -1]) + 1)
    index: torch.Tensor = upload(blocks.astype(np.int64), device)
    return index


def _gather(
    keys: torch.Tensor,
    values: torch.Tensor,
    piece: SpanPiece | _BatchPiece,
    scratches: tuple[Scratch, Scratch],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `piece.keys` of each sequence's blocks: `[R, kv_heads, num_keys, d]` each.

    Keys of unseen slots are cleared: torch adds a mask, and NaN stays NaN.
    """
    blocks = piece.blocks
    if isinstance(blocks, slice):
        num_rows, k, v = 1, keys[blocks], values[blocks]
    else:
        num_rows, flat = len(blocks), blocks.flatten()
        k, v = scratches[0].select(keys, flat), scratches[1].select(values, flat)
        if piece.unseen is not None:
            slots = k.flatten(0, 1)
            (slots if slots.dtype.itemsize > 1 else slots.view(torch.uint8)).index_fill_(
                0, piece.unseen, 0
            )
    return (
        k.view(num_rows, -1, *k.shape[2:])[:, piece.keys].transpose(1, 2),
        v.view(num_rows, -1, *v.shape[2:])[:, piece.keys].transpose(1, 2),
    )


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: Visible,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of `query` `[a, b, n, d]` over `key` `[a, b, m, d]` and `value` `[a, b, m, e]`.

    `sinks` broadcast to `[a, b, n, 1]`. Returns `[a, b, n, e]`.
    """
    mask = visible if isinstance(visible, torch.Tensor) else None
    if options.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=visible == "causal", scale=options.scaling
        )
    scores = (query.float() @ key.float().transpose(-1, -2)) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif visible == "causal":
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
    num_keys = key.shape[-2]
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :num_keys]
    return (weights @ value.float()).to(query.dtype)
