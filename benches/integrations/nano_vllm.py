"""The time of nano-vllm's Scheduler with its own manager and with ours.

    .venv-peers/bin/python -m benches.integrations.nano_vllm            # a minute
    .venv-peers/bin/python -m benches.integrations.nano_vllm --quick    # does it run

from the root of the repository. The runner is a stub that takes no time. A prompt of 8,192 tokens,
new (cold) and again (hot): from `add` to the end of `postprocess`. A decode step of 256 sequences:
`schedule` and `postprocess`. Medians, in microseconds; blocks of 256, its own choice, and of 16.
"""

import argparse
import importlib
import json
import random
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from benches.peers.adapters import nano_vllm as adapter
from benches.peers.report import machine
from pyengine.integrations.nano_vllm import BlockManager

STOCK, OURS = "stock", "ours"
MANAGERS = {STOCK: adapter.manager_module.BlockManager, OURS: BlockManager}
LENGTH = 8192
CASES = ("cold", "hot", "decode")


class Engine:
    """nano-vllm's Scheduler without a model."""

    def __init__(self, arm: str, block_size: int, running: int) -> None:
        scheduler: Any = importlib.import_module("nanovllm.engine.scheduler")
        scheduler.BlockManager = MANAGERS[arm]
        self.scheduler = scheduler.Scheduler(
            SimpleNamespace(
                max_num_seqs=512,
                max_num_batched_tokens=LENGTH * 4,
                eos=-1,
                num_kvcache_blocks=(LENGTH * 20 + running * 1024) // block_size,
                kvcache_block_size=block_size,
            )
        )
        base = adapter.sequence_module.Sequence
        self.sequence = type("Sequence", (base,), {"block_size": block_size})

    def add(self, tokens: list[int], max_tokens: int) -> None:
        """A request arrives."""
        params = SimpleNamespace(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add(self.sequence(tokens, params))

    def step(self) -> None:
        """One step, of which every sequence gets a token."""
        seqs, is_prefill = self.scheduler.schedule()
        self.scheduler.postprocess(seqs, [7] * len(seqs), is_prefill)


def measure(arm: str, block_size: int, rounds: int, running: int) -> dict[str, float]:
    """Microseconds of each case."""
    chance = random.Random(1)
    times: dict[str, list[float]] = {case: [] for case in CASES}
    engine = Engine(arm, block_size, running)
    for _ in range(rounds):
        prompt = [chance.randrange(50_000) for _ in range(LENGTH)]
        for case in ("cold", "hot"):
            start = perf_counter()
            engine.add(prompt, 1)
            engine.step()
            times[case].append(perf_counter() - start)
    for _ in range(running):
        prompt = [chance.randrange(50_000) for _ in range(chance.randint(500, 512))]
        engine.add(prompt, 10_000)
    while engine.scheduler.waiting:
        engine.step()
    for _ in range(rounds * 10):
        start = perf_counter()
        engine.step()
        times["decode"].append(perf_counter() - start)
    return {case: median(seconds) * 1e6 for case, seconds in times.items()}


def main() -> None:
    """Measure, print a table in markdown, keep the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds of few sequences")
    parser.add_argument("--rounds", type=int, default=3, help="the two take turns so often")
    parser.add_argument("--json", type=Path, help="where the figures are kept")
    options = parser.parse_args()
    turns, rounds, running = (1, 2, 8) if options.quick else (options.rounds, 15, 256)
    kept: dict[str, Any] = {"machine": machine()}
    print("| | blocks of | stock | ours | stock / ours |\n|---|---:|---:|---:|---:|")
    for block_size in (256, 16):
        rounds_of: dict[str, list[dict[str, float]]] = {arm: [] for arm in MANAGERS}
        for _ in range(turns):
            for arm, results in rounds_of.items():
                results.append(measure(arm, block_size, rounds, running))
        for case in CASES:
            stock, ours = (median(result[case] for result in rounds_of[arm]) for arm in MANAGERS)
            kept[f"{case}, {block_size}"] = {STOCK: stock, OURS: ours}
            print(f"| {case} | {block_size} | {stock:,.0f} | {ours:,.0f} | {stock / ours:.2f} |")
    if options.json:
        options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
