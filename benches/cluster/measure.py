"""Step times of the embedded model on this machine: the constants of the simulator's clock.

    python -m benches.cluster.measure

Prompts alone, and decodes alone, by several sizes; the least of the rounds of each; then a fit.
"""

import json
from time import perf_counter

import numpy as np

from benches.cluster.simulate import RESULTS
from pyengine import LLM, SamplingParams
from pyengine.engine.stats import StepResult

PROMPT = 4096
ROUNDS = 2


class Clock:
    """Times of steps, in order."""

    def __init__(self) -> None:
        self.last = 0.0
        self.seconds: list[float] = []

    def on_arrival(self, _: object) -> None:
        """The first step begins."""
        self.last, self.seconds = perf_counter(), []

    def on_finish(self, _: object) -> None:
        """Nothing."""

    def on_step(self, _: StepResult) -> None:
        """A step has ended."""
        now = perf_counter()
        self.seconds.append(now - self.last)
        self.last = now


def measured() -> list[tuple[list[float], float]]:
    """For each kind of step what is in it, as `Costs` counts, and its seconds."""
    llm = LLM(num_blocks=800, block_size=16, enable_prefix_caching=False, max_model_len=6000)
    clock = Clock()
    llm.observe(clock)
    costs_by_step: dict[tuple[float, ...], float] = {}

    def note(features: tuple[float, ...], seconds: float) -> None:
        costs_by_step[features] = min(seconds, costs_by_step.get(features, seconds))
        print(features, f"{seconds * 1e3:.1f} ms", flush=True)

    once = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    some = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    random = np.random.default_rng(0)
    for _ in range(ROUNDS):
        llm.generate([random.integers(1000, 40_000, PROMPT)], once, use_tqdm=False)
        for step, seconds in enumerate(clock.seconds):
            context, chunk = 2048 * step, 2048
            note((1, chunk, chunk * (context + chunk / 2) / 1e6, 0, 0), seconds)
        for length in (64, 512):
            llm.generate([random.integers(1000, 40_000, length)], once, use_tqdm=False)
            note((1, length, length * length / 2 / 1e6, 0, 0), clock.seconds[0])
        for rows, length in ((1, 64), (4, 64), (16, 64), (8, 400), (1, 1800)):
            prompts = [random.integers(1000, 40_000, length) for _ in range(rows)]
            llm.generate(prompts, some, use_tqdm=False)
            decode = float(np.median(clock.seconds[-5:]))
            note((1, 0, 0, rows, rows * (length + 5) / 1e3), decode)
    llm.close()
    return [(list(features), seconds) for features, seconds in costs_by_step.items()]


def main() -> None:
    """Measure, fit, write down."""
    steps = measured()
    features, seconds = (np.array(column) for column in zip(*steps, strict=True))
    weights = 1 / seconds  # relative errors count
    fit, *_ = np.linalg.lstsq(features * weights[:, None], np.ones(len(seconds)), rcond=None)
    names = ("step", "prompt_token", "prompt_context", "row", "row_context")
    costs = dict(zip(names, np.maximum(fit, 0).tolist(), strict=True))
    for step, real in steps:
        print(step, f"{real * 1e3:.1f} ms, fitted {float(np.dot(step, fit)) * 1e3:.1f} ms")
    written = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**written, "costs": costs}, indent=1) + "\n")
    print(costs)


if __name__ == "__main__":
    main()
