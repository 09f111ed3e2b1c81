"""Counters of reuse outside of step plans: attached prefixes, and prompts of further samples."""

from collections.abc import Iterable

from pyengine.kv_cache import Sequence as CachedSequence


class ReuseCounters:
    """What the counters of the block manager miss: added to them, every prompt token is counted.

    The block manager counts what a step plan finds in the cache. A prefix that is attached before
    the step is planned, and blocks that a fork shares, are counted here.
    """

    def __init__(self, block_size: int, null_block: int) -> None:
        self._block_size = block_size
        self._null_block = null_block
        self._values = dict.fromkeys(
            ("prompt_tokens", "cached_tokens", "hit_blocks", "forked_tokens", "forked_blocks"), 0
        )

    def as_dict(self) -> dict[str, int]:
        """The counters by name; they only grow."""
        return dict(self._values)

    def num_blocks(self, blocks: Iterable[int]) -> int:
        """How many of these blocks of a table are really there: not behind a window."""
        return len([block for block in blocks if block != self._null_block])

    def add_attached(self, num_tokens: int, num_blocks: int) -> None:
        """Count a cached prefix that a committed step did not compute."""
        self._values["prompt_tokens"] += num_tokens
        self._values["cached_tokens"] += num_tokens
        self._values["hit_blocks"] += num_blocks

    def add_fork(self, sequence: CachedSequence) -> None:
        """Count what a sequence that has just been forked shares; its last block if it is full."""
        computed = sequence.num_computed_tokens
        full = computed // self._block_size
        self._values["forked_tokens"] += computed
        self._values["forked_blocks"] += sum(
            [self.num_blocks(table[:full]) for table in sequence.block_tables]
        )
