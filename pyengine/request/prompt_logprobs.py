"""Log-probabilities of prompts' tokens, kept so that requests for them may use cached blocks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pyengine.request.prompt_entries import PromptEntries, PromptEntryCache
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


class PromptLogprobs(PromptEntries):
    """The computed and cached log-probabilities of one prompt, in the order of its tokens.

    That of a token comes from the logits of the token before it. So the last token with a known
    entry is computed even if its block is cached.
    """

    def __init__(
        self, cache: PromptEntryCache, prompt: Prompt, top: int, *, reads: bool = True
    ) -> None:
        """`top` is the number of most probable tokens to report; the cache has one.

        Without `reads` every token of the prompt is computed.
        """
        super().__init__(cache, prompt, reads=reads and top <= 1)
        self._top = top
        self._entries: _Entries = np.zeros(len(prompt.token_ids), dtype=_ENTRY)
        self._num_known = 1  # the first token has none

    def readable_tokens(self) -> int:
        """See `PromptEntries`."""
        return max(0, self.find_known() - 1)

    def restart(self) -> None:
        """See `PromptEntries`."""
        super().restart()
        self._num_known = 1

    def extend(self, first: int, computed: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
        """Add the computed entries from position `first` on; return all new ones.

        New ones before `first` come from the cache. Positions computed before a preemption are
        skipped.
        """
        last = min(first, len(self.prompt.token_ids))  # later tokens were generated
        new = [self._cached(at) for at in range(self._num_known, last)]
        new += computed[max(0, self._num_known - first) :]
        self._keep(new)
        return new if self._top else [replace(item, top_ids=(), top_logprobs=()) for item in new]

    def _cached(self, at: int) -> TokenLogprobs:
        block, offset = divmod(at, self.cache.block_size)
        logprob, rank, top_id, top_logprob = self.known[block][offset].item()
        token = int(self.prompt.token_ids[at])
        return TokenLogprobs(token, logprob, rank, (top_id,), (top_logprob,))

    def _keep(self, new: list[TokenLogprobs]) -> None:
        size, begin, end = self.cache.block_size, self._num_known, self._num_known + len(new)
        self._entries[begin:end] = [
            (item.logprob, item.rank, item.top_ids[0], item.top_logprobs[0]) for item in new
        ]
        self._num_known = end
        is_whole = end == len(self._entries)
        for block in range(begin // size, len(self.hashes) if is_whole else end // size):
            self.put(block, self._entries[block * size : (block + 1) * size])
