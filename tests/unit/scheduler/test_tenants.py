"""Tenants take turns: none waits for all requests of another one, and every request ends.

Time is simulated: a step costs `FIXED` seconds, `PER_TOKEN` for each decode and a quarter of it for
each token of a prompt.
"""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from pyengine.kv_cache import BlockManager
from pyengine.request.request import SequenceState
from pyengine.scheduler.batch import ScheduledStep
from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits
from pyengine.utils.turns import Turns
from tests.support.requests import make_sequence

BLOCK = 4
FIXED, PER_TOKEN = 0.015, 0.004
A, B, C = b"a", b"b", b"c"


class Service:
    """A scheduler at work, and the simulated times at which requests ended."""

    def __init__(
        self,
        *,
        slots: int = 256,
        budget: int = 2048,
        num_blocks: int = 100_000,
        per_token: float = PER_TOKEN,
        overtakes: int = 4,
        **limits: int,
    ) -> None:
        self.manager = BlockManager(num_blocks, BLOCK, partial_reuse=False)
        step = SchedulerLimits(
            max_num_batched_tokens=budget, max_num_seqs=slots, max_overtakes=overtakes, **limits
        )
        self.scheduler = Scheduler(self.manager, step)
        self.per_token = per_token
        shares = self.scheduler.shares
        charge, charge_alone = shares.charge, shares.charge_alone
        shares.charge = (  # type: ignore[method-assign]
            lambda step, _: charge(step, self.seconds_of(step))
        )
        shares.charge_alone = (  # type: ignore[method-assign]
            lambda step, _: charge_alone(step, self.seconds_of(step))
        )
        self.now = 0.0
        self.num_steps = 0
        self.left: dict[SequenceState, int] = {}
        self.begun: dict[SequenceState, float] = {}
        self.ended: dict[SequenceState, float] = {}
        self.rows: Counter[bytes] = Counter()

    def seconds_of(self, step: ScheduledStep) -> float:
        num_decodes = len(step.decodes)
        return FIXED + self.per_token * (num_decodes + (step.num_tokens - num_decodes) / 4)

    def add(
        self,
        tenant: bytes,
        *,
        prompt: int = 8,
        output: int = 64,
        count: int = 1,
        priority: float = 0,
        n: int = 1,
    ) -> list[SequenceState]:
        added = []
        for _ in range(count):
            number = len(self.left)
            tokens = [number * 1000 + position for position in range(prompt)]  # nothing in common
            sequence = make_sequence(
                f"{tenant!r} {number}", tokens, tenant=tenant, priority=priority, n=n
            )
            self.left[sequence] = output
            self.scheduler.add(sequence)
            added.append(sequence)
        return added

    def step(self) -> ScheduledStep:
        step = self.scheduler.schedule()
        assert step is not None
        self.num_steps += 1
        self.now += self.seconds_of(step)
        self.rows.update(sequence.request.tenant for sequence in step.sequences)
        self.scheduler.commit(step, [1] * len(step.sampling_sequences))
        ended = []
        for sequence in step.sampling_sequences:
            self.begun.setdefault(sequence, self.now)
            self.left[sequence] -= 1
            if not self.left[sequence]:
                ended.append(sequence)
                self.ended[sequence] = self.now
        self.scheduler.finish(ended)
        return step

    def run(self, is_over: Callable[[], bool], most_steps: int = 100_000) -> None:
        while not is_over() and self.scheduler.has_work:
            self.step()
            assert self.num_steps < most_steps

    def seconds_to_end(self, sequence: SequenceState) -> float:
        start = self.now
        self.run(lambda: sequence in self.ended)
        return self.ended[sequence] - start


def beside(
    tenant: bytes, count: int, *, output: int = 200, prompt: int = 8, **settings: int
) -> float:
    """Seconds for an answer of A, which comes when as many requests of B are at work."""
    service = Service(**settings)
    service.add(B, count=count, output=output, prompt=prompt)
    for _ in range(10):
        service.step()
    (answer,) = service.add(tenant)
    return service.seconds_to_end(answer)


