"""nano-vllm with our block manager. Before an `LLM` is created, call:

    import pyengine.integrations.nano_vllm
    pyengine.integrations.nano_vllm.patch()

Only nano-vllm's Scheduler calls the manager. Its model runner reads the whole block table in every
step, so merged blocks are simply replaced in the table.
"""

import importlib
from dataclasses import dataclass
from typing import Any

from pyengine.kv_cache import BlockManager as Blocks
from pyengine.kv_cache import Extended, NoRoom, Sequence

NO_ROOM = -1  # the constant of nano-vllm's Scheduler


def patch() -> None:
    """Let nano-vllm's Scheduler create our manager. Idempotent."""
    scheduler: Any = importlib.import_module("nanovllm.engine.scheduler")
    scheduler.BlockManager = BlockManager


@dataclass(slots=True)
class SequenceBlocks:
    """The blocks of a sequence of nano-vllm.

    `published` tokens are in registered blocks, `known` tokens were passed to our sequence.
    """

    owner: Any
    blocks: Sequence
    known: int
    published: int


class BlockManager:
    """nano-vllm's `BlockManager`. It updates `block_table` and `num_cached_tokens` of sequences.

    At least one token of a prompt is computed, and the last block if it is full, because the runner
    writes it in any case. `settings` are those of our block manager.
    """

    def __init__(self, num_blocks: int, block_size: int, **settings: Any) -> None:
        if block_size < 2:
            raise ValueError(f"block_size={block_size}: it must be at least 2")
        self.block_size = block_size
        # nano-vllm's model runner cannot copy blocks.
        self.kv = Blocks(num_blocks, block_size, **{"partial_reuse": False, **settings})
        self._entries: dict[int, SequenceBlocks] = {}
        self._prefilling: dict[int, SequenceBlocks] = {}
        self._lookup: SequenceBlocks | None = None

    def can_allocate(self, seq: Any) -> int:
        """The number of cached blocks of a prompt, or -1 if the others do not fit.

        Earlier prompts of the same batch count as cached: the runner writes the keys and values of
        the whole batch before it reads any.
        """
        self._drop_lookup()
        for entry in self._prefilling.values():
            self._publish(entry)
        known = seq.num_tokens - (seq.num_tokens % self.block_size == 0)
        tokens = seq.token_ids if known == seq.num_tokens else seq.token_ids[:known]
        blocks = self.kv.sequence(tokens)
        hit = blocks.reuse_cached()
        cached = hit // self.block_size
        self._lookup = SequenceBlocks(seq, blocks, known, hit)
        if seq.num_blocks - cached > self.kv.usage().available:
            self._drop_lookup()
            return NO_ROOM
        return cached

    def allocate(self, seq: Any, num_cached_blocks: int) -> None:
        """Allocate the blocks of the whole prompt, after `can_allocate`."""
        entry, self._lookup = self._lookup, None
        if (
            entry is None
            or entry.owner is not seq
            or entry.published // self.block_size != num_cached_blocks
        ):
            raise RuntimeError(f"sequence {seq.seq_id}: call can_allocate before allocate")
        self._extend(entry)
        self._entries[seq.seq_id] = self._prefilling[seq.seq_id] = entry
        seq.block_table.extend(entry.blocks.block_table)
        seq.num_cached_tokens = entry.published

    def can_append(self, seq: Any) -> bool:
        """True if the next token needs no new block, or one is available."""
        if seq.num_tokens % self.block_size != 1:
            return True
        self._drop_lookup()
        return self.kv.usage().available > 0

    def may_append(self, seq: Any) -> None:
        """Allocate a block for the next token if it needs one."""
        if seq.num_tokens % self.block_size == 1:
            seq.block_table.extend(self._extend(self._entries[seq.seq_id]))

    def hash_blocks(self, seq: Any) -> None:
        """Register or merge the full blocks of the scheduled tokens, which are computed."""
        entry = self._entries[seq.seq_id]
        end = seq.num_cached_tokens + seq.num_scheduled_tokens
        if end - entry.published >= self.block_size:
            self._publish(entry)
        if self._prefilling and end >= seq.num_tokens:
            self._prefilling.pop(seq.seq_id, None)

    def deallocate(self, seq: Any) -> None:
        """Release the blocks of a sequence."""
        self._drop_lookup()
        self._prefilling.pop(seq.seq_id, None)
        entry = self._entries.pop(seq.seq_id, None)
        if entry is not None:
            entry.blocks.free()
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    def _extend(self, entry: SequenceBlocks) -> list[int]:
        answer = entry.blocks.extend(len(entry.owner) - entry.published)
        if not isinstance(answer, Extended):
            assert isinstance(answer, NoRoom)
            raise RuntimeError(f"sequence {entry.owner.seq_id} needs {answer.needed} blocks more")
        return answer.blocks[0]

    def _publish(self, entry: SequenceBlocks) -> None:
        seq = entry.owner
        end = seq.num_cached_tokens + seq.num_scheduled_tokens
        end -= end % self.block_size
        if end <= entry.published:
            return
        tokens = seq.token_ids[entry.known : end] if end > entry.known else None
        remappings = entry.blocks.publish(end - entry.published, tokens)
        entry.published, entry.known = end, max(entry.known, end)
        for remapping in remappings:
            seq.block_table[remapping.index] = remapping.new_block

    def _drop_lookup(self) -> None:
        if self._lookup is not None:
            self._lookup.blocks.free()
            self._lookup = None
