"""Requests that wait for ever beside a pool that could take them (xLLM pull request 1264).

With prefix caching on, blocks of ended requests stay idle instead of free. A rule that admits by
"blocks not in the free list" takes them for use: nothing runs, so nothing allocates, so nothing is
evicted, and the rule says no for ever. The lookahead slots of a multi-token-prediction head add
to that use, come and go, and must not cost a request its slot either.
"""

from collections.abc import Collection, Iterable

import pytest

from pyengine.kv_cache import BlockManager, PoolUsage
from pyengine.request.request import SequenceState
from pyengine.scheduler.batch import ScheduledStep
from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits, StalledError
from tests.support.lookahead import LookaheadManager
from tests.support.requests import entries_of, make_sequence

NUM_BLOCKS, BLOCK_SIZE = 16, 4
MAX_NUM_SEQS, BUDGET = 4, 16
NUM_TOKENS = 6
"""Output of each request."""
THRESHOLD = 0.8


class UsageScheduler(Scheduler):
    """Admits while the pool looks less than `THRESHOLD` used: the rule that starves."""

    def _admit(
        self, step: ScheduledStep, without: Collection[SequenceState], closed: set[bytes]
    ) -> None:
        used = NUM_BLOCKS - self._manager.usage().free
        if used / NUM_BLOCKS < THRESHOLD:
            super()._admit(step, without, closed)


class Service:
    """A scheduler at work, one request after the other, and the steps at which each came in."""

    def __init__(self, kind: type[Scheduler], lookahead: int) -> None:
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        limits = SchedulerLimits(max_num_batched_tokens=BUDGET, max_num_seqs=MAX_NUM_SEQS)
        self.scheduler = kind(LookaheadManager(self.manager, lookahead), limits)  # type: ignore[arg-type]
        self.num_steps = 0
        self.admitted: dict[str, int] = {}
        self.left: dict[str, int] = {}

    def add(self, names: Iterable[int], length: int = 12) -> None:
        for name in names:
            tokens = [name * 100 + at for at in range(length)]  # nothing in common
            self.scheduler.add(make_sequence(str(name), tokens))
            self.left[str(name)] = NUM_TOKENS

    def step(self) -> None:
        self.num_steps += 1
        step = self.scheduler.schedule()
        assert step is not None
        self.scheduler.commit(step, [1] * len(step.sampling_sequences))
        for entry in entries_of(step):
            self.admitted.setdefault(entry.sequence.request.request_id, self.num_steps)
        for sequence in step.sampling_sequences:
            self.left[sequence.request.request_id] -= 1
        done = [
            sequence
            for sequence in step.sampling_sequences
            if self.left[sequence.request.request_id] == 0
        ]
        self.scheduler.finish(done)
        self.manager.check()

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_a_rule_that_reads_blocks_not_in_the_free_list_starves(lookahead: int) -> None:
    service = Service(UsageScheduler, lookahead)
    service.add(range(20))
    with pytest.raises(StalledError):  # what our engine says where that one waits in silence
        service.run()
    assert 0 < len(service.admitted) < 20
    assert service.scheduler.num_running == 0
    before = service.manager.usage()
    assert before.available == NUM_BLOCKS, "every block is there to be taken"
    assert before.free / NUM_BLOCKS <= 1 - THRESHOLD
    for _ in range(1000):
        with pytest.raises(StalledError):
            service.step()
        assert service.manager.usage() == before  # a fixed point: the same answer for ever


@pytest.mark.parametrize("lookahead", [0, 3, 8])
def test_ours_admits_the_same_requests_in_bounded_time(lookahead: int) -> None:
    """The oldest request gets on in every step, so each waits for the older ones at most."""
    service = Service(Scheduler, lookahead)
    lengths = [12, 3, 40, 12, 25, 1, 30, 12, 12, 40] * 2
    for name, length in enumerate(lengths):
        service.add([name], length)
    service.run()
    chunk = (BUDGET - MAX_NUM_SEQS + 1) // BLOCK_SIZE * BLOCK_SIZE  # the others decode beside it
    bound = 1
    for name, length in enumerate(lengths):
        assert service.admitted[str(name)] <= bound
        bound += -(-length // chunk) + NUM_TOKENS - 1
    assert service.manager.stats().evicted_blocks > 0
    assert service.manager.usage().available == NUM_BLOCKS


@pytest.mark.parametrize("lookahead", [0, 3, 8])
def test_ours_admits_into_a_pool_of_evictable_blocks_at_once(lookahead: int) -> None:
    service = Service(Scheduler, lookahead)
    for name in range(8):  # one by one, until the pool is full of what they left
        service.add([name])
        service.run()
    usage: PoolUsage = service.manager.usage()
    assert (usage.free + usage.evictable, usage.available) == (NUM_BLOCKS, NUM_BLOCKS)
    assert usage.free / NUM_BLOCKS <= 1 - THRESHOLD
    service.add([100], length=NUM_BLOCKS * BLOCK_SIZE - NUM_TOKENS - lookahead)  # all but its end
    service.step()
    assert service.admitted["100"] == service.num_steps
    service.run()
