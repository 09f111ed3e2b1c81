"""Log-probabilities of prompts' tokens, kept so that requests for them may use cached blocks."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pyengine.request.prompts import Prompt
from pyengine.sampling.logprobs import TokenLogprobs

_ENTRY = np.dtype(
    [
        ("logprob", np.float32),
        ("rank", np.int32),
        ("top_id", np.int32),
        ("top_logprob", np.float32),
    ]
)
"""The entry of a token: its log-probability and rank, and the most probable token."""
_Entries: TypeAlias = npt.NDArray[np.void]


class _Sequence(Protocol):
    """The sequence that computes a prompt, as others see it."""

    is_running: bool


class PromptLogprobCache:
    """Known log-probabilities of prompt tokens by block hash, for as many blocks as the pool has.

    The hash is that of its tokens, of all before them, and of the namespace: an entry stays valid
    when the block is evicted. The least recently used entry is evicted first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, _Entries] = OrderedDict()
        self.pending: dict[bytes, PromptLogprobs] = {}
        """Blocks that a running request computes, by hash: others wait for them."""
        self.generation = 0
        """The number of times that it was cleared."""

    def clear(self) -> None:
        """Forget all entries, and take none of the prompts that are computed now."""
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
        """Keep a copy of a block's entries, at most `[block_size]`, if there are none."""
        self.pending.pop(block_hash, None)
        if block_hash not in self._blocks:
            self._blocks[block_hash] = entries.copy()
        self._blocks.move_to_end(block_hash)
        if len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)


class PromptLogprobs:
    """The computed and cached log-probabilities of one prompt, in the order of its tokens.

    That of a token comes from the logits of the token before it. So the last token with a known
    entry is computed even if its block is cached. A partial last block has an entry too.
    """

    def __init__(self, cache: PromptLogprobCache, prompt: Prompt, top: int) -> None:
        """`top` is the number of most probable tokens to report; the cache has one."""
        self._cache, self._generation = cache, cache.generation
        self._prompt = prompt
        self._top = top
        self._hashes = _hashes(prompt, cache.block_size)
        self._entries: _Entries = np.zeros(len(prompt.token_ids), dtype=_ENTRY)
        self._num_known = 1  # the first token has none
        self._known: list[_Entries] = []
        self._awaited: bytes | None = None
        """Hash of the first block without an entry at the last check."""
        self._sequence: _Sequence | None = None
        """The sequence that computes the prompt, once it is admitted."""

    def readable_tokens(self) -> int:
        """The number of leading tokens that need not be computed if their blocks are cached."""
        self._known = self._cache.leading(self._hashes) if self._top <= 1 else []
        num_known = min(len(self._known) * self._cache.block_size, len(self._prompt.token_ids))
        return max(0, num_known - 1)

    def awaits_prefix(self) -> bool:
        """True if a running request computes the first block without an entry."""
        if self._top > 1:
            return False
        if self._is_pending(self._awaited):
            return True
        num_known = len(self._cache.leading(self._hashes))
        self._awaited = self._hashes[num_known] if num_known < len(self._hashes) else None
        return self._is_pending(self._awaited)

    def _is_pending(self, block_hash: bytes | None) -> bool:
        other = None if block_hash is None else self._cache.pending.get(block_hash)
        if other is None or other is self or other._sequence is None:
            return False
        return other._sequence.is_running

    def pre_register(self, sequence: _Sequence) -> None:
        """Let others wait for the blocks of this prompt without entries, while `sequence` runs."""
        self._sequence = sequence
        for block_hash in self._hashes:
            if block_hash not in self._cache and not self._is_pending(block_hash):
                self._cache.pending[block_hash] = self

    def withdraw(self) -> None:
        """End the waiting of other requests: this one has ended."""
        self._sequence = None
        for block_hash in self._hashes:
            if self._cache.pending.get(block_hash) is self:
                del self._cache.pending[block_hash]

    def extend(self, first: int, computed: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
        """Add the computed entries from position `first` on; return all new ones.

        New ones before `first` come from the cache. Positions computed before a preemption are
        skipped.
        """
        last = min(first, len(self._prompt.token_ids))  # later tokens were generated
        new = [self._cached(at) for at in range(self._num_known, last)]
        new += computed[max(0, self._num_known - first) :]
        self._keep(new)
        return new if self._top else [replace(item, top_ids=(), top_logprobs=()) for item in new]

    def _cached(self, at: int) -> TokenLogprobs:
        block, offset = divmod(at, self._cache.block_size)
        logprob, rank, top_id, top_logprob = self._known[block][offset].item()
        token = int(self._prompt.token_ids[at])
        return TokenLogprobs(token, logprob, rank, (top_id,), (top_logprob,))

    def _keep(self, new: list[TokenLogprobs]) -> None:
        size, begin, end = self._cache.block_size, self._num_known, self._num_known + len(new)
        self._entries[begin:end] = [
            (item.logprob, item.rank, item.top_ids[0], item.top_logprobs[0]) for item in new
        ]
        self._num_known = end
        if self._generation != self._cache.generation:
            return
        is_whole = end == len(self._entries)
        for block in range(begin // size, len(self._hashes) if is_whole else end // size):
            self._cache.put(self._hashes[block], self._entries[block * size : (block + 1) * size])


def _hashes(prompt: Prompt, block_size: int) -> list[bytes]:
    """A hash for each block of a prompt, also for a partial last one."""
    tokens = np.asarray(prompt.token_ids, dtype=np.int64)
    block_hash = blake2b(prompt.namespace).digest()
    block_hashes = []
    for start in range(0, len(tokens), block_size):
        block_hash = blake2b(block_hash + tokens[start : start + block_size].tobytes()).digest()
        block_hashes.append(block_hash)
    return block_hashes
