"""Log-probabilities of prompts' tokens, kept so that who wants them may read the cache."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pyengine.engine.prompts import Prompt
from pyengine.sampling.logprobs import TokenLogprobs

_ENTRY = np.dtype(
    [
        ("logprob", np.float32),
        ("rank", np.int32),
        ("top_id", np.int32),
        ("top_logprob", np.float32),
    ]
)
"""What is kept of a token: its own log-probability and rank, and the most probable token."""
_Entries: TypeAlias = npt.NDArray[np.void]


class PromptLogprobCache:
    """Known log-probabilities of prompt tokens by block hash, for as many blocks as the pool has.

    A block's name is a hash of its tokens, of all before them, and of the namespace. So an entry
    holds for that content wherever its keys and values are, and also when they are gone; it goes
    when it was used longest ago.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, _Entries] = OrderedDict()
        self.pending: dict[bytes, PromptLogprobs] = {}
        """Blocks that a running request computes, by hash: others wait for them."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    def leading(self, names: Sequence[bytes]) -> list[_Entries]:
        """The entries of the first blocks, up to one that is not here."""
        found = []
        for name in names:
            entries = self._blocks.get(name)
            if entries is None:
                break
            found.append(entries)
        for name in reversed(names[: len(found)]):  # the end of a prompt goes first
            self._blocks.move_to_end(name)
        return found

    def put(self, name: bytes, entries: _Entries) -> None:
        """Keep a copy of a block's entries, at most `[block_size]`, if there are none."""
        self.pending.pop(name, None)
        if name not in self._blocks:
            self._blocks[name] = entries.copy()
        self._blocks.move_to_end(name)
        if len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)


class PromptLogprobs:
    """Of one prompt: what was computed or is in the cache, in the order of its tokens.

    The log-probability of a token follows from the one before it. So of the tokens whose entries
    are known the last one is computed all the same, where the blocks before it are cached. The end
    of a prompt, less than a block, is kept likewise.
    """

    __slots__ = (
        "_awaited",
        "_cache",
        "_entries",
        "_is_running",
        "_known",
        "_names",
        "_num_known",
        "_prompt",
        "_top",
    )

    def __init__(self, cache: PromptLogprobCache, prompt: Prompt, top: int) -> None:
        """`top` is how many of the most probable tokens are wanted; the cache has one."""
        self._cache = cache
        self._prompt = prompt
        self._top = top
        self._names = _names(prompt, cache.block_size)
        self._entries: _Entries = np.zeros(len(prompt.token_ids), dtype=_ENTRY)
        self._num_known = 1  # the first token follows nothing
        self._known: list[_Entries] = []
        self._awaited: bytes | None = None
        """Hash of the first block that was unknown when it was last asked for."""
        self._is_running: Callable[[], bool] = _never

    def readable_tokens(self) -> int:
        """How many tokens need not be computed, if their keys and values are there."""
        self._known = self._cache.leading(self._names) if self._top <= 1 else []
        num_known = min(len(self._known) * self._cache.block_size, len(self._prompt.token_ids))
        return max(0, num_known - 1)

    def awaits_prefix(self) -> bool:
        """Whether a running request computes the first block whose entries are unknown."""
        if self._top > 1:
            return False
        if self._is_pending(self._awaited):
            return True
        num_known = len(self._cache.leading(self._names))
        self._awaited = self._names[num_known] if num_known < len(self._names) else None
        return self._is_pending(self._awaited)

    def _is_pending(self, name: bytes | None) -> bool:
        request = None if name is None else self._cache.pending.get(name)
        return request is not None and request is not self and request._is_running()

    def announce(self, is_running: Callable[[], bool]) -> None:
        """Let others wait for the unknown blocks of this prompt, as long as `is_running`."""
        self._is_running = is_running
        for name in self._names:
            if name not in self._cache and not self._is_pending(name):
                self._cache.pending[name] = self

    def withdraw(self) -> None:
        """End the waiting of other requests: this one has ended."""
        self._is_running = _never
        for name in self._names:
            if self._cache.pending.get(name) is self:
                del self._cache.pending[name]

    def extend(self, first: int, computed: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
        """Take what was computed of the tokens from position `first` on; return all that is new.

        What lies before it and is not known yet was read from the cache. A position that was
        computed before, up to a preemption, is passed over.
        """
        last = min(first, len(self._prompt.token_ids))  # what follows was generated
        new = [self._cached(at) for at in range(self._num_known, last)]
        new += computed[max(0, self._num_known - first) :]
        self._keep(new)
        return new if self._top else [replace(item, top_ids=(), top_logprobs=()) for item in new]

    def _cached(self, at: int) -> TokenLogprobs:
        block, place = divmod(at, self._cache.block_size)
        logprob, rank, top_id, top_logprob = self._known[block][place].item()
        token = int(self._prompt.token_ids[at])
        return TokenLogprobs(token, logprob, rank, (top_id,), (top_logprob,))

    def _keep(self, new: list[TokenLogprobs]) -> None:
        size, begin, end = self._cache.block_size, self._num_known, self._num_known + len(new)
        self._entries[begin:end] = [
            (item.logprob, item.rank, item.top_ids[0], item.top_logprobs[0]) for item in new
        ]
        self._num_known = end
        is_whole = end == len(self._entries)
        for block in range(begin // size, len(self._names) if is_whole else end // size):
            self._cache.put(self._names[block], self._entries[block * size : (block + 1) * size])


def _never() -> bool:
    return False


def _names(prompt: Prompt, block_size: int) -> list[bytes]:
    """A name for each block of a prompt, the last one perhaps not full."""
    tokens = np.asarray(prompt.token_ids, dtype=np.int64)
    name = blake2b(prompt.namespace).digest()
    names = []
    for start in range(0, len(tokens), block_size):
        name = blake2b(name + tokens[start : start + block_size].tobytes()).digest()
        names.append(name)
    return names
