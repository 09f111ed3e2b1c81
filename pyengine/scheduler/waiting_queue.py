"""Who waits, in order of priority and arrival."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from pyengine.scheduler.batch import Job

_FEW = 64
"""So many entries of jobs that are gone are always borne with."""


class WaitingQueue:
    """Jobs by `Job.order`: O(log n) to add and to take the first, O(1) to take out any.

    A job that is taken out leaves its entry in the heap; when most entries are of jobs that are
    gone the heap is made anew, so that this costs O(1) for each as well.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._entries: dict[Job, _Entry] = {}
        """Who waits, each with the one entry that counts."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, job: Job) -> bool:
        return job in self._entries

    def __iter__(self) -> Iterator[Job]:
        """In order; O(n log n)."""
        return iter(sorted(self._entries, key=lambda job: job.order))

    def add(self, job: Job) -> None:
        """Let a job wait."""
        entry = _Entry(job)
        heappush(self._heap, entry)  # counts for nothing before the next line
        self._entries[job] = entry

    def first(self) -> Job | None:
        """Who is next."""
        while self._heap:
            entry = self._heap[0]
            if self._entries.get(entry.job) is entry:
                return entry.job
            heappop(self._heap)
        return None

    def in_order(self) -> Iterator[Job]:
        """The jobs in order, O(log n) for each that is asked for.

        Meanwhile jobs may be taken out, and none added.
        """
        self.first()  # forgets those before it that are gone
        heap = self._heap
        ahead = [(heap[0], 0)] if heap else []
        while ahead:
            entry, place = heappop(ahead)
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heappush(ahead, (heap[child], child))
            if self._entries.get(entry.job) is entry:
                yield entry.job

    def discard(self, job: Job) -> None:
        """Take a job out, if it is here."""
        self._entries.pop(job, None)
        if len(self._heap) > 2 * len(self._entries) + _FEW:
            self._heap = list(self._entries.values())
            heapify(self._heap)


class _Entry:
    """A job's place in the heap; it may wait again later, at another one."""

    __slots__ = ("job", "order")

    def __init__(self, job: Job) -> None:
        self.order = job.order
        self.job = job

    def __lt__(self, other: "_Entry") -> bool:
        return self.order < other.order
