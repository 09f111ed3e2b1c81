"""The pause of an update of all weights while requests run, and the memory of a sleeping engine.

    .venv/bin/python -m benches.engine.update [--rounds 5]

32 requests of the embedded model decode; every matrix is replaced with `mode="keep"`. Prints
medians, the worst in brackets:

- `copy`: the time in which NumPy copies the same tensors.
- `pause`: the longest time between the ends of two steps during the update, less a median step
  before it.
- `step`, `slower`: the median step before, and while weights are laid out.
- `update`: the time of the call.
- the resident memory before `sleep`, at both levels, and after `wake_up`.
"""

import argparse
import threading
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from benches.engine.float_model import float_folder
from benches.peers.report import machine
from pyengine import LLM, SamplingParams

REQUESTS, TOKENS = 32, 4000


class Ends:
    """An observer that notes when each step has ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step(self, _result: Any) -> None:
        """A step has ended."""
        self.times.append(perf_counter())

    def on_arrival(self, _request: Any) -> None:
        """See `EngineObserver`."""

    on_finish = on_arrival


def gaps(times: list[float], begin: float, end: float) -> list[float]:
    """The seconds between the ends of steps from the last one before `begin` on."""
    inside = [time for time in times if begin <= time <= end]
    before = [time for time in times if time < begin][-1:]
    after = [time for time in times if time > end][:1]
    marks = before + inside + after
    return [later - earlier for earlier, later in pairwise(marks)]


def resident() -> float:
    """Anonymous memory of this process in MB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024 / 1e6


def shown(seconds: list[float]) -> str:
    """The median, and the worst, in milliseconds."""
    return f"{1000 * median(seconds):.1f} ms ({1000 * max(seconds):.1f})"


def measure(dtype: str, rounds: int) -> dict[str, list[float]]:
    """Updates of an engine of this dtype."""
    folder, ends = float_folder(), Ends()
    weights = load_file(folder / "model.safetensors")
    figures: dict[str, list[float]] = {
        name: [] for name in ("copy", "pause", "update", "step", "slower")
    }
    params = SamplingParams(temperature=1, seed=0, ignore_eos=True, max_tokens=TOKENS)
    with LLM(folder, dtype=dtype, num_blocks=9000, max_model_len=4096) as llm:
        llm.observe(ends)
        prompts = [[5 + number, 6, 7] for number in range(REQUESTS)]
        outputs: list[Any] = []

        def run() -> None:
            outputs.extend(llm.generate(prompts, params, use_tqdm=False))

        thread = threading.Thread(target=run)
        thread.start()
        for _ in range(rounds):
            start = len(ends.times)
            while len(ends.times) < start + 12:
                sleep(0.001)
            step = median(gaps(ends.times, ends.times[start], ends.times[start + 11]))
            begin = perf_counter()
            llm.update_weights(weights)
            end = perf_counter()
            while ends.times[-1] <= end:
                sleep(0.001)
            during = gaps(ends.times, begin, end)
            figures["step"].append(step)
            figures["slower"].append(median(during))
            figures["update"].append(end - begin)
            figures["pause"].append(max(during) - step)
            begin = perf_counter()
            for numbers in weights.values():
                np.array(numbers)
            figures["copy"].append(perf_counter() - begin)
        llm.sleep(1)  # ends the requests
        llm.wake_up()
        thread.join()
        assert all(len(output.outputs[0].token_ids) for output in outputs)
    return figures


def sleeping() -> list[tuple[str, float]]:
    """The resident memory of an engine at work, asleep, and at work again, in MB."""
    folder = float_folder()
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=64)
    prompts = [[5 + number, 6, 7] for number in range(REQUESTS)]
    with LLM(folder, dtype="float32", num_blocks=9000, max_model_len=4096) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        memory = [("awake", resident())]
        for level in (1, 2):
            llm.sleep(level)
            memory.append((f"sleep({level})", resident()))
            llm.wake_up(weights=folder if level == 2 else None)
        llm.generate(prompts, params, use_tqdm=False)
        return [*memory, ("awake again", resident())]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(machine())
    print("resident:", ", ".join(f"{name} {size:.0f} MB" for name, size in sleeping()))
    for dtype in ("float32", "bfloat16"):
        figures = measure(dtype, rounds)
        print(f"| {dtype} | " + " | ".join(f"{name} {shown(figures[name])}" for name in figures))
        ratio = median(figures["pause"]) / median(figures["copy"])
        worst = max(figures["pause"]) / median(figures["copy"])
        print(f"pause / copy: {ratio:.2f}, worst {worst:.2f}")


if __name__ == "__main__":
    main()
