"""Waiting sequences in order of priority and arrival."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyengine.engine.request import SequenceState

_FEW = 64
"""Stale entries that are always kept."""


class WaitingQueue:
    """Sequences by `SequenceState.order`: O(log n) to add and to pop the first, O(1) to remove any.

    A removed sequence leaves its entry in the heap. When most entries are stale, the heap is
    rebuilt, which is amortised O(1)."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._entries: dict[SequenceState, _Entry] = {}
        """Waiting sequences, each with its valid entry."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sequence: "SequenceState") -> bool:
        return sequence in self._entries

    def __iter__(self) -> "Iterator[SequenceState]":
        """The sequences in order; O(n log n)."""
        return iter(sorted(self._entries, key=lambda sequence: sequence.order))

    def add(self, sequence: "SequenceState") -> None:
        """Add a sequence."""
        entry = _Entry(sequence)
        heappush(self._heap, entry)  # stale until the next line
        self._entries[sequence] = entry

    def first(self) -> "SequenceState | None":
        """The next sequence."""
        while self._heap:
            entry = self._heap[0]
            if self._entries.get(entry.sequence) is entry:
                return entry.sequence
            heappop(self._heap)
        return None

    def in_order(self) -> "Iterator[SequenceState]":
        """Iterate over the sequences in order, O(log n) each.

        Meanwhile sequences may be removed, not added.
        """
        self.first()  # drops stale entries before it
        heap = self._heap
        ahead = [(heap[0], 0)] if heap else []
        while ahead:
            entry, place = heappop(ahead)
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heappush(ahead, (heap[child], child))
            if self._entries.get(entry.sequence) is entry:
                yield entry.sequence

    def discard(self, sequence: "SequenceState") -> None:
        """Remove a sequence, if it is here."""
        self._entries.pop(sequence, None)
        if len(self._heap) > 2 * len(self._entries) + _FEW:
            self._heap = list(self._entries.values())
            heapify(self._heap)


class _Entry:
    """A sequence's entry in the heap; it may wait again later, with another one."""

    __slots__ = ("order", "sequence")

    def __init__(self, sequence: "SequenceState") -> None:
        self.order = sequence.order
        self.sequence = sequence

    def __lt__(self, other: "_Entry") -> bool:
        return self.order < other.order