@pytest.mark.parametrize(
    ("count", "size"), [(500, {}), (1024, {"output": 16}), (50, {"prompt": 8192})]
)
def test_requests_of_another_tenant_are_waited_for_like_one(
    count: int, size: dict[str, int]
) -> None:
    """Long prompts that were admitted would take the budget of every step."""
    one = beside(A, 1, **size)
    assert beside(A, count, **size) < 2 * one
    assert beside(B, count, **size) > 20 * one  # of the same tenant


def test_a_pool_that_another_tenant_fills_is_shared() -> None:
    """16 requests hold all blocks, or almost, and more wait for them."""
    settings = {"num_blocks": 16 * 52, "slots": 64}
    one = beside(A, 1, **settings)
    assert beside(A, 64, **settings) < 2 * one
    assert beside(B, 64, **settings) > 5 * one


def test_all_slots_in_use_are_shared_at_once() -> None:
    service = Service(slots=4)
    service.add(B, count=12, output=1000)
    for _ in range(10):
        service.step()
    assert service.scheduler.num_of(B) == (4, 8)
    service.add(A, count=3, output=1000)
    service.step()
    assert service.scheduler.num_of(A) == (2, 1)
    assert service.scheduler.num_of(B) == (2, 10)
    for _ in range(500):  # and so it stays: neither takes from the other
        service.step()
    assert service.scheduler.num_preemptions == 2


def test_a_tenant_alone_uses_everything_again() -> None:
    service = Service(slots=4)
    service.add(B, count=12, output=200)
    (answer,) = service.add(A, output=5)
    service.run(lambda: answer in service.ended)
    service.step()
    assert service.scheduler.num_of(B) == (4, 8)


def test_the_time_of_steps_is_shared_equally_by_tenants_that_want_more() -> None:
    service = Service()
    service.add(A, count=400, output=40)
    service.add(B, count=50, output=40, prompt=200)
    used: Counter[bytes] = Counter()
    charge = service.scheduler.shares.turns.charge

    def counted(tenant: bytes, seconds: float) -> None:
        used[tenant] += seconds
        charge(tenant, seconds)

    service.scheduler.shares.turns.charge = counted  # type: ignore[method-assign]
    service.run(
        lambda: (
            service.num_steps > 10
            and not all(service.scheduler.num_of(tenant)[0] for tenant in (A, B))
        )
    )
    assert 0.6 < used[A] / used[B] < 1.7


def test_fast_steps_leave_out_nobody() -> None:
    """On a device on which a step of many rows takes no longer, all run in every step."""
    service = Service(per_token=1e-6)
    service.add(B, count=100, output=400)
    service.step()
    service.add(A, output=300)
    for _ in range(50):
        service.step()
    rows = len(service.step().decodes)
    assert rows == 101


def test_a_priority_counts_within_its_tenant_only() -> None:
    service = Service(slots=1)
    service.add(C, output=1)
    (plain,) = service.add(A, output=1)
    later, first = service.add(B, output=1), service.add(B, output=1, priority=-1e9)
    urgent = service.add(B, output=1, priority=-5, count=20)
    service.run(lambda: False)
    order = sorted(service.ended, key=service.ended.__getitem__)
    assert order.index(plain) <= 3
    assert order.index(first[0]) < order.index(urgent[0]) < order.index(later[0])


def test_a_priority_does_not_preempt_another_tenant() -> None:
    """The pool is full, and the sequences of A come last in the order of priorities."""
    service = Service(num_blocks=96, slots=8)
    answers = service.add(A, prompt=16, output=64, count=2, priority=5)
    service.step()
    service.add(B, prompt=16, output=200, count=6, priority=-5)
    service.run(lambda: all(answer in service.ended for answer in answers))
    assert all(answer.request.progress.num_preemptions == 0 for answer in answers)
    assert service.scheduler.num_preemptions > 0


def test_a_request_that_fills_the_pool_ends_beside_a_stream_of_small_ones() -> None:
    service = Service(num_blocks=40, slots=8, budget=16)
    (large,) = service.add(B, prompt=120, output=30)
    for _ in range(400):
        service.add(A, prompt=4, output=4)
        service.step()
    service.run(lambda: large in service.ended, most_steps=800)
    assert large in service.ended


