"""How long steps of some sizes take: what drafts may cost follows from it."""

from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch

from pyengine.cache import BlockManager, NoBudget, NoRoom, StepPlan
from pyengine.core.sampling_params import SamplingParams
from pyengine.runner import Runner, RunnerLimits
from pyengine.sampling import Sampler, SamplingBatch, SamplingState
from pyengine.speculation import Curve, StepCosts

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_RUNS = 3
_SECONDS = 1.5
"""Sizes are measured in their order until so much time has gone."""


def measured_costs(runner: Runner, manager: BlockManager, limits: RunnerLimits) -> StepCosts:
    """Run steps whose tokens all give logits, decodes and drafts, and take the time.

    Rows are drawn without filters, which takes longest as a rule. `manager` is one of its own over
    the runner's pool, which holds nothing yet.
    """
    sizes: list[int] = []
    seconds: list[float] = []
    drawing: list[float] = []
    start = perf_counter()
    for size in _SIZES:
        is_late = len(sizes) > 1 and perf_counter() - start > _SECONDS
        if size > limits.max_num_samples or is_late:
            break
        plan = _plan(manager, size, limits.rows_per_seq)
        if plan is None:
            break
        logits = _computed(runner, plan)
        greedy, drawn = [_batch(size, logits.shape[1], temperature) for temperature in (0, 1)]
        sizes.append(size)
        seconds.append(_least(partial(_step, runner, plan, greedy)))
        more = _least(partial(_sample, logits, drawn)) - _least(partial(_sample, logits, greedy))
        drawing.append(max(0.0, more))
        plan.rollback()
    if len(sizes) < 2:  # no step has room for a draft
        return StepCosts(Curve([1, 2], [1.0, 2.0]))
    return StepCosts(Curve(sizes, seconds), Curve([0, *sizes], [0.0, *drawing]))


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


def _batch(size: int, vocab_size: int, temperature: float) -> SamplingBatch:
    params = SamplingParams(temperature=temperature)
    return SamplingBatch([SamplingState(params, (), seed=0, vocab_size=vocab_size)] * size)


def _computed(runner: Runner, plan: StepPlan) -> torch.Tensor:
    return runner.prepare(plan)(None).sampling


def _step(runner: Runner, plan: StepPlan, rows: SamplingBatch) -> None:
    _sample(_computed(runner, plan), rows)


def _sample(logits: torch.Tensor, rows: SamplingBatch) -> None:
    Sampler().launch(logits, rows).token_ids.tolist()  # the device is through with it


def _least(work: Callable[[], None]) -> float:
    """Seconds that it takes, where the machine does little else."""
    work()  # what is made at first use is made now
    return min(_seconds(work) for _ in range(_RUNS))


def _seconds(work: Callable[[], None]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start
