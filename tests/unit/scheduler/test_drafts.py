"""Drafts delay no request: 256 sequences with 7 drafts each beside a stream of new prompts.

256 x 8 rows are the whole default budget of 2,048 tokens. A scheduler that planned drafts with the
decodes would never admit a prompt again; one that kept the blocks of rejected drafts would admit
later than without. Ours admits every prompt in the step in which it is admitted without drafts.
"""

from collections.abc import Collection

import pytest

from pyengine.kv_cache import BlockManager, Loading, NoBudget, NoRoom
from pyengine.request.request import SequenceState
from pyengine.scheduler.batch import ScheduledStep
from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.support.requests import make_sequence

RUNNING, DRAFTS, BLOCK_SIZE = 256, 7, 4
BUDGET = RUNNING * (1 + DRAFTS)
RIGHT, WRONG = 1, 2
PROMPT = 24
"""Tokens of each prompt of the stream."""
LENGTH = 3
"""Tokens of its answer."""
ARRIVALS = 40


class DraftsFirst(Scheduler):
    """The rule that starves: drafts are planned with the decodes."""

    def _admit(
        self, step: ScheduledStep, without: Collection[SequenceState], closed: set[bytes]
    ) -> NoRoom | NoBudget | Loading | None:
        self.draft(step, {sequence: [WRONG] * DRAFTS for sequence in step.decodes})
        return super()._admit(step, without, closed)


class Service:
    """A scheduler whose runner draws the same token for ever, and a drafter that is never right."""

    def __init__(
        self,
        drafts: int,
        *,
        num_blocks: int,
        depth: int = 1,
        kind: type[Scheduler] = Scheduler,
        heads: int = 0,
    ) -> None:
        self.manager = BlockManager(num_blocks, BLOCK_SIZE)
        limits = SchedulerLimits(max_num_batched_tokens=BUDGET, max_num_seqs=2 * RUNNING)
        self.scheduler = kind(self.manager, limits, replay=heads)
        self.drafts, self.depth = drafts, depth
        self.open: list[ScheduledStep] = []
        self.num_planned = self.num_drafted = 0
        self.arrived: dict[str, int] = {}
        self.waited: dict[str, int] = {}
        """Steps planned from its arrival until it was in one."""
        self.left: dict[str, int] = {}

    def add(self, name: str, tokens: list[int], length: int) -> None:
        most = len(tokens) + length
        self.scheduler.add(make_sequence(name, tokens, max_tokens=most))
        self.arrived[name], self.left[name] = self.num_planned, length

    def _plan(self) -> None:
        for item in self.open:
            for sequence in item.sampling_sequences:
                sequence.wants_drafts = self.drafts > 0
        step = self.scheduler.schedule(ahead=bool(self.open))
        if step is None:
            return
        self.num_planned += 1
        for entry in step.chunks:
            name = entry.sequence.request.request_id
            self.waited.setdefault(name, self.num_planned - self.arrived[name])
        busy = set().union(*(set(item.sampling_sequences) for item in self.open))
        if self.drafts and not step.drafts:
            known = [sequence for sequence in step.decodes if sequence not in busy]
            self.scheduler.draft(step, {sequence: [WRONG] * self.drafts for sequence in known})
        self.num_drafted += sum(map(len, step.drafts.values()))
        self.open.append(step)

    def step(self) -> None:
        for _ in range(self.depth - len(self.open)):
            self._plan()
        step = self.open.pop(0)
        sequences = step.sampling_sequences
        counts = [1] * len(sequences) if step.drafts else None
        self.scheduler.commit(step, [RIGHT] * len(sequences), counts)
        for sequence in sequences:
            self.left[sequence.request.request_id] -= 1
        ended = [sequence for sequence in sequences if self.left[sequence.request.request_id] == 0]
        self.scheduler.finish(ended)


def filled(service: Service) -> None:
    """Leave no free block: all are evictable, with contents of requests that have ended."""
    manager = service.manager
    for names in range(manager.num_blocks):
        if not manager.usage().free:
            break
        size = min(manager.usage().free * BLOCK_SIZE, 400)
        service.add(f"old {names}", [10_000 + names * 400 + at for at in range(size)], 1)
        service.step()
    usage = manager.usage()
    assert (usage.free, usage.evictable) == (0, manager.num_blocks)


