"""Results of prompts' positions by block hash, so that requests for them may use cached blocks."""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pyengine.request.prompts import Prompt

_Entries: TypeAlias = npt.NDArray[Any]


class _Sequence(Protocol):
    """The sequence that computes a prompt, as others see it."""

    is_running: bool


class PromptEntryCache:
    """Known entries of prompt tokens by block hash, for as many blocks as the pool has.

    The hash is that of its tokens, of all before them, and of the namespace: an entry stays valid
    when the block is evicted. The least recently used entry is evicted first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, _Entries] = OrderedDict()
        self.pending: dict[bytes, PromptEntries] = {}
        """Blocks that a running request computes, by hash: others wait for them."""
        self.generation = 0
        """The number of times that it was cleared."""

    def clear(self) -> None:
        """Forget all entries, and take none of the prompts that are being computed."""
        self._blocks.clear()
        self.pending.clear()
        self.generation += 1

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._blocks

    def leading(self, block_hashes: Sequence[bytes]) -> list[_Entries]:
        """The entries of the first blocks, up to a missing one."""
        leading_entries = []
        for block_hash in block_hashes:
            entries = self._blocks.get(block_hash)
            if entries is None:
                break
            leading_entries.append(entries)
        # The end of a prompt is evicted first.
        for block_hash in reversed(block_hashes[: len(leading_entries)]):
            self._blocks.move_to_end(block_hash)
        return leading_entries

    def put(self, block_hash: bytes, entries: _Entries) -> None:
        """Keep a copy of a block's entries, if there are none."""
        self.pending.pop(block_hash, None)
        if block_hash not in self._blocks:
            self._blocks[block_hash] = entries.copy()
        self._blocks.move_to_end(block_hash)
        if len(self._blocks) > self.num_blocks:
            self._blocks.popitem(last=False)


class PromptEntries:
    """The entries of one prompt: which are known, and which a running request computes.

    A partial last block has an entry too.
    """

    def __init__(self, cache: PromptEntryCache, prompt: Prompt, *, reads: bool = True) -> None:
        """Without `reads` every token of the prompt is computed."""
        self.cache, self.prompt, self._reads = cache, prompt, reads
        self._generation = cache.generation
        self.hashes = _hashes(prompt, cache.block_size)
        self.known: list[_Entries] = []
        """The entries of the first blocks when it was last asked for `readable_tokens`."""
        self._awaited: bytes | None = None
        """Hash of the first block without an entry at the last check."""
        self._sequence: _Sequence | None = None
        """The sequence that computes the prompt, once it is admitted."""

    def restart(self) -> None:
        """Forget the entries: the prompt is computed by other weights."""
        self.known, self._generation = [], self.cache.generation

    def put(self, block: int, entries: _Entries) -> None:
        """Keep the entries of a block, unless the cache was cleared since it began."""
        if self._generation == self.cache.generation:
            self.cache.put(self.hashes[block], entries)

    def readable_tokens(self) -> int:
        """The number of leading tokens that need not be computed if their blocks are cached."""
        raise NotImplementedError

    def find_known(self) -> int:
        """Look up `known`; returns the number of its tokens."""
        self.known = self.cache.leading(self.hashes) if self._reads else []
        return min(len(self.known) * self.cache.block_size, len(self.prompt.token_ids))

    def awaits_prefix(self) -> bool:
        """True if a running request computes the first block without an entry."""
        if not self._reads:
            return False
        if self._is_pending(self._awaited):
            return True
        num_known = len(self.cache.leading(self.hashes))
        self._awaited = self.hashes[num_known] if num_known < len(self.hashes) else None
        return self._is_pending(self._awaited)

    def _is_pending(self, block_hash: bytes | None) -> bool:
        other = None if block_hash is None else self.cache.pending.get(block_hash)
        if other is None or other is self or other._sequence is None:
            return False
        return other._sequence.is_running

    def pre_register(self, sequence: _Sequence) -> None:
        """Let others wait for the blocks of this prompt without entries, while `sequence` runs."""
        self._sequence = sequence
        for block_hash in self.hashes:
            if block_hash not in self.cache and not self._is_pending(block_hash):
                self.cache.pending[block_hash] = self

    def withdraw(self) -> None:
        """End the waiting of other requests: this one has ended."""
        self._sequence = None
        for block_hash in self.hashes:
            if self.cache.pending.get(block_hash) is self:
                del self.cache.pending[block_hash]


def _hashes(prompt: Prompt, block_size: int) -> list[bytes]:
    """A hash for each block of a prompt, also for a partial last one."""
    tokens = np.asarray(prompt.token_ids, dtype=np.int64)
    block_hash = blake2b(repr(prompt.space).encode()).digest()
    block_hashes = []
    for start in range(0, len(tokens), block_size):
        block_hash = blake2b(block_hash + tokens[start : start + block_size].tobytes()).digest()
        block_hashes.append(block_hash)
    return block_hashes
