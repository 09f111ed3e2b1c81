"""The scheduler's eight promises, one test or more each, by number."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.kv_cache import BlockManager, PlanError
from pyengine.sampling_params import SamplingParams
from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits, StalledError
from tests.support.engines import make_bench
from tests.support.fake_runner import continued
from tests.support.requests import entries_of, make_sequence


def tokens(count: int, start: int = 0) -> list[int]:
    return [(start + i) % 97 for i in range(count)]


def cache(manager: BlockManager, prompt: list[int]) -> None:
    """Compute a prompt and let it go: its full blocks are evictable."""
    sequence = manager.sequence(prompt)
    plan = manager.begin_step(len(prompt))
    plan.prefill(sequence, len(prompt))
    plan.commit([0])
    sequence.free()


def make(manager: BlockManager, budget: int = 1024, slots: int = 16) -> Scheduler:
    limits = SchedulerLimits(max_num_batched_tokens=budget, max_num_seqs=slots)
    return Scheduler(manager, limits)


def add(scheduler: Scheduler, name: str, prompt: list[int]) -> None:
    scheduler.add(make_sequence(name, prompt))


def finish(scheduler: Scheduler, *names: str) -> None:
    """End requests by their names."""
    sequences = [*scheduler.waiting, *scheduler.running]
    scheduler.finish([sequence for sequence in sequences if sequence.request.request_id in names])


def planned(scheduler: Scheduler) -> list[tuple[str, int]]:
    """Plan and commit one step; who computed how many tokens."""
    step = scheduler.schedule()
    assert step is not None
    scheduler.commit(step, [1] * len(step.sampling_sequences))
    return [(entry.sequence.request.request_id, entry.num_tokens) for entry in entries_of(step)]


def test_promise_1_prefix_is_matched_before_the_budget_is_charged() -> None:
    """A 16-block prompt of which 12 are resident needs 4 blocks, of memory and of budget."""
    manager = BlockManager(16, 16)
    cache(manager, tokens(12 * 16))
    pin = manager.match_prefix(tokens(12 * 16))  # resident: held by someone
    assert manager.usage().available == 4
    scheduler = make(manager, budget=4 * 16)
    add(scheduler, "a", tokens(16 * 16))
    step = scheduler.schedule()
    assert step is not None
    assert (entries_of(step)[0].num_cached, entries_of(step)[0].num_tokens) == (12 * 16, 4 * 16)
    assert step.plan.budget_left == 0
    assert manager.usage().available == 0
    assert len(scheduler.commit(step, [1])) == 0
    pin.release()


def test_promise_2_revived_evictable_blocks_count_like_fresh_ones() -> None:
    manager = BlockManager(16, 4)
    cache(manager, tokens(12 * 4))
    assert manager.usage().evictable == 12
    scheduler = make(manager)
    add(scheduler, "a", tokens(16 * 4))  # revives 12, takes 4: the whole pool
    add(scheduler, "b", tokens(4, start=50))
    assert planned(scheduler) == [("a", 16)]
    assert manager.usage().available == 0


def test_promise_2_active_blocks_cost_nothing() -> None:
    manager = BlockManager(10, 4)
    scheduler = make(manager)
    add(scheduler, "a", tokens(8 * 4))
    planned(scheduler)
    assert manager.usage().active == 8
    add(scheduler, "b", [*tokens(8 * 4), 5])  # 9 blocks, 8 of them active
    assert ("b", 1) in planned(scheduler)
    assert manager.usage().active == 10


def test_promise_3_takes_blocks_for_scheduled_tokens_only() -> None:
    manager = BlockManager(64, 4)
    scheduler = make(manager, budget=16)
    add(scheduler, "a", tokens(40))
    assert planned(scheduler) == [("a", 16)]
    assert manager.usage().active == 4


def test_promise_3_admits_only_what_fits_beside_the_admitted() -> None:
    manager = BlockManager(10, 4)
    scheduler = make(manager, budget=16)
    add(scheduler, "a", tokens(8 * 4 - 1))
    add(scheduler, "b", tokens(4 * 4 - 1, start=50))
    assert planned(scheduler) == [("a", 16)]  # b's 4 blocks are free now, but a needs 4 more
    assert planned(scheduler) == [("a", 15)]
    finish(scheduler, "a")
    assert planned(scheduler) == [("b", 15)]
    assert scheduler.num_preemptions == 0


def test_promise_4_one_step_one_budget_decodes_first() -> None:
    manager = BlockManager(64, 4)
    scheduler = make(manager, budget=16, slots=4)
    add(scheduler, "a", tokens(9))
    assert planned(scheduler) == [("a", 9)]
    add(scheduler, "b", tokens(40, start=30))
    assert planned(scheduler) == [("a", 1), ("b", 12)]  # 15 tokens left, whole blocks: 12
    assert planned(scheduler) == [("a", 1), ("b", 12)]
    assert planned(scheduler) == [("a", 1), ("b", 12)]
    assert planned(scheduler) == [("a", 1), ("b", 4)]
    assert planned(scheduler) == [("a", 1), ("b", 1)]


def test_promise_5_each_token_is_hashed_at_most_once() -> None:
    """Also when a request waits, is matched again at every step, and is preempted."""
    bench = make_bench(12, 4, max_num_batched_tokens=16, max_num_seqs=8)
    prompts = [tokens(24), tokens(24, start=9), tokens(30, start=9), tokens(24)]
    outputs = bench.generate(prompts)
    assert bench.scheduler.num_preemptions > 0
    known = sum((len(prompt) + 8) // 4 for prompt in prompts)
    assert 0 < bench.manager.stats().hashed_blocks <= known
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8] * 4


def test_promise_6_first_come_first_served() -> None:
    manager = BlockManager(8, 4)
    scheduler = make(manager)
    add(scheduler, "a", tokens(20))
    add(scheduler, "large", tokens(28, start=40))
    add(scheduler, "small", tokens(4, start=80))
    assert planned(scheduler) == [("a", 20)]  # small would fit, but must not overtake
    finish(scheduler, "a")
    assert planned(scheduler)[0][0] == "large"


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    num_blocks=st.integers(12, 24),
    budget=st.integers(8, 40),
    shared=st.booleans(),
    caching=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_promise_6_nothing_starves(
    lengths: list[int], num_blocks: int, budget: int, shared: bool, caching: bool, seed: int
) -> None:
    """Whatever fits an empty pool comes to its end in a bounded number of steps."""
    bench = make_bench(
        num_blocks, 4, max_num_batched_tokens=budget, max_num_seqs=8, prefix_caching=caching
    )
    rng = random.Random(seed)
    prompts = [tokens(n, start=0 if shared else rng.randrange(97)) for n in lengths]
    bench.submit({str(i): prompt for i, prompt in enumerate(prompts)})
    steps = 0
    while bench.engine.has_work:
        bench.engine.step()
        steps += 1
        # One after the other would take (30 / 8 + 8) steps each at most, and a preemption
        # costs no more than what it interrupts.
        assert steps <= 40 * len(lengths)
    bench.assert_all_free()


def test_promise_6_waits_for_pins_only_with_a_clear_error() -> None:
    manager = BlockManager(4, 4)
    cache(manager, tokens(12))
    pin = manager.match_prefix(tokens(12))
    scheduler = make(manager)
    add(scheduler, "a", tokens(12, start=50))
    with pytest.raises(StalledError, match=r"'a' of 12 tokens .*pinned=3"):
        scheduler.schedule()
    pin.release()
    assert planned(scheduler) == [("a", 12)]


def test_promise_7_newest_first() -> None:
    manager = BlockManager(9, 4)
    scheduler = make(manager)
    for name, start in (("old", 0), ("mid", 30), ("new", 60)):
        add(scheduler, name, tokens(11, start=start))
    planned(scheduler)
    assert manager.usage().available == 0
    planned(scheduler)  # position 11: every third block still has a free slot
    assert [name for name, _ in planned(scheduler)] == ["old", "mid"]
    assert (scheduler.num_preemptions, scheduler.num_waiting) == (1, 1)


def test_promise_7_a_victim_that_frees_nothing_is_passed_over() -> None:
    manager = BlockManager(5, 4)
    scheduler = make(manager)
    add(scheduler, "old", tokens(11))
    add(scheduler, "mid", tokens(7, start=40))
    planned(scheduler)
    add(scheduler, "new", tokens(8))  # every block of it is shared with "old"
    assert planned(scheduler) == [("old", 1), ("mid", 1), ("new", 1)]
    assert manager.usage().available == 0
    assert planned(scheduler) == [("old", 1), ("new", 1)]
    assert scheduler.num_preemptions == 1


def test_promise_7_a_victim_comes_back_cheaply() -> None:
    manager = BlockManager(6, 4)
    scheduler = make(manager)
    add(scheduler, "old", tokens(11))
    add(scheduler, "mid", tokens(7, start=40))
    planned(scheduler)
    add(scheduler, "new", tokens(8))
    planned(scheduler)
    assert planned(scheduler) == [("old", 1), ("new", 1)]  # mid gave two blocks, one was taken
    finish(scheduler, "old", "new")
    assert planned(scheduler) == [("mid", 7 + 2 - 4)]


@settings(max_examples=40, deadline=None)
@given(
    num_blocks=st.integers(16, 64),
    block_size=st.integers(1, 8),
    budget=st.integers(8, 64),
    caching=st.booleans(),
    order=st.randoms(use_true_random=False),
    greedy=st.booleans(),
)
def test_promise_8_same_seed_same_tokens(
    num_blocks: int,
    block_size: int,
    budget: int,
    caching: bool,
    order: random.Random,
    greedy: bool,
) -> None:
    """Whatever the pool, block size, chunk, caching, arrival order and preemptions."""
    longest = num_blocks * block_size
    prompts = [tokens(n, start=s) for n, s in ((3, 0), (11, 0), (12, 0), (11, 0), (7, 50), (1, 3))]
    params = SamplingParams(
        temperature=0 if greedy else 1.0, seed=11, ignore_eos=True, max_tokens=4, top_p=0.9
    )
    if longest < 16:
        return
    alone = [make_bench(64, 4).generate([prompt], params)[0].outputs[0] for prompt in prompts]
    if greedy:
        assert [out.token_ids for out in alone] == [continued(prompt, 4) for prompt in prompts]
    bench = make_bench(
        num_blocks,
        block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        prefix_caching=caching,
    )
    names = list(range(len(prompts)))
    order.shuffle(names)
    bench.submit({str(i): prompts[i] for i in names}, params)
    done = bench.run()
    for i, expected in enumerate(alone):
        assert done[str(i)].outputs[0].token_ids == expected.token_ids
    bench.assert_all_free()


def test_rollback_lets_admitted_jobs_wait_again() -> None:
    bench = make_bench(16, 4)
    scheduler = bench.scheduler
    add(scheduler, "a", tokens(9))
    before = bench.manager.usage()
    step = scheduler.schedule()
    assert step is not None
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)
    scheduler.rollback(step)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 1)
    assert bench.manager.usage() == before
    with pytest.raises(PlanError):
        scheduler.rollback(step)
    assert planned(scheduler) == [("a", 9)]


def test_an_aborted_request_lives_in_the_open_step_and_stays_cached() -> None:
    manager = BlockManager(16, 4)
    scheduler = make(manager)
    add(scheduler, "a", tokens(9))
    step = scheduler.schedule()
    assert step is not None
    finish(scheduler, "a")
    assert manager.usage().active == 3
    scheduler.commit(step, [1])
    assert (manager.usage().active, manager.usage().evictable) == (0, 2)
    assert not scheduler.has_work
    assert scheduler.schedule() is None