def waits(service: Service) -> list[int]:
    filled(service)
    for name in range(RUNNING):
        service.add(f"runs {name}", [500 + 3 * name + at for at in range(3)], 10_000)
    for _ in range(4):
        service.step()
    service.num_drafted = 0
    names = [f"new {at}" for at in range(ARRIVALS)]
    for at, name in enumerate(names):
        of = at - at % 2  # every other one is in the cache
        service.add(name, [200_000 + of * PROMPT + token for token in range(PROMPT)], LENGTH)
        for _ in range(1 + at % 3):
            service.step()
        service.manager.check()
        if at == ARRIVALS // 2:
            five_steps(service.manager)
    for _ in range(8):
        service.step()
    assert service.scheduler.num_preemptions == 0
    return [service.waited.get(name, -1) for name in names]


def five_steps(manager: BlockManager) -> None:
    """The table of two counters, while everything else goes on."""
    tokens = list(range(900_000, 900_000 + BLOCK_SIZE))
    first = manager.sequence(tokens)
    first.extend(BLOCK_SIZE)
    first.publish(BLOCK_SIZE)
    block, retained = first.block_table[0], first.pin()
    first.free()

    def counters() -> tuple[int, int]:
        return manager.refs(block), manager.seq_refs(block)

    assert counters() == (1, 0)
    found = manager.match_prefix(tokens)
    assert counters() == (2, 0)
    sequence = manager.sequence([*tokens, *range(4 * manager.num_blocks)])
    sequence.attach(found)
    assert counters() == (3, 1)
    assert isinstance(sequence.extend(BLOCK_SIZE * manager.num_blocks), NoRoom)
    found.release()
    assert counters() == (2, 1)
    sequence.reset()
    assert counters() == (1, 0)
    retained.release()
    sequence.free()
    manager.check()


def blocks_for_all(steps: int) -> int:
    """Those that the running ones and two prompts take without drafts, and not one more."""
    running = RUNNING * -(-(3 + steps) // BLOCK_SIZE)
    return running + 3 * -(-(PROMPT + LENGTH) // BLOCK_SIZE)


@pytest.mark.parametrize("heads", [0, 1, 3])
@pytest.mark.parametrize("num_blocks", [20_000, blocks_for_all(96)])
@pytest.mark.parametrize("depth", [1, 2])
def test_each_prompt_is_admitted_when_it_is_without_drafts(
    depth: int, num_blocks: int, heads: int
) -> None:
    """Also with heads, for which the end of what is found in the cache is computed again."""
    plain = Service(0, num_blocks=num_blocks, depth=depth)
    drafting = Service(DRAFTS, num_blocks=num_blocks, depth=depth, heads=heads)
    expected = waits(plain)
    assert set(expected) <= {1, 2}
    assert waits(drafting) == expected
    assert drafting.num_drafted > 1000


def test_a_scheduler_that_plans_drafts_first_starves() -> None:
    service = Service(DRAFTS, num_blocks=20_000, kind=DraftsFirst)
    assert set(waits(service)) == {-1}


def test_drafts_take_what_is_left_of_the_budget_the_first_ones_first() -> None:
    service = Service(0, num_blocks=4096)
    for name in range(RUNNING):
        service.add(str(name), [3 * name, 3 * name + 1], 100)
    service.step()
    service.add("new", list(range(5000, 5000 + 100)), 1)
    step = service.scheduler.schedule()
    assert step is not None
    service.scheduler.draft(step, {sequence: [WRONG] * DRAFTS for sequence in step.decodes})
    given = [len(step.drafts.get(sequence, ())) for sequence in step.decodes]
    left = BUDGET - RUNNING - 100
    assert given == [DRAFTS] * (left // DRAFTS) + [left % DRAFTS] + [0] * (
        RUNNING - left // DRAFTS - 1
    )
    assert step.num_tokens == BUDGET == step.plan.num_tokens
    service.scheduler.rollback(step)
    service.manager.check()


def test_counts_follow_what_was_accepted() -> None:
    service = Service(0, num_blocks=64)
    service.add("a", [5, 6, 7], 100)
    service.step()
    step = service.scheduler.schedule()
    assert step is not None
    (sequence,) = step.decodes
    service.scheduler.draft(step, {sequence: [RIGHT, RIGHT, WRONG]})
    service.scheduler.commit(step, [RIGHT, RIGHT, RIGHT], [3])
    assert (sequence.num_tokens, sequence.num_computed) == (7, 6)
    assert (sequence.kv.num_tokens, sequence.kv.num_computed_tokens) == (7, 6)
    assert len(sequence.kv.block_table) == 2
