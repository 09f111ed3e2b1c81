"""Steps of an engine with timers and without them, and the floor of each part."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch

from benches.engine.floor.machine import Limits, measure_limits
from benches.engine.floor.parts import (
    ATTENTION,
    BETWEEN,
    PARTS,
    PYTHON,
    ROTATION,
    CountedModel,
    FloorError,
    StepShape,
    floor_seconds,
)
from benches.engine.floor.tables import peaks_of
from benches.engine.floor.timers import TimedStep, Timers, waiting_seconds
from pyengine.cpu.threads import compute_threads
from pyengine.utils.openmp import release_threads

DECODES, PROMPTS = 16, 1
"""Steps of a round."""
KV_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """A step to measure: `rows` sequences after `context` tokens, or prompts of `new` tokens."""

    name: str
    rows: int
    context: int
    new: int = 1

    @property
    def longest(self) -> int:
        """Tokens of a sequence."""
        return self.context + self.new + DECODES + 3

    @property
    def shape(self) -> StepShape:
        """The step in the middle of a round."""
        middle = self.context if self.new > 1 else self.context + DECODES // 2
        return StepShape(self.rows, middle, self.new)


CASES = (
    Case("1 row after 64 tokens", 1, 64),
    Case("32 rows after 64 tokens", 32, 64),
    Case("a prompt of 512 tokens", 1, 0, 512),
    Case("1 row after 4,096 tokens", 1, 4096),
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A model in a dtype of rows; a GGUF file keeps its formats."""

    name: str
    path: Path
    dtype: Literal["auto", "float32", "bfloat16"]


class MeasuredEngine:
    """An `LLM` with timers."""

    def __init__(self, variant: Variant, threads: int | None, cases: Sequence[Case]) -> None:
        from pyengine import LLM

        self._llm = LLM(
            variant.path,
            device="cpu",
            dtype=variant.dtype,
            num_threads=threads or compute_threads(None).count,  # none is dropped meanwhile
            kv_cache_memory=KV_BYTES,
            max_num_seqs=max([case.rows for case in cases]),
        )
        try:
            self.timers = Timers(self._llm)
            about: dict[str, Any] = self._llm.describe()
            self.dtype, self.threads = about["dtype"], int(about["num_threads"])
            self.max_model_len = int(about["max_model_len"])
            self.kv_bytes = getattr(torch, about["kv_cache_dtype"]).itemsize
            self.model = CountedModel(variant.path, self.dtype)
        except BaseException:
            self._llm.close()
            raise
        self._rng = np.random.default_rng(0)
        self._prompts: dict[Case, list[list[int]]] = {}

    def close(self) -> None:
        """End the engine."""
        self.timers.close()
        self._llm.close()

    def round(self, case: Case) -> list[TimedStep]:
        """The steps of one round: sequences go on from the same prompts; prompts are new ones."""
        from pyengine import SamplingParams

        is_prompt = case.new > 1
        if is_prompt:
            calls = [[self._prompt(case.new)] for _ in range(PROMPTS)]
        else:
            if case not in self._prompts:
                self._prompts[case] = [self._prompt(case.context) for _ in range(case.rows)]
            calls = [self._prompts[case]]
        params = SamplingParams(
            temperature=0,
            max_tokens=1 if is_prompt else DECODES + 2,
            ignore_eos=True,
            detokenize=False,
        )
        self.timers.steps.clear()
        for prompts in calls:
            self._llm.generate(prompts, params, use_tqdm=False)
        shape = case.shape
        steps = [
            step
            for step in self.timers.steps
            if (step.num_tokens, step.num_rows) == (shape.tokens, shape.rows)
        ]
        steps = steps if is_prompt else steps[1:]
        if not steps:
            raise FloorError(f"no step of the engine was {case.name}")
        return steps

    def _prompt(self, length: int) -> list[int]:
        vocab_size = self.model.spec.vocab_size
        return self._rng.integers(3, vocab_size, length).tolist()


