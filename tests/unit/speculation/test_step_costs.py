"""Steps of several sizes run over a separate manager, and leave no state."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyengine.executor.input_buffers import RunnerLimits
from pyengine.kv_cache import BlockManager
from pyengine.speculation import measured_costs as step_costs
from pyengine.speculation.measured_costs import measured_costs
from tests.support.fake_runner import FakeRunner, Logits


def sizes(num_blocks: int, max_tokens: int) -> list[int]:
    runner, manager = FakeRunner(num_blocks, 4), BlockManager(num_blocks, 4)
    limits = RunnerLimits(
        max_num_batched_tokens=max_tokens,
        max_num_seqs=max_tokens,
        max_blocks_per_seq=9,
        rows_per_seq=8,
    )
    measured_costs(runner, manager, limits)
    assert manager.usage().free == num_blocks
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
    assert not any(each_set["input_ids"].any() for each_set in runner._sets)


@pytest.mark.parametrize(("seconds", "last", "steps"), [(1e9, 32, 24), (50, 4, 6), (1, 2, 4)])
def test_what_drawing_takes_is_told_from_what_the_rest_takes(
    monkeypatch: pytest.MonkeyPatch, seconds: float, last: int, steps: int
) -> None:
    """The clock stands still but for 10 s a step, 1 s a row, and 3 s for a row that is drawn.

    However slow that is, two sizes are measured, each of them twice.
    """
    clock = SimpleNamespace(now=0.0)

    class SlowRunner(FakeRunner):
        def run(self, *args: Any) -> Any:
            clock.now += 10 + args[0][0]
            return super().run(*args)

    def sample_slowly(logits: Logits, batch: Any) -> Any:
        clock.now += 0 if batch.draws is None else 3 * len(logits)
        return SimpleNamespace(token_ids=np.zeros(len(logits), np.int64))

    monkeypatch.setattr(step_costs, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(step_costs, "_SECONDS", seconds)
    monkeypatch.setattr(step_costs, "sample", sample_slowly)
    limits = RunnerLimits(
        max_num_batched_tokens=32, max_num_seqs=32, max_blocks_per_seq=9, rows_per_seq=8
    )
    runner = SlowRunner(64, 4)
    costs = measured_costs(runner, BlockManager(64, 4), limits)
    assert max(runner.computed) == last and len(runner.computed) == steps
    assert costs.tokens.between(1, 40).tolist() == [10 + size for size in range(1, 41)]
    assert costs.drawn.between(0, 40).tolist() == [3 * size for size in range(41)]
