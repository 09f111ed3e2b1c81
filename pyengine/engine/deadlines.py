"""Deadlines of unfinished requests."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from time import monotonic

from pyengine.request.request import Request


class Deadlines:
    """A heap of the deadlines of requests. Most requests end in time and stay in it for a while."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._numbers = count()

    def add(self, deadline: float, request: Request) -> None:
        """Add a request; `deadline` is in seconds of `time.monotonic`."""
        heappush(self._heap, (deadline, next(self._numbers), request))

    def overdue(self, num_unfinished: int) -> Iterator[Request]:
        """Remove, one by one, the requests whose deadline has passed; some may have ended.

        Entries of ended requests are dropped once they outnumber the unfinished ones.
        """
        while self._heap and self._heap[0][0] <= monotonic():
            yield heappop(self._heap)[2]
        if len(self._heap) > 2 * num_unfinished + 64:
            self._heap = [entry for entry in self._heap if entry[2].result.finished_time is None]
            heapify(self._heap)