def measure(
    variant: Variant,
    rounds: int,
    threads: int | None = None,
    *,
    only: str = "",
    limits: Limits | None = None,
    cases: Sequence[Case] = CASES,
) -> dict[str, Any]:
    """The limits of the machine and the figures of each step, for the file of results.

    Steps that are longer than the model's context are left out. Raises `FloorError` for an engine
    without these parts, and as `LLM`.
    """
    selected = [case for case in cases if only in case.name]
    engine = MeasuredEngine(variant, threads, selected)
    try:
        model = engine.model
        if limits is None:
            limits = measure_limits(engine.threads, sum(model.weight_bytes.values()))
            release_threads()  # else the engine's would not spin
        fitting = [case for case in selected if case.longest <= engine.max_model_len]
        steps = {}
        for case in fitting:
            steps[case.name] = measure_case(engine, case, rounds, limits)
            print(f"{variant.name}, {case.name}", file=sys.stderr, flush=True)
    finally:
        engine.close()
    about = {"dtype": engine.dtype, "rounds": rounds, "limits": limits.as_json()}
    return {**about, "steps": steps}


def measure_case(engine: MeasuredEngine, case: Case, rounds: int, limits: Limits) -> dict[str, Any]:
    """The figures of one step: rounds with timers and without them, in turns."""
    timers = engine.timers
    engine.round(case)  # warm
    timed: list[TimedStep] = []
    plain: list[TimedStep] = []
    waited = np.zeros(2)
    for turn in range(2 * rounds):
        is_timed = turn % 4 in (0, 3)
        before = np.array(waiting_seconds())
        with timers.on() if is_timed else nullcontext():
            steps = engine.round(case)
        if is_timed:
            waited += np.array(waiting_seconds()) - before
        (timed if is_timed else plain).extend(steps)
    parts = _seconds(timed, _attention_alone(engine, case))
    with timers.one_thread():
        with timers.on():
            by_one = [step for _ in range(rounds) for step in engine.round(case)]
        by_one_thread = _seconds(by_one, _attention_alone(engine, case))
    costs = engine.model.costs(case.shape, engine.kv_bytes)
    floors = floor_seconds(costs, limits.reading.per_second, peaks_of(limits))
    fastest = _fastest_steps(timed)
    whole = [(step.end - step.start) / 1e9 for step in _fastest_steps(plain)]
    return {
        "tokens": case.shape.tokens,
        "seconds": fmean([(step.end - step.start) / 1e9 for step in fastest]),
        "seconds_without_timers": fmean(whole),
        "processor_seconds": fmean([step.processor / 1e9 for step in fastest]),
        "own_waiting": waited[0] / len(timed),
        "other_waiting": waited[1] / len(timed),
        "parts": {
            part: {
                "bytes": costs[part].num_bytes,
                "operations": sum(costs[part].operations.values()),
                "floor": floors[part],
                "seconds": parts[part],
                "seconds_of_one_thread": by_one_thread[part],
            }
            for part in PARTS
        },
    }


def _attention_alone(engine: MeasuredEngine, case: Case) -> float:
    """Seconds of attention in a step, without rotation and writes."""
    with engine.timers.without_writes(), engine.timers.on():
        steps = engine.round(case)
    return fmean(_fastest([step.spent[ATTENTION] for step in steps])) / 1e9


def _fastest(numbers: Sequence[float]) -> Sequence[float]:
    """The fastest quarter: other programs slow the others down."""
    return sorted(numbers)[: max(1, len(numbers) // 4)]


def _fastest_steps(steps: Sequence[TimedStep]) -> Sequence[TimedStep]:
    count = max(1, len(steps) // 4)
    return sorted(steps, key=lambda step: step.end - step.start)[:count]


def _seconds(steps: Sequence[TimedStep], attention: float) -> dict[str, float]:
    """The mean seconds of each part; `attention` is without rotation and writes."""
    fastest = _fastest_steps(steps)
    seconds = {part: fmean([step.spent.get(part, 0) / 1e9 for step in fastest]) for part in PARTS}
    seconds[ROTATION] += max(0.0, seconds[ATTENTION] - attention)
    seconds[ATTENTION] = min(attention, seconds[ATTENTION])
    whole = fmean([(step.end - step.start) / 1e9 for step in fastest])
    seconds[PYTHON] = whole - sum(seconds.values())
    gaps = [
        (after.start - before.end) / 1e9
        for before, after in pairwise(steps)
        if 0 <= after.start - before.end < whole * 1e9
    ]
    seconds[BETWEEN] = fmean(_fastest(gaps)) if gaps else 0.0
    return seconds
