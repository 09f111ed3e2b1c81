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
        self.queues: dict[bytes, list[SequenceState]] = {}
        """The waiting sequences of each tenant that has any, in order. Change no list."""

    def __len__(self) -> int:
        return sum([len(queue) for queue in self.queues.values()])

    def count(self, tenant: bytes) -> int:
        """The number of a tenant's waiting sequences."""
        return len(self.queues.get(tenant, ()))

    def add(self, sequence: SequenceState) -> None:
        """Let a sequence wait, unless it does."""
        queue = self.queues.setdefault(sequence.request.tenant, [])
        position = bisect_left(queue, sequence.order, key=by_order)
        if queue[position : position + 1] != [sequence]:
            queue.insert(position, sequence)

    def remove(self, sequence: SequenceState) -> bool:
        """Let a sequence wait no more; False if it did not."""
        tenant = sequence.request.tenant
        queue = self.queues.get(tenant, [])
        position = bisect_left(queue, sequence.order, key=by_order)
        if queue[position : position + 1] != [sequence]:
            return False
        del queue[position]
        if not queue:
            del self.queues[tenant]
        return True

    def __iter__(self) -> Iterator[SequenceState]:
        """All sequences, the first of each tenant first. Meanwhile the last one may be removed."""
        queues = [self.iterate(tenant) for tenant in self.queues]
        while queues:
            left = []
            for queue in queues:
                for sequence in islice(queue, 1):
                    yield sequence
                    left.append(queue)
            queues = left

    def iterate(self, tenant: bytes) -> Iterator[SequenceState]:
        """A tenant's sequences, in order. Meanwhile the last one may be removed."""
        position = 0
        while position < len(queue := self.queues.get(tenant, [])):
            sequence = queue[position]
            yield sequence
            position += queue[position : position + 1] == [sequence]

    def first(self, count: int) -> list[SequenceState]:
        """The first sequences of this iteration."""
        if len(self.queues) == 1:
            (queue,) = self.queues.values()
            return queue[:count]
        return list(islice(self, count))
