"""Steps of several sizes are run over a pool of their own, and leave nothing behind."""

from pyengine.cache import BlockManager
from pyengine.engine.step_costs import measured_costs
from pyengine.runner import RunnerLimits
from tests.support.fake_runner import FakeRunner


def sizes(num_blocks: int, max_tokens: int) -> list[int]:
    runner, manager = FakeRunner(num_blocks, 4), BlockManager(num_blocks, 4)
    limits = RunnerLimits(
        max_num_batched_tokens=max_tokens,
        max_num_seqs=max_tokens,
        max_blocks_per_seq=9,
        rows_per_seq=8,
    )
    measured_costs(runner, manager, limits)
    assert manager.ledger().free == num_blocks
    return sorted(set(runner.computed))


def test_sizes_up_to_the_largest_step_and_the_pool_are_run() -> None:
    assert sizes(64, 16) == [1, 2, 4, 8, 16]
    assert sizes(3, 64) == [1, 2, 4, 8]
    assert sizes(1, 1) == [1]


def test_the_tokens_are_of_every_vocabulary() -> None:
    runner, manager = FakeRunner(512, 4), BlockManager(512, 4)
    limits = RunnerLimits(
        max_num_batched_tokens=256, max_num_seqs=256, max_blocks_per_seq=9, rows_per_seq=2
    )
    measured_costs(runner, manager, limits)
    assert max(runner.computed) == 256
    assert not any(one["input_ids"].any() for one in runner._sets)
