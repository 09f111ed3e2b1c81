"""Attention by torch's FlexAttention over the physical pages of the pool.

All rows of a step form one sequence of queries, all slots of the pool one of keys, which is a
view of it. Where all sequences decode, each sequence is a tile. Its rows are the query heads of a
KV head, which read the same pages, and no other sequence's. A block mask lists the pages that each
tile of queries reads; the mask function decides, key by key. It finds a key's position from its
page: a page holds the same positions for every sequence that shares it. Pages that all rows of a
tile see in full are listed apart: kernels do not call the mask function for them.

torch compiles anew for a size of 0 or 1, even in a dynamic dimension. So rows, tiles, pages of a
tile, and tables are padded to two.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.fx.experimental._config
import torch.nn.functional as F

from pyengine.attention.backend import (
    QKV,
    AttentionBackend,
    AttentionOptions,
    Int32Array,
    StepInputs,
)
from pyengine.attention.needs import AttentionNeeds, flex_obstacle, torch_version
from pyengine.attention.paged import KVWriter, apply_sinks, leading_decodes
from pyengine.errors import ConfigurationError
from pyengine.kv_cache.pool import KVPool
from pyengine.utils.devices import for_torch
from pyengine.utils.host_copy import upload
from pyengine.utils.own_graphs import compile_apart

_WIDE_OFFSETS = (2, 15)
"""torch from which kernels multiply slots by strides in 64 bits (pytorch#185264): 2.13 does not."""
_REACH = 1 << 31  # elements of a tensor that older kernels can address
_DECODE_TILE = 16  # minimum rows of a tile
_PREFILL_TILE = 64
_KEY_TILE = 64
_MIN_SIZE = 2  # minimum of every size that changes from step to step
_ALIGNED = 16  # numbers of 4 bytes: compiled code copies tensors that begin elsewhere

RECOMPILE_LIMIT = 64
"""Variants of one kernel of an engine: decodes and prefills of each kind of layer take a few. torch
has a limit of 8, and past it a step fails."""


class FlexBackend(AttentionBackend):
    """Attention over a `KVPool` by FlexAttention: compiled on CUDA, for tests on the CPU.

    Raises `ConfigurationError` for a pool whose slots the compiled kernels cannot reach.
    """

    name = "flex"
    strength = "torch compiles a kernel for this model"
    auto_on = ("cuda",)
    is_uncertain = True
    block_size = 64
    supports_graphs = True

    def __init__(self, pool: KVPool) -> None:
        if pool.device.type != "cpu":
            _check_reach(pool)
        super().__init__(pool)
        self.writer = KVWriter(pool)
        self.library: Any = importlib.import_module("torch.nn.attention.flex_attention")
        self.attend: Any = self.library.flex_attention
        if pool.device.type == "cuda":
            self.attend = compiled(self.attend)
        self._score_mods: dict[float | None, Callable[..., torch.Tensor] | None] = {None: None}
        self.num_pages = [(pool.num_blocks + 1) * table.parts for table in pool.tables]
        """The pages in the tensors, as the layers of each table see them."""
        device = for_torch(pool.device)
        pages = [torch.full((1,), block, device=device) for block in pool.null_blocks]
        self.null_pages = torch.stack(pages)
        """The null block in each table, `[tables, 1]`."""

    def score_mod(self, softcap: float | None) -> Callable[..., torch.Tensor] | None:
        """The score function of a softcap, one for all layers and steps."""
        if softcap is not None and softcap not in self._score_mods:
            self._score_mods[softcap] = _capping(
                torch.full((), softcap, device=for_torch(self.pool.device))
            )
        return self._score_mods[softcap]

    @staticmethod
    def obstacle(needs: AttentionNeeds) -> str | None:
        """See `AttentionBackend.obstacle`."""
        return flex_obstacle(needs)

    def metadata(self, inputs: StepInputs) -> "FlexMetadata":
        """Prepare a step; tiles are laid out per table and window, at first use."""
        return FlexMetadata(self, inputs, None)

    def graph_metadata(self, inputs: StepInputs) -> "FlexMetadata":
        """Prepare a step whose tiles can hold all pages of its tables."""
        pages = min(self.pool.num_blocks + 1, inputs.block_tables.shape[2])
        return FlexMetadata(self, inputs, pages)


def _check_reach(pool: KVPool) -> None:
    if torch_version(torch.__version__) >= _WIDE_OFFSETS:
        return
    count = pool.num_blocks + 1
    block = max(tensor.numel() // count for tensor in (*pool.keys, *pool.values))
    max_blocks = _REACH // block - 1  # the null block is one more
    if pool.num_blocks > max_blocks:
        raise ConfigurationError(
            f"num_blocks={pool.num_blocks}: FlexAttention of torch {torch.__version__} computes "
            f"the offset of a slot in 32 bits; give at most num_blocks={max_blocks}, another "
            f"attention_backend, or torch {_WIDE_OFFSETS[0]}.{_WIDE_OFFSETS[1]}"
        )


class FlexMetadata:
    """One step by FlexAttention; a tile holds up to `capacity` pages, None: as many as it needs."""

    def __init__(self, backend: FlexBackend, inputs: StepInputs, capacity: int | None) -> None:
        self._backend = backend
        self._inputs = inputs
        self._capacity = capacity
        starts = inputs.host_query_start_loc
        self._decodes = leading_decodes(starts) == len(starts) - 1
        sequences = np.arange(len(starts) - 1).repeat(np.diff(starts))
        self._sequence_of = _padded(
            upload(sequences, for_torch(backend.pool.device)), _MIN_SIZE
        )  # [T]
        self._positions = _padded(inputs.positions, _MIN_SIZE)
        self._tables = _padded(inputs.block_tables, _MIN_SIZE, _MIN_SIZE)
        shape = (len(inputs.block_tables), max(backend.num_pages))
        self._columns = torch.empty(shape, dtype=torch.int64, device=for_torch(backend.pool.device))
        self._masks: dict[tuple[int, int | None, int], Any] = {}
        self._packed: dict[tuple[int, int | None, int], torch.Tensor] = {}
        self._find_columns()

    def refresh(self, inputs: StepInputs) -> None:
        """See `GraphMetadata.refresh`."""
        self._inputs = inputs
        if self._positions is not inputs.positions:
            self._positions[: len(inputs.positions)].copy_(inputs.positions)
        if self._tables is not inputs.block_tables:
            _, rows, width = inputs.block_tables.shape
            self._tables[:, :rows, :width].copy_(inputs.block_tables)
        self._find_columns()
        for (table, window, _), fixed in self._packed.items():
            fixed.copy_(self._tiles(table, window).packed(self._capacity, fixed.device))

    def forward(self, layer: int, qkv: QKV, options: AttentionOptions) -> torch.Tensor:
        """See `AttentionMetadata.forward`."""
        backend, pool = self._backend, self._backend.pool
        table = pool.layer_tables[layer]
        slots = self._inputs.slot_mapping
        query = backend.writer.write_step(layer, qkv, slots, options.rotation)
        keys, values = (
            cache.flatten(0, 1).transpose(0, 1)[None]  # [1, kv_heads, slots, d]
            for cache in (pool.keys[layer], pool.values[layer])
        )
        if self._decodes:
            lanes = Lanes(query.shape[1], keys.shape[1], _DECODE_TILE)
        else:
            lanes = Lanes(query.shape[1], query.shape[1], 1)
        tile = lanes.count if self._decodes else _PREFILL_TILE
        result = backend.attend(
            lanes.to_lanes(query),
            keys,
            values,
            score_mod=backend.score_mod(options.softcap),
            block_mask=self._mask(table, options.sliding_window, lanes.count),
            scale=options.scaling,
            enable_gqa=not self._decodes,
            kernel_options=self._kernel_options(tile),
            return_aux=backend.library.AuxRequest(lse=options.sinks is not None),
        )
        out = lanes.from_lanes(result[0], len(query))
        if options.sinks is None:
            return out
        lse = lanes.from_lanes(result[1].lse[..., None], len(query))[..., 0]
        return apply_sinks(out, lse, options.sinks)

    def _kernel_options(self, tile: int) -> dict[str, Any] | None:
        if self._backend.pool.device.type != "cuda":
            return None
        return {
            "BLOCK_M": tile,
            "BLOCK_N": min(_KEY_TILE, self._backend.pool.block_size),
            "FORCE_USE_FLEX_ATTENTION": True,  # not its decode kernel, which wants other tiles
        }

    def _find_columns(self) -> None:
        """Compute each page's column in the block tables; -1: in none. On the device."""
        width = self._inputs.host_block_tables.shape[2]  # of this step; a graph's may be wider
        tables, lens = self._inputs.block_tables[..., :width], self._inputs.seq_lens
        null = self._backend.null_pages
        columns = torch.arange(tables.shape[2], device=tables.device)
        valid = columns < -(-lens[:, None] // self._backend.pool.block_size)
        pages = torch.where(valid, tables, null[..., None]).long().flatten(1)
        self._columns.fill_(-1)
        self._columns.scatter_(1, pages, columns.repeat(len(lens)).expand_as(pages))
        self._columns.scatter_(1, null, -1)

    def _mask(self, table: int, window: int | None, lanes: int) -> Any:
        mask = self._masks.get((table, window, lanes))
        if mask is None:
            pool, tiles = self._backend.pool, self._tiles(table, window)
            packed = tiles.packed(self._capacity, for_torch(pool.device))
            self._packed[table, window, lanes] = packed
            mask = self._backend.library.BlockMask.from_kv_blocks(
                *tiles.parts(packed, self._capacity),
                BLOCK_SIZE=(lanes if self._decodes else _PREFILL_TILE, pool.block_size),
                mask_mod=self._visible(table, window, lanes),
                seq_lengths=(
                    len(self._sequence_of) * lanes,
                    self._backend.num_pages[table] * pool.block_size,
                ),
                compute_q_blocks=False,
            )
            self._masks[table, window, lanes] = mask
        return mask

    def _visible(self, table: int, window: int | None, lanes: int) -> Callable[..., torch.Tensor]:
        """The mask function: true if a row, of `lanes` per token, sees a slot of the pool."""
        size = self._backend.pool.block_size
        columns, tables = self._columns[table], self._tables[table]
        sequence_of, positions = self._sequence_of, self._positions

        def visible(
            _batch: torch.Tensor, _head: torch.Tensor, lane: torch.Tensor, slot: torch.Tensor
        ) -> torch.Tensor:
            row, page = lane // lanes, slot // size
            column = columns[page]
            own = tables[sequence_of[row], column.clamp(min=0)] == page
            position = column * size + slot % size
            seen = (column >= 0) & own & (position <= positions[row])
            return seen if window is None else seen & (position > positions[row] - window)

        return visible

    def _tiles(self, table: int, window: int | None) -> "Tiles":
        """The pages of each tile of rows."""
        return tile_pages(
            self._inputs,
            self._inputs.host_block_tables[table],
            window,
            self._backend.pool.block_size,
            1 if self._decodes else _PREFILL_TILE,
        )


@dataclass(frozen=True, slots=True)
class Tiles:
    """The pages that each of N tiles reads, each once.

    `in_part` and `in_full` are counts `[N]` and pages `[N, width]`, of which the first `count` are
    valid. All rows of a tile see all keys of the pages in full.
    """

    in_part: "Pages"
    in_full: "Pages"

    def packed(self, capacity: int | None, device: torch.device) -> torch.Tensor:
        """All of it as one tensor on `device`, for one copy; `parts` takes it apart."""
        shapes = self._shapes(capacity)
        arrays: tuple[npt.NDArray[Any], ...] = (*self.in_part, *self.in_full)
        sizes = [-(-math.prod(shape) // _ALIGNED) * _ALIGNED for shape in shapes]
        buffer, begin = np.zeros(sum(sizes), dtype=np.int32), 0
        for numbers, shape, size in zip(arrays, shapes, sizes, strict=True):
            target = buffer[begin : begin + math.prod(shape)].reshape(shape)
            target[tuple(map(slice, numbers.shape))] = numbers
            begin += size
        packed: torch.Tensor = upload(buffer, device)
        return packed

    def parts(self, packed: torch.Tensor, capacity: int | None) -> list[torch.Tensor]:
        """Counts and pages in part, then in full, as a block mask takes them; views."""
        views, begin = [], 0
        for shape in self._shapes(capacity):
            size = math.prod(shape)
            views.append(packed[begin : begin + size].view(1, 1, *shape))
            begin += -(-size // _ALIGNED) * _ALIGNED
        return views

    def _shapes(self, capacity: int | None) -> list[tuple[int, ...]]:
        """`capacity` is the number of pages in full that a tile has room for, None: as needed."""
        (part_counts, in_part), (_, in_full) = self.in_part, self.in_full
        tiles = max(_MIN_SIZE, len(part_counts))  # one more than there are rows for is not computed
        widths = (in_part.shape[1], capacity or in_full.shape[1])
        return [shape for width in widths for shape in ((tiles,), (tiles, max(_MIN_SIZE, width)))]


class Lanes:
    """The layout of query heads as rows: `count` rows for a token.

    Over `heads` of the kernel the rows of a token are the query heads that share one, padded to a
    power of two and at least to `minimum`.
    """

    def __init__(self, query_heads: int, heads: int, minimum: int) -> None:
        self._heads, self._shared = heads, query_heads // heads
        self.count = max(minimum, 1 << (self._shared - 1).bit_length())

    def to_lanes(self, query: torch.Tensor) -> torch.Tensor:
        """`[T, query_heads, d]` as the kernel wants it: `[1, heads, rows, d]`."""
        by_head = query.reshape(len(query), self._heads, self._shared, query.shape[-1])
        padded = _padded(by_head, _MIN_SIZE, 0, self.count, 0)
        return padded.transpose(0, 1).flatten(1, 2)[None]

    def from_lanes(self, attended: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """`[1, heads, rows, d]` as `[T, query_heads, d]`."""
        by_token = attended[0].view(self._heads, -1, self.count, attended.shape[-1])
        return by_token[:, :num_tokens, : self._shared].transpose(0, 1).flatten(1, 2)


def compiled(attend: Any, **settings: Any) -> Callable[..., Any]:
    """Compile flex_attention; `settings` are further ones of `torch.compile`.

    `fullgraph` raises an error instead of running uncompiled, which holds every score at once.
    Sizes that are equal by chance, as the rows and KV heads of a step, must stay apart.
    """
    dynamo, shapes = torch._dynamo.config, cast("Any", torch.fx.experimental._config)
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
    traced = compile_apart(attend, dynamic=True, fullgraph=True, **settings)

    def call(*tensors: torch.Tensor, **options: Any) -> Any:
        with shapes.patch(use_duck_shape=False):
            return traced(*tensors, **options)

    return call


def _padded(tensor: torch.Tensor, *minimum: int) -> torch.Tensor:
    """Pad `tensor` with zeros at the end until its last sizes are at least `minimum`."""
    last = tensor.shape[-len(minimum) :]
    missing = [max(0, low - size) for low, size in zip(minimum, last, strict=True)]
    if not any(missing):
        return tensor
    return F.pad(tensor, [amount for item in reversed(missing) for amount in (0, item)])


Indices: TypeAlias = npt.NDArray[np.int64]
Pages: TypeAlias = tuple[Indices, Int32Array]


def tile_pages(
    inputs: StepInputs, tables: Int32Array, window: int | None, block_size: int, tile: int
) -> Tiles:
    """The pages that each tile of `tile` rows reads.

    A tile that decodes has at most two pages in part: the last one, and one at the window's edge.
    """
    starts = inputs.host_query_start_loc.astype(np.int64)
    sequences, tiles = _pieces(starts, tile)
    shift = inputs.host_seq_lens[sequences] - starts[1:][sequences]  # from rows to positions
    first = np.maximum(starts[sequences], tiles * tile) + shift
    end = np.minimum(starts[1:][sequences], (tiles + 1) * tile) + shift
    last_column = -(-end // block_size)
    if window is None:
        column = full_column = np.zeros_like(first)
    else:
        column = np.maximum(0, first - window + 1) // block_size
        full_column = -(-np.maximum(0, end - window) // block_size)
    full_end = np.maximum((first + 1) // block_size, full_column)
    head = full_column - column
    at = np.arange(max(1, int((full_end - full_column).max())))
    in_full = full_column[:, None] + at
    at = np.arange(max(1, int((head + last_column - full_end).max())))
    in_part = np.where(at < head[:, None], column[:, None], (full_end - head)[:, None]) + at
    begins = (sequences * tables.shape[1])[:, None]
    pieces = Tiles(
        (head + last_column - full_end, tables.reshape(-1).take(begins + in_part, mode="clip")),
        (full_end - full_column, tables.reshape(-1).take(begins + in_full, mode="clip")),
    )
    return pieces if len(tiles) == tiles[-1] + 1 else _merged(pieces, tiles)


def _pieces(starts: Indices, tile: int) -> tuple[Indices, Indices]:
    """The sequence and the tile of each piece: rows that are of one sequence, in one tile."""
    begins, ends = starts[:-1], starts[1:]
    counts = np.where(ends > begins, (ends - 1) // tile - begins // tile + 1, 0)
    sequences = np.arange(len(counts)).repeat(counts)
    skipped = np.cumsum(counts) - counts - begins // tile
    return sequences, np.arange(len(sequences)) - skipped[sequences]


def _merged(pieces: Tiles, tiles: Indices) -> Tiles:
    """The pages of tiles whose pieces read those of `pieces`: in full if all its pieces do."""
    keys, is_full = [], []
    for counts, pages in (pieces.in_part, pieces.in_full):
        own = pages[np.arange(pages.shape[1]) < counts[:, None]]
        keys.append((tiles.repeat(counts) << 32) + own)
        is_full.append(np.full(len(own), pages is pieces.in_full[1]))
    pairs, inverse = np.unique(np.concatenate(keys), return_inverse=True)
    seen_in_full = np.bincount(inverse, weights=np.concatenate(is_full))
    tile, page = pairs >> 32, pairs & 0xFFFFFFFF
    chosen = seen_in_full == np.bincount(tiles)[tile]
    in_part, in_full = (
        _as_pages(tile[picked], page[picked], int(tiles[-1]) + 1) for picked in (~chosen, chosen)
    )
    return Tiles(in_part, in_full)


def _as_pages(tiles: Indices, pages: Indices, count: int) -> Pages:
    """Pages, in the order of their tiles, as a row for each of `count` tiles."""
    counts = np.bincount(tiles, minlength=count)
    rows = np.zeros((count, max(1, int(counts.max()))), dtype=np.int32)
    rows[tiles, np.arange(len(tiles)) - (np.cumsum(counts) - counts).repeat(counts)] = pages
    return counts, rows


def _capping(softcap: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The score function of a softcap: a tensor, as a number cannot be captured when compiled."""

    def capped(  # of score, batch, head, row, slot
        score: torch.Tensor,
        _batch: torch.Tensor,
        _head: torch.Tensor,
        _row: torch.Tensor,
        _slot: torch.Tensor,
    ) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