def test_a_request_with_as_many_answers_as_slots_gets_them() -> None:
    service = Service(slots=4)
    service.add(B, count=40, output=20)
    service.step()
    (wide,) = service.add(A, output=1, n=4)
    service.run(lambda: wide in service.ended, most_steps=60)
    assert wide in service.ended


def test_a_tenant_runs_no_more_than_its_limit() -> None:
    service = Service(slots=8, max_num_seqs_per_tenant=3)
    service.add(B, count=20, output=50)
    service.add(A, count=2, output=50)
    for _ in range(20):
        service.step()
        assert service.scheduler.num_of(B)[0] <= 3
    assert (service.scheduler.num_of(A), service.scheduler.num_running) == ((2, 0), 5)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_every_request_of_every_tenant_ends(first: int) -> None:
    preemptions = 0
    for seed in range(first, first + 20):
        draw = random.Random(seed)
        service = Service(
            num_blocks=draw.randint(16, 60),
            slots=draw.randint(1, 6),
            budget=draw.randint(8, 64),
            per_token=draw.choice([1e-6, PER_TOKEN]),
            overtakes=draw.choice([0, 1, 5]),
        )
        most = service.manager.num_blocks * BLOCK
        tenants = [A, B, C][: draw.randint(2, 3)]
        left = 60
        rush = draw.choice([0.2, 0.9])
        while left or service.scheduler.has_work:
            if left and (not service.scheduler.has_work or draw.random() < rush):
                output = draw.randint(1, 12)
                service.add(
                    draw.choice(tenants),
                    prompt=draw.randint(1, min(60, most - output)),
                    output=output,
                    priority=draw.choice([0, 0, -5, 1]),
                )
                left -= 1
            else:
                service.step()
                service.manager.check()
            assert service.num_steps < 60 * 80, f"seed {seed}"
        assert len(service.ended) == 60
        assert service.manager.usage().active == 0
        assert service.scheduler.shares.turns.tenants == []
        preemptions += service.scheduler.num_preemptions
    assert preemptions > 50


def test_an_aborted_request_is_of_no_tenant_any_more() -> None:
    service = Service(slots=1)
    running, waiting = service.add(A)[0], service.add(B)[0]
    service.step()
    service.scheduler.finish([waiting, running, running])
    assert service.scheduler.num_of(A) == service.scheduler.num_of(B) == (0, 0)
    assert not service.scheduler.shares.turns.are_several


def test_a_tenant_saves_up_no_unused_time() -> None:
    turns = Turns(1.0)
    for tenant in (A, B):
        turns.enter(tenant)
    for _ in range(100):
        turns.charge(B, 1.0)
    assert turns.used(B) - turns.used(A) == 1.0
    turns.charge(A, 0.25)
    assert turns.used(B) - turns.used(A) == 0.75
    assert turns.in_order([B, A]) == [A, B]


def test_what_a_tenant_uses_alone_is_charged_when_another_arrives() -> None:
    turns = Turns(1.0)
    turns.enter(B)
    for _ in range(10):
        turns.charge_alone(0.3)
    turns.enter(A)
    assert turns.used(B) - turns.used(A) == 1.0
    turns.charge(A, 0.9)
    turns.leave(A)
    turns.charge_alone(0.1)
    turns.enter(A)
    assert 0.15 < turns.used(B) - turns.used(A) < 0.25


def test_a_tenant_that_comes_and_goes_gets_no_new_credit() -> None:
    turns = Turns(1.0)
    turns.enter(B)
    turns.charge(B, 5.0)
    for _ in range(3):
        turns.enter(A)
        turns.charge(A, 0.5)
        turns.leave(A)
    assert turns.used(A) - turns.used(B) == 0.5


def test_tenants_without_work_are_forgotten() -> None:
    turns = Turns(1.0)
    turns.enter(B)
    for number in range(1000):
        tenant = b"%d" % number
        turns.enter(tenant)
        turns.charge(tenant, 0.01)
        turns.leave(tenant)
        turns.charge(B, 0.1)
    assert len(turns._used) < 40
