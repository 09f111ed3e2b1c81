"""The order in which waiting requests of equal priority are admitted, by their cached prefixes.

Requests with more cached tokens go first, and each is overtaken at most `max_overtakes` times by
requests that came later. So requests that share a prefix run close together, before it is evicted.
The first requests of the queue pin their cached prefixes: an eviction takes other blocks first.
Pins give way before a running or admitted request lacks blocks, so they never delay one.

A step looks at the first `_WINDOW` requests of the queue. Each is matched once, when it comes into
the window; after prompts were computed, `_REMATCHED` of them are matched again per step.
"""

from operator import attrgetter
from typing import TYPE_CHECKING

from pyengine.kv_cache import BlockManager

if TYPE_CHECKING:
    from pyengine.engine.request import SequenceState

_by_order = attrgetter("order")
_WINDOW = 64
"""Waiting requests that are compared and whose prefixes are pinned."""
_REMATCHED = 8
"""Requests of the window that are matched again in a step, after prompts were computed."""
_SPARE = 8
"""One in so many blocks of the pool is never pinned: for drafts, loads and the next decodes."""


class PrefixOrder:
    """Chooses the next request to admit, and pins the prefixes of those that wait."""

    window = _WINDOW

    def __init__(self, manager: BlockManager, max_overtakes: int) -> None:
        self._manager = manager
        self._max_overtakes = max_overtakes
        self._pinned: dict[SequenceState, None] = {}
        self._spare = manager.num_blocks // _SPARE
        self._num_stale = 0
        """Requests to match again since the last prompts were computed."""
        self._next = 0
        """The next position of the window to match again."""
        self.has_changed = False
        """True if a request came into the queue or left it since the last `protect`."""

    def choose(self, ready: "list[SequenceState]") -> "SequenceState":
        """The next request to admit, of some in order.

        Of those with the priority of the first: the one with the longest cached prefix that
        overtakes none that was overtaken often enough.
        """
        chosen = first = ready[0]
        if len(ready) == 1:
            return first
        priority, most = first.order[0], -1
        for sequence in ready:
            if sequence.order[0] != priority:
                break
            length = sequence.prefix_length
            if length is None:
                length = self._match(sequence)
            if length > most:
                chosen, most = sequence, length
            if sequence.num_overtaken >= self._max_overtakes:
                break
        return chosen

    def count(self, sequence: "SequenceState", ready: "list[SequenceState]") -> None:
        """Count an admission for the requests that it overtakes."""
        priority, order = sequence.order[0], sequence.order
        for other in ready:
            if other.order > order or other.order[0] != priority:
                break
            other.num_overtaken += 1

    def expect_more(self) -> None:
        """Prompts were computed: the prefixes of waiting requests may be longer."""
        self._num_stale = _WINDOW

    def refresh(self, waiting: "list[SequenceState]") -> None:
        """Match some waiting requests again, if prompts were computed since the last time."""
        num = min(self._num_stale, len(waiting), _REMATCHED)
        size = min(len(waiting), _WINDOW)
        for _ in range(num):
            self._next = (self._next + 1) % size
            self._match(waiting[self._next])
        self._num_stale -= num

    def protect(self, waiting: "list[SequenceState]") -> None:
        """Pin the cached prefixes of the first waiting requests, as far as blocks are to spare."""
        self.has_changed = False
        for sequence in waiting[:_WINDOW]:
            if sequence.prefix_length is None:
                self._match(sequence)

    def _match(self, sequence: "SequenceState") -> int:
        """Pin the longest cached prefix of a request; return its length in tokens."""
        request = sequence.request
        if not request.read_cache:
            sequence.prefix_length = 0
            return 0
        tokens = request.prompt_token_ids
        if sequence.num_tokens > len(tokens):
            tokens = sequence.kv.tokens()
        pin = self._manager.match_prefix(tokens, namespace=request.namespace)
        self.forget(sequence)
        length = sequence.prefix_length = pin.num_tokens
        if (
            length
            and len(self._pinned) < _WINDOW
            and self._manager.usage().available >= self._spare
        ):
            sequence.prefix_pin = pin
            self._pinned[sequence] = None
        else:
            pin.release()
        return length

    def give_way(self, needed: int) -> bool:
        """Release pins, last in the queue first, until so many blocks are available.

        False if there were none.
        """
        if not self._pinned:
            return False
        for sequence in sorted(self._pinned, key=_by_order, reverse=True):
            self.forget(sequence)
            if self._manager.usage().available >= needed:
                break
        return True

    def forget(self, sequence: "SequenceState") -> None:
        """Release the pin of a request, if it has one."""
        if sequence.prefix_pin is not None:
            sequence.prefix_pin.release()
            sequence.prefix_pin = None
            self._pinned.pop(sequence, None)
