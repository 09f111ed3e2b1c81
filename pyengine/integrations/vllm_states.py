"""The states of vLLM's recurrent layers, as blocks of the pool.

In vLLM a running state is a block. The block table of a group of recurrent layers has a column for
each block of tokens. A step that ends after `n` tokens writes the state to column
`(n - 1) // block_size`. If that is a later column than before, the worker first copies the state
from the column before. So a state stays where it was when its request enters the next column:

    tokens     0        4        8        12
    columns    | null   | state  | state  |        chunks of 8 and 2 tokens, blocks of 4
                          after 8  after 10

In mode "align", states that stand for whole blocks are cached (`StateLayers.retains`). Here such a
state becomes a snapshot of the block manager. `Sequence.keep_snapshot` allocates the blocks of a
snapshot, but the worker fills the block in its table. So the running state belongs to a sequence of
its own, which is freed right before the snapshot is kept: blocks that were freed last are allocated
first. If there is a snapshot at this position already, the sequence allocates its blocks again.

In mode "none", vLLM does not cache, and a column holds up to the whole sequence.
"""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Any

from pyengine.kv_cache import BlockManager, Extended, Pin, Sequence


@dataclass(slots=True)
class Column:
    """A column of the block tables of all groups of recurrent layers: `blocks` has a block for each
    group, with the state after `num_tokens` tokens. `owner` holds them."""

    index: int
    num_tokens: int
    blocks: list[int]
    owner: Sequence | Pin

    def release(self) -> None:
        """Release the blocks."""
        if isinstance(self.owner, Pin):
            self.owner.release()
        else:
            self.owner.free()


@dataclass(frozen=True, slots=True)
class StateLayers:
    """The groups of recurrent layers of a model, by vLLM's indices. A column of their tables stands
    for `block_size` tokens.

    With `is_aligned`, states after whole blocks are cached, and only the last column of a chunk
    gets blocks. A backend with a `checkpoint_alignment` also exports the state at the last block
    boundary inside a chunk, if that is a multiple of so many tokens after the chunk's start.
    `retention_interval` is vLLM's `prefix_cache_retention_interval`.
    """

    groups: tuple[int, ...]
    block_size: int
    is_aligned: bool
    checkpoint_alignment: int | None = None
    retention_interval: int | None = None

    def num_columns(self, num_tokens: int) -> int:
        """The columns for so many tokens."""
        return -(-num_tokens // self.block_size)

    def new_columns(self, num_columns: int, start: int, end: int, prefill_end: int) -> range:
        """The columns that get blocks if a request with `num_columns` computes from `start` to
        `end`. Other new columns have the null block."""
        last = self.num_columns(end)
        if not self.is_aligned:
            return range(num_columns, last)
        if last <= num_columns:
            return range(0)
        is_kept = end >= prefill_end or self.retention_interval != 0
        exports = is_kept and self._exports(num_columns, start, end)
        return range(last - 1 - exports, last)

    def retains(self, position: int, request: Any) -> bool:
        """True if the state at this block boundary is cached: at the end of a prompt, at that of a
        prefix that others share, and at each interval."""
        interval, size = self.retention_interval, self.block_size
        if interval is None or (interval and position % interval == 0):
            return True
        ends = (request.num_prompt_tokens - 1, request.shared_prefix_boundary)
        return any(position == end // size * size for end in ends)

    def _exports(self, num_columns: int, start: int, end: int) -> bool:
        """vLLM's `is_mamba_prefill_checkpoint_valid`, with hits at block boundaries alone."""
        size, alignment = self.block_size, self.checkpoint_alignment
        boundary = (end - 1) // size * size
        return (
            alignment is not None
            and start % size == 0
            and boundary >= start + size
            and boundary // size > num_columns
            and (boundary - start) % alignment == 0
        )

    def begin(self, kv: BlockManager, indices: range, end: int) -> list[Column]:
        """Allocate blocks for these columns of a request that computes up to `end`. The caller has
        checked that they are available."""
        columns = []
        for index in indices:
            owner = kv.sequence([0], read_cache=False)
            blocks = self._allocate(kv, owner)
            columns.append(Column(index, min((index + 1) * self.block_size, end), blocks, owner))
        return columns

    def _allocate(self, kv: BlockManager, owner: Sequence) -> list[int]:
        answer = owner.extend(len(self.groups) * kv.block_size)
        if not isinstance(answer, Extended):
            raise RuntimeError(f"no blocks for a state: {answer}")
        [blocks] = answer.blocks
        return blocks

    def keep(self, kv: BlockManager, sequence: Sequence, column: Column) -> None:
        """Cache the state of a column, which stands for the published tokens of a sequence."""
        if isinstance(column.owner, Pin):
            return
        column.owner.free()
        answer = sequence.keep_snapshot()
        if not isinstance(answer, Extended):
            raise RuntimeError(f"the blocks {column.blocks} of a state are lost: {answer}")
        kept = answer.blocks[0] if answer.blocks else []
        if kept:
            column.owner = sequence.pin()
        else:  # there is one already
            column.owner = kv.sequence([0], read_cache=False)
            kept = self._allocate(kv, column.owner)
        if kept != column.blocks:
            raise RuntimeError(f"the blocks {column.blocks} of a state became {kept}")


def state_layers(specs: ListLike[Any], retention_interval: int | None) -> StateLayers | None:
    """The groups of recurrent layers among the specifications of vLLM's groups, which are equal."""
    groups = tuple(index for index, spec in enumerate(specs) if _is_recurrent(spec))
    if not groups:
        return None
    spec = specs[groups[0]]
    exports = spec.num_prefill_checkpoint_blocks > 0
    return StateLayers(
        groups=groups,
        block_size=spec.block_size,
        is_aligned=spec.mamba_cache_mode == "align",
        checkpoint_alignment=spec.prefill_checkpoint_alignment if exports else None,
        retention_interval=retention_interval,
    )


def by_kind(specs: ListLike[Any]) -> tuple[list[Any], list[Any]]:
    """The specifications of groups of attention layers, and those of groups of recurrent layers."""
    attention = [spec for spec in specs if not _is_recurrent(spec)]
    return attention, [spec for spec in specs if _is_recurrent(spec)]


def _is_recurrent(spec: Any) -> bool:
    return type(spec).__name__ == "MambaSpec"
