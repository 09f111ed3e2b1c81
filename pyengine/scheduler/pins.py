"""Cached prefixes that callers ask to keep: pins with an end, and prefixes with a priority.

A pin holds its blocks until its time is over. All pins together hold at most `limit` blocks, which
leaves space for the longest request, and each owner has its share of them: a pin that exceeds
either is refused. A prefix with a priority is pinned too, in what pins leave of the owner's share,
until a pin or a request needs the blocks: those of the owner that holds most go first, of these the
lowest priority, then the oldest.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from time import monotonic

from pyengine.errors import PinQuotaError
from pyengine.kv_cache import BlockManager, Pin
from pyengine.request.cache_hints import CacheHints, KeptPrefix
from pyengine.request.prompts import BlockSpace

_MAX_KEPT = 1024
"""Prefixes with a priority that one owner may have: those of a conversation share their blocks."""

_LONGEST_WAIT = 3600.0
"""Maximum seconds between an idle engine's checks for expired pins."""


class PinTable:
    """The kept prefixes of a pool and the blocks that they hold, by owner. For one thread."""

    def __init__(self, manager: BlockManager, limit: int) -> None:
        self._manager = manager
        self.limit = limit
        """The most blocks that all kept prefixes hold."""
        self._uses: Counter[int] = Counter()
        """For each block, the kept prefixes with it."""
        self._uses_of: defaultdict[bytes, Counter[int]] = defaultdict(Counter)
        """The same for each owner that has any."""
        self._pinned: dict[tuple[bytes, frozenset[int]], KeptPrefix] = {}
        """Pins, by owner and blocks."""
        self.ends: list[tuple[float, int, KeptPrefix]] = []
        """A heap of pins by the time of their ends, or an earlier one if they were renewed.

        At most half of its entries are of pins that were released before their ends.
        """
        self._by_priority: defaultdict[bytes, list[tuple[int, int, KeptPrefix]]]
        self._by_priority = defaultdict(list)
        """Heaps of prefixes with a priority, by the owners that have any."""
        self._numbers = count()

    @property
    def num_blocks(self) -> int:
        """The blocks that all kept prefixes hold."""
        return len(self._uses)

    def num_blocks_of(self, owner: bytes) -> int:
        """The blocks that the prefixes of an owner hold."""
        return len(self._uses_of[owner]) if owner in self._uses_of else 0

    def pin(self, tokens: Sequence[int], space: BlockSpace, hints: CacheHints) -> list[KeptPrefix]:
        """Pin the cached part of the prefixes that a request's hints name.

        A prefix that its owner has pinned already is pinned until the later of both ends. Raises
        `PinQuotaError` at the first prefix that takes more blocks than are left.
        """
        now, pinned = monotonic(), []
        for num_tokens, seconds in hints.pins:
            pin = self._manager.match_prefix(tokens[:num_tokens], **space)
            blocks, end = self._blocks_of(pin), now + seconds
            kept = self._pinned.get((hints.owner, blocks))
            if kept is not None:  # its entry in `ends` is moved when it comes up
                pin.release()
                kept.end = max(kept.end, end)
            else:
                shortage = self._make_space(blocks, hints, below=inf)
                if shortage:
                    pin.release()
                    raise PinQuotaError(
                        f"pinning {num_tokens} tokens takes {len(blocks)} blocks, {shortage}"
                    )
                kept = KeptPrefix(hints.owner, pin, blocks, end)
                self._add(kept)
                self._pinned[hints.owner, blocks] = kept
                heappush(self.ends, (end, next(self._numbers), kept))
            pinned.append(kept)
        return pinned

    def keep(self, pin: Pin, priority: int, hints: CacheHints) -> KeptPrefix | None:
        """Keep a prefix until its blocks are needed, if the owner's share has space for it."""
        blocks, owner = self._blocks_of(pin), hints.owner
        if self._make_space(blocks, hints, below=priority):
            pin.release()
            return None
        if owner in self._by_priority and len(self._by_priority[owner]) >= _MAX_KEPT:
            self._drop_lowest(owner)
        kept = KeptPrefix(owner, pin, blocks, inf)
        self._add(kept)
        heappush(self._by_priority[owner], (priority, next(self._numbers), kept))
        return kept

    def release(self, kept: KeptPrefix) -> None:
        """End a pin early; no effect if it has ended."""
        if kept.pin.is_released:
            return
        kept.pin.release()
        own = self._uses_of[kept.owner]
        for uses in (self._uses, own):
            for block in kept.blocks:
                uses[block] -= 1
                if not uses[block]:
                    del uses[block]
        if not own:
            del self._uses_of[kept.owner]
        if self._pinned.get((kept.owner, kept.blocks)) is kept:
            del self._pinned[kept.owner, kept.blocks]
        if len(self.ends) > 2 * len(self._pinned):
            self.ends = [entry for entry in self.ends if not entry[2].pin.is_released]
            heapify(self.ends)

    def release_all(self) -> None:
        """End all pins, and drop all prefixes with a priority."""
        for kept in [*self._pinned.values()]:
            self.release(kept)
        while self._by_priority:
            self._drop_lowest(next(iter(self._by_priority)))

    def expire(self) -> float | None:
        """End the pins whose time is over; return the seconds to the next end, None without one."""
        now = monotonic()
        while self.ends and self.ends[0][0] <= now:
            *_, kept = heappop(self.ends)
            if kept.end <= now:
                self.release(kept)
            elif not kept.pin.is_released:
                heappush(self.ends, (kept.end, next(self._numbers), kept))
        return min(self.ends[0][0] - now, _LONGEST_WAIT) if self.ends else None

    def give_way(self, needed: int) -> bool:
        """Drop prefixes with a priority until this many blocks are available.

        Those of the owner that holds most go first, of these the lowest priority: a priority of
        one owner does not count against those of another. False if there were none.
        """
        if not self._by_priority:
            return False
        while self._by_priority:
            self._drop_lowest(max(self._by_priority, key=self.num_blocks_of))
            if self._manager.usage().available >= needed:
                break
        return True

    def _blocks_of(self, pin: Pin) -> frozenset[int]:
        return frozenset(pin.blocks) - {self._manager.null_block}

    def _add(self, kept: KeptPrefix) -> None:
        self._uses.update(kept.blocks)
        self._uses_of[kept.owner].update(kept.blocks)

    def _drop_lowest(self, owner: bytes) -> None:
        """End the prefix with the lowest priority of an owner that has one."""
        heap = self._by_priority[owner]
        *_, kept = heappop(heap)
        if not heap:
            del self._by_priority[owner]
        self.release(kept)

    def _make_space(self, blocks: frozenset[int], hints: CacheHints, below: float) -> str:
        """Drop the owner's prefixes with priorities up to `below` as far as these blocks need it.

        Returns the numbers of the quota that they exceed even then; empty if none.
        """
        owner = hints.owner
        while shortage := self._shortage(blocks, hints):
            if owner not in self._by_priority or self._by_priority[owner][0][0] > below:
                break
            self._drop_lowest(owner)
        return shortage

    def _shortage(self, blocks: frozenset[int], hints: CacheHints) -> str:
        """The numbers of the quota that these blocks exceed; empty if none."""
        if blocks and not self.limit:
            return (
                "and no block may be pinned: max_pinned_share is 0, or the KV pool holds little "
                "more than the longest request; lower max_model_len, or give a larger pool"
            )
        own: Counter[int] = self._uses_of.get(hints.owner) or Counter()
        quota = self.limit // hints.num_owners
        new = len(blocks - own.keys())
        if new and len(own) + new > quota:
            return (
                f"{new} of them new, and this caller's pins hold {len(own)} of its {quota} blocks: "
                "release one, wait for its end, or pin less"
            )
        new = len(blocks - self._uses.keys())
        if new and len(self._uses) + new > self.limit:
            return (
                f"{new} of them new, and all pins hold {len(self._uses)} of {self.limit} blocks: "
                "try again when some have ended"
            )
        return ""
