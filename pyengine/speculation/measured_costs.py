"""The measured time of steps with drafts, on the machine and model that will run them."""

from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pyengine.executor.input_buffers import RunnerLimits
from pyengine.executor.model_runner import Runner
from pyengine.kv_cache import BlockManager, NoBudget, NoRoom, StepPlan
from pyengine.sampling.sampler import SamplingBatch, sample
from pyengine.sampling.state import SamplingState
from pyengine.sampling_params import SamplingParams
from pyengine.speculation.policy import Curve, StepCosts

_Times: TypeAlias = npt.NDArray[np.float64]

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TURNS = 4
_SECONDS = 1.5  # sizes are measured in order, again and again, for this time


def measured_costs(runner: Runner, manager: BlockManager, limits: RunnerLimits) -> StepCosts:
    """Measure steps of decodes and drafts, whose tokens all give logits.

    The least of several rounds counts, two at least: the first includes work of the first use, and
    other load of the machine often outlasts a few steps of one size. Rows are drawn without
    filters, which is usually slowest. `manager` is a separate one over the runner's pool, which is
    still empty.
    """
    fastest: dict[int, _Times] = {}
    start = perf_counter()
    sizes = [size for size in _SIZES if size <= limits.max_num_samples]
    for turn in range(_TURNS):
        for size in sizes:
            is_late = len(fastest) > 1 and perf_counter() - start > _SECONDS
            is_new = size not in fastest
            plan = None if is_late and is_new else _plan(manager, size, limits.rows_per_seq)
            if plan is None:
                sizes = sizes[: sizes.index(size)]
                break
            times = _times(runner, plan)
            plan.rollback()
            fastest[size] = np.minimum(times, fastest.get(size, times))
        if turn and perf_counter() - start > _SECONDS:
            break
    if len(sizes) < 2:  # no step fits a draft
        return StepCosts(Curve([1, 2], [1.0, 2.0]))
    steps, drawing = np.array([fastest[size] for size in sizes]).T.tolist()
    return StepCosts(Curve(sizes, steps), Curve([0, *sizes], [0.0, *drawing]))


def _plan(manager: BlockManager, size: int, rows: int) -> StepPlan | None:
    """A step of `size` tokens, `rows` a sequence; None if it does not fit into the pool."""
    plan = manager.begin_step(size)
    for first in range(0, size, rows):
        drafts = [0] * (min(rows, size - first) - 1)
        answer = plan.speculate(manager.sequence([0]), drafts)
        if isinstance(answer, NoRoom | NoBudget):
            plan.rollback()
            return None
    return plan


def _times(runner: Runner, plan: StepPlan) -> _Times:
    """Seconds of a greedy step, and of drawing all of its tokens in addition; both include the
    short search for the largest logit."""
    start = perf_counter()
    logits = runner.prepare(plan)(None).sampling
    return np.diff([start, _sample(logits, 0), _sample(logits, 1)])


def _sample(logits: Any, temperature: float) -> float:
    """Choose a token for each row; return the time afterwards."""
    params, (size, vocab_size) = SamplingParams(temperature=temperature), logits.shape
    state = SamplingState(params, (), seed=0, vocab_size=vocab_size)
    sampled = sample(logits, SamplingBatch([state] * size))
    sampled.token_ids.tolist()  # waits for the device
    return perf_counter()
