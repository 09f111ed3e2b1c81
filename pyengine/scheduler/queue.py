"""The waiting sequences: a queue for each tenant, in order of priority and arrival."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

from pyengine.request.request import SequenceState

by_order = attrgetter("order")


class WaitingQueue:
    """Waiting sequences by tenant. A priority counts within the queue of its tenant only."""

    def __init__(self) -> None:
        self._queues: dict[bytes, list[SequenceState]] = {}
        """No queue is empty."""

    def __len__(self) -> int:
        return sum([len(queue) for queue in self._queues.values()])

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def tenants(self) -> list[bytes]:
        """Tenants with waiting sequences."""
        return list(self._queues)

    def count(self, tenant: bytes) -> int:
        """The number of a tenant's waiting sequences."""
        return len(self._queues.get(tenant, ()))

    def of(self, tenant: bytes) -> list[SequenceState]:
        """A tenant's waiting sequences, in order. Do not change the list."""
        return self._queues.get(tenant, [])

    def add(self, sequence: SequenceState) -> None:
        """Let a sequence wait, unless it does."""
        queue = self._queues.setdefault(sequence.request.tenant, [])
        place = bisect_left(queue, sequence.order, key=by_order)
        if queue[place : place + 1] != [sequence]:
            queue.insert(place, sequence)

    def remove(self, sequence: SequenceState) -> bool:
        """Let a sequence wait no more; False if it did not."""
        tenant = sequence.request.tenant
        queue = self._queues.get(tenant, [])
        place = bisect_left(queue, sequence.order, key=by_order)
        if queue[place : place + 1] != [sequence]:
            return False
        del queue[place]
        if not queue:
            del self._queues[tenant]
        return True

    def __iter__(self) -> Iterator[SequenceState]:
        """All sequences, the first of each tenant first. Meanwhile the last one may be removed."""
        queues = [self.iterate(tenant) for tenant in self._queues]
        while queues:
            left = []
            for queue in queues:
                for sequence in islice(queue, 1):
                    yield sequence
                    left.append(queue)
            queues = left

    def iterate(self, tenant: bytes) -> Iterator[SequenceState]:
        """A tenant's sequences, in order. Meanwhile the last one may be removed."""
        place = 0
        while place < len(queue := self.of(tenant)):
            sequence = queue[place]
            yield sequence
            place += queue[place : place + 1] == [sequence]

    def first(self, count: int) -> list[SequenceState]:
        """The first sequences of this iteration."""
        if len(self._queues) == 1:
            (queue,) = self._queues.values()
            return queue[:count]
        return list(islice(self, count))
