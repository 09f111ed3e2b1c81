"""The order in which waiting requests of equal priority are admitted, and the prefixes they keep.

The first requests of the queue pin their cached prefixes: an eviction takes other blocks first.
Pins give way before a running or admitted request lacks blocks, so they never block one. As long as
they leave enough of the pool, requests are admitted in order of arrival. Otherwise those with a
larger part of their prompt in the cache go first, so that requests with a common prefix run close
together, before it is evicted. Later requests overtake each one at most `max_overtakes` times.

A step looks at the first `_WINDOW` requests of the queue. Each is matched once, when it comes into
the window; after prompts were computed, `_REMATCHED` of them are matched again per step.
"""

from collections import defaultdict
from dataclasses import dataclass
from operator import attrgetter

from pyengine.kv_cache import BlockManager, Pin
from pyengine.request.request import SequenceState

_by_order = attrgetter("order")
_WINDOW = 64
"""Waiting requests that are compared and whose prefixes are pinned."""
_REMATCHED = 8
"""Requests of the window that are matched again in a step, after prompts were computed."""
_PARTS = 4
"""Cached prefixes are compared in quarters of the prompt; equal ones go in order of arrival."""
_SPARE, _SHORT = 8, 4
"""No request pins a prefix while fewer than one in eight blocks are free or evictable. While fewer
than one in four are, requests with cached prefixes go first."""


@dataclass(slots=True)
class _Waiting:
    """What is known of a sequence that waits, or waited before it was preempted."""

    prefix_length: int | None = None
    """Tokens that were cached when it was last matched while it waited; None before."""
    num_overtaken: int = 0
    """Admissions of later requests of its priority before its own."""


class PrefixOrder:
    """Chooses the next request to admit, and pins the prefixes of those that wait."""

    window = _WINDOW

    def __init__(self, manager: BlockManager, max_overtakes: int) -> None:
        self._manager = manager
        self._max_overtakes = max_overtakes
        self._sequences: defaultdict[SequenceState, _Waiting] = defaultdict(_Waiting)
        """Of unfinished sequences that have waited."""
        self._pinned: dict[SequenceState, Pin] = {}
        """Pins that keep the cached tokens of waiting requests."""
        self._num_stale = 0
        """Requests to match again since the last prompts were computed."""
        self._next = 0
        """The next position of the window to match again."""
        self.has_changed = False
        """True if a request came into the queue or left it since the last `protect`."""

    def enqueued(self, sequence: SequenceState) -> None:
        """A sequence begins to wait."""
        self._sequences[sequence].prefix_length, self.has_changed = None, True

    def dequeued(self, sequence: SequenceState) -> None:
        """A sequence waits no longer."""
        self.has_changed = True
        if sequence in self._pinned:
            self._unpin(sequence)

    def forget(self, sequence: SequenceState) -> None:
        """Drop a sequence that has ended."""
        self._sequences.pop(sequence, None)

    def choose(self, ready: list[SequenceState]) -> SequenceState:
        """The next request to admit, of some in order."""
        first = ready[0]
        if len(ready) == 1 or self._has_available(_SHORT):
            return first
        chosen, longest, priority = first, -1, first.order[0]
        for sequence in ready:
            if sequence.order[0] != priority:
                break
            waiting = self._sequences[sequence]
            length = waiting.prefix_length
            if length is None:
                length = self._match(sequence)
            if (parts := _PARTS * length // sequence.num_tokens) > longest:
                chosen, longest = sequence, parts
            if waiting.num_overtaken >= self._max_overtakes:
                break
        return chosen

    def _has_available(self, divisor: int) -> bool:
        """True if one block in this many is free or evictable."""
        return self._manager.usage().available * divisor >= self._manager.num_blocks

    def count(self, sequence: SequenceState, ready: list[SequenceState]) -> None:
        """Count an admission for the requests that it overtakes."""
        priority, order = sequence.order[0], sequence.order
        for other in ready:
            if other.order > order or other.order[0] != priority:
                break
            self._sequences[other].num_overtaken += 1

    def expect_more(self) -> None:
        """Prompts were computed: the prefixes of waiting requests may be longer."""
        self._num_stale = _WINDOW

    def refresh(self, waiting: list[SequenceState]) -> None:
        """Match some waiting requests again, if prompts were computed since the last time."""
        size = min(len(waiting), _WINDOW)
        num = min(self._num_stale, size, _REMATCHED)
        for _ in range(num):
            self._next = (self._next + 1) % size
            self._match(waiting[self._next])
        self._num_stale -= num

    def protect(self, waiting: list[SequenceState]) -> None:
        """Pin the cached prefixes of these waiting requests, as far as spare blocks allow."""
        self.has_changed = False
        for sequence in waiting:
            if self._sequences[sequence].prefix_length is None:
                self._match(sequence)

    def _match(self, sequence: SequenceState) -> int:
        """Pin the longest cached prefix of a request; return its length in tokens."""
        request, waiting = sequence.request, self._sequences[sequence]
        if not request.read_cache:
            waiting.prefix_length = 0
            return 0
        tokens = request.prompt_token_ids
        if sequence.num_tokens > len(tokens):
            tokens = sequence.kv.tokens()
        pin = self._manager.match_prefix(tokens, **request.space)
        if sequence in self._pinned:
            self._unpin(sequence)
        length = waiting.prefix_length = pin.num_tokens
        if length and len(self._pinned) < _WINDOW and self._has_available(_SPARE):
            self._pinned[sequence] = pin
        else:
            pin.release()
        return length

    def drop_all(self) -> None:
        """Release all pins: what they match is no longer valid."""
        for sequence in list(self._pinned):
            self._unpin(sequence)
        for waiting in self._sequences.values():
            waiting.prefix_length = None
        self.has_changed = True

    def give_way(self, needed: int) -> bool:
        """Release pins, last in the queue first, until this many blocks are available.

        False if there were none.
        """
        if not self._pinned:
            return False
        for sequence in sorted(self._pinned, key=_by_order, reverse=True):
            self._unpin(sequence)
            if self._manager.usage().available >= needed:
                break
        return True

    def _unpin(self, sequence: SequenceState) -> None:
        """Release the pin of a request that has one."""
        self._pinned.pop(sequence).release()
