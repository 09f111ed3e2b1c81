"""How long steps of some sizes take: what drafts may cost follows from it."""

from time import perf_counter

from pyengine.cache import BlockManager, NoBudget, NoRoom, StepPlan
from pyengine.runner import Runner, RunnerLimits
from pyengine.speculation import StepCosts

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_RUNS = 3
_SECONDS = 1.5
"""Sizes are measured in their order until so much time has gone."""


def measured_costs(runner: Runner, manager: BlockManager, limits: RunnerLimits) -> StepCosts:
    """Run steps whose tokens all give logits, decodes and drafts, and take the time.

    `manager` is one of its own over the runner's pool, which holds nothing yet.
    """
    sizes: list[int] = []
    seconds: list[float] = []
    start = perf_counter()
    for size in _SIZES:
        is_late = len(sizes) > 1 and perf_counter() - start > _SECONDS
        if size > limits.max_num_samples or is_late:
            break
        plan = _plan(manager, size, limits.rows_per_seq)
        if plan is None:
            break
        _run(runner, plan)  # what is made at first use is made now
        sizes.append(size)
        seconds.append(min(_run(runner, plan) for _ in range(_RUNS)))
        plan.rollback()
    if len(sizes) < 2:  # no step has room for a draft
        return StepCosts([1, 2], [1.0, 2.0])
    return StepCosts(sizes, seconds)


def _plan(manager: BlockManager, size: int, rows: int) -> StepPlan | None:
    """A step of `size` tokens, `rows` a sequence; None if the pool has no room for it."""
    plan = manager.begin_step(size)
    for first in range(0, size, rows):
        drafts = [0] * (min(rows, size - first) - 1)
        answer = plan.speculate(manager.sequence([0]), drafts)
        if isinstance(answer, NoRoom | NoBudget):
            plan.rollback()
            return None
    return plan


def _run(runner: Runner, plan: StepPlan) -> float:
    start = perf_counter()
    runner.prepare(plan)(None).sampling.amax().item()  # the device is through with it
    return perf_counter() - start
