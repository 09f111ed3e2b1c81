"""The hidden states of a prompt that a request wants: of its last token, their mean, or all."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pyengine.request.prompt_entries import PromptEntries, PromptEntryCache
from pyengine.request.prompts import Prompt

States = npt.NDArray[np.float32]


class PromptStates(Protocol):
    """Receives hidden states of a prompt's tokens, chunk by chunk. A preemption repeats some."""

    reads_cache: bool
    """True if tokens need not be computed if their blocks are cached."""

    @property
    def entries(self) -> PromptEntries | None:
        """Entries of blocks, whose tokens need not be computed if they are known."""

    def wanted(self, start: int, end: int) -> range:
        """The positions whose states are wanted, of a chunk from `start` to `end`."""

    def extend(self, first: int, states: States) -> None:
        """Add the states `[R, hidden]` of the wanted positions, which begin at `first`."""

    def restart(self) -> None:
        """Forget the states: the prompt is computed by other weights."""

    @property
    def result(self) -> States | None:
        """None before the whole prompt is computed."""


class LastState:
    """The state `[hidden]` of the last token. See `PromptStates`."""

    reads_cache, entries = True, None

    def __init__(self, num_tokens: int) -> None:
        self._last = num_tokens - 1
        self.result: States | None = None

    def restart(self) -> None:
        """See `PromptStates`."""
        self.result = None

    def wanted(self, start: int, end: int) -> range:
        """See `PromptStates`."""
        return range(max(start, self._last), min(end, self._last + 1))

    def extend(self, first: int, states: States) -> None:
        """See `PromptStates`."""
        self.result = states[-1].copy()


class AllStates:
    """The states `[T, hidden]` of all tokens, none of which is read from the cache."""

    reads_cache, entries = False, None

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._num_known = 0
        self._parts: list[States] = []

    def restart(self) -> None:
        """See `PromptStates`."""
        self._num_known, self._parts = 0, []

    def wanted(self, start: int, end: int) -> range:
        """See `PromptStates`."""
        return range(max(start, self._num_known), min(end, self._num_tokens))

    def extend(self, first: int, states: States) -> None:
        """See `PromptStates`."""
        self._parts.append(states[self._num_known - first :].copy())
        self._num_known = first + len(states)

    @property
    def result(self) -> States | None:
        """See `PromptStates`."""
        if self._num_known < self._num_tokens:
            return None
        self._parts = [np.concatenate(self._parts)]
        return self._parts[0]


class MeanState(PromptEntries):
    """The mean of all states, `[hidden]`, in float64 until the end.

    The entry of a block is the sum of the states of its tokens and of all before them, so a cached
    prefix need not be computed if the entries of its blocks are known. A hidden state has the same
    bits in every batch: with or without the cache, means differ by the rounding of float64 alone.
    """

    reads_cache = False

    def __init__(self, cache: PromptEntryCache, prompt: Prompt) -> None:
        super().__init__(cache, prompt)
        self._sum: npt.NDArray[np.float64] = np.zeros(1)
        self._num_known = 0

    @property
    def entries(self) -> PromptEntries:
        """See `PromptStates`."""
        return self

    def restart(self) -> None:
        """See `PromptStates`."""
        super().restart()
        self._sum, self._num_known = np.zeros(1), 0

    def readable_tokens(self) -> int:
        """See `PromptEntries`: at least the last token is computed."""
        return min(self.find_known(), len(self.prompt.token_ids) - 1)

    def wanted(self, start: int, end: int) -> range:
        """See `PromptStates`."""
        return range(start, min(end, len(self.prompt.token_ids)))

    def extend(self, first: int, states: States) -> None:
        """See `PromptStates`."""
        size, length, end = self.cache.block_size, len(self.prompt.token_ids), first + len(states)
        if first > self._num_known:  # the prefix before it was cached
            num_blocks = -(-first // size)
            self._sum = self.known[num_blocks - 1]
            self._num_known = min(num_blocks * size, length)
        while self._num_known < end:
            block = self._num_known // size
            stop = min((block + 1) * size, end)
            rows: Any = states[self._num_known - first : stop - first]
            self._sum = self._sum + rows.sum(axis=0, dtype=np.float64)
            self._num_known = stop
            if stop % size == 0 or stop == length:
                self.put(block, self._sum)

    @property
    def result(self) -> States | None:
        """See `PromptStates`."""
        length = len(self.prompt.token_ids)
        if self._num_known < length:
            return None
        mean: States = np.asarray(self._sum / length, dtype=np.float32)
        return mean
