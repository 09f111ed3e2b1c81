"""The promises with blocks released behind a window (3 and 6: counts)."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.kv_cache import BlockManager
from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.support.engines import GREEDY, make_bench
from tests.support.requests import entries_of, make_sequence


class Service:
    """A scheduler whose requests give one token each: only prompts take blocks."""

    def __init__(
        self, num_blocks: int, groups: tuple[int | None, ...], *, budget: int, slots: int = 8
    ) -> None:
        self.manager = BlockManager(num_blocks, 4, groups=groups)
        limits = SchedulerLimits(max_num_batched_tokens=budget, max_num_seqs=slots)
        self.scheduler = Scheduler(self.manager, limits)

    def add(self, lengths: list[int]) -> None:
        for name, length in enumerate(lengths):
            tokens = [1000 * name + at for at in range(length)]  # nothing in common
            self.scheduler.add(make_sequence(str(name), tokens))

    def step(self) -> list[tuple[str, int]]:
        """Requests and their computed tokens; finished ones have ended."""
        step = self.scheduler.schedule()
        assert step is not None
        self.scheduler.commit(step, [1] * len(step.sampling_sequences))
        self.manager.check()
        self.scheduler.finish(step.sampling_sequences)
        return [(entry.sequence.request.request_id, entry.num_tokens) for entry in entries_of(step)]


@settings(max_examples=300, deadline=None)
@given(
    groups=st.lists(st.sampled_from([None, 1, 4, 6, 9, 30]), min_size=1, max_size=4).map(tuple),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=8),
    budget=st.integers(8, 40),
    spare=st.integers(0, 60),
)
def test_admitted_prompts_do_not_fight_and_all_come_through(
    groups: tuple[int | None, ...], lengths: list[int], budget: int, spare: int
) -> None:
    """Promise 3: who is admitted never has to give way to another's prompt. Promise 6."""
    most = BlockManager(1, 4, groups=groups).blocks_for(max(lengths), budget)
    service = Service(most + spare, groups, budget=budget)
    service.add(lengths)
    steps = 0
    while service.scheduler.has_work:
        service.step()
        steps += 1
    assert service.scheduler.num_preemptions == 0
    assert steps <= sum(-(-length // 4) for length in lengths)


@pytest.mark.parametrize(("groups", "together"), [((None,), 2), ((8,), 6)])
def test_long_contexts_run_side_by_side_if_little_of_them_is_kept(
    groups: tuple[int | None, ...], together: int
) -> None:
    """Six of 100 tokens and an answer in 60 blocks: of full tables two fit, of windows all."""
    bench = make_bench(60, 4, max_num_batched_tokens=32, max_num_seqs=6, groups=groups)
    bench.submit({str(name): [name] * 100 for name in range(6)}, replace(GREEDY, max_tokens=20))
    most = 0
    while bench.engine.has_work:
        bench.engine.step()
        most = max(most, bench.scheduler.num_running)
    assert (most, bench.scheduler.num_preemptions) == (together, 0)


def test_what_a_full_group_still_needs_is_kept_for_it() -> None:
    """The pool holds one prompt of 80 tokens in both groups, and a bit: the second must wait."""
    groups = (None, 8)
    most = BlockManager(1, 4, groups=groups).blocks_for(80, 16)
    service = Service(most + 3, groups, budget=16)
    service.add([80, 16])
    first = [service.step() for _ in range(5)]
    assert first == [[("0", 16)]] * 5
    assert service.step() == [("1", 16)]


@pytest.mark.parametrize(("num_blocks", "together"), [(11, True), (10, False)])
def test_of_a_window_no_more_is_set_aside_than_it_and_a_chunk_take(
    num_blocks: int, together: bool
) -> None:
    """A prompt of 100 blocks takes 4, will need 8 at once of which it keeps 2, and leaves 1."""
    service = Service(num_blocks, (8,), budget=18)  # 16 on a block boundary, and 2 are left
    assert service.manager.blocks_for(400, 18) == 8
    service.add([400, 2])
    assert service.step() == [("0", 16), ("1", 2)][: 1 + together]


@pytest.mark.parametrize("groups", [(None, 8), (None, 8, 8), (8,), (8, None, 20)])
def test_a_request_that_takes_the_whole_pool_gets_its_turn(groups: tuple[int | None, ...]) -> None:
    """First in line, it waits until all the others have ended, and then it fits exactly."""
    length, budget = 100, 16
    most = BlockManager(1, 4, groups=groups).blocks_for(length, budget)
    service = Service(most, groups, budget=budget)
    service.add([24, 24, length, 4])
    order = []
    while service.scheduler.has_work:
        order += [name for name, _ in service.step()]
    assert list(dict.fromkeys(order)) == ["0", "1", "2", "3"]
    assert service.scheduler.num_preemptions == 0


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=10),
    groups=st.sampled_from([(None, 6), (6,), (6, None, 11), (None, None, 4)]),
    budget=st.integers(8, 40),
    spare=st.integers(0, 20),
    caching=st.booleans(),
)
def test_nothing_starves(
    lengths: list[int],
    groups: tuple[int | None, ...],
    budget: int,
    spare: int,
    caching: bool,
) -> None:
    """With answers that grow, and preemptions: an end comes in a bounded number of steps."""
    bench = make_bench(
        BlockManager(1, 4, groups=groups).blocks_for(68, budget) + spare,
        4,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        max_model_len=68,
        groups=groups,
        prefix_caching=caching,
    )
    bench.submit(
        {str(name): [(7 * name + at) % 97 for at in range(n)] for name, n in enumerate(lengths)}
    )
    steps = 0
    while bench.engine.has_work:
        bench.engine.step()
        steps += 1
        assert steps <= 80 * len(lengths)
    bench.assert_all_free()
