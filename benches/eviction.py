"""Hit rates of the eviction policies on the Mooncake conversation trace, as a markdown table.

    python benches/eviction.py path/to/mooncake_conversation.jsonl.gz [--plot picture.svg]

Each of the 12,031 requests names its prompt's blocks of 512 tokens by id; equal ids are equal
whole prefixes. Here an id is a token and a block holds one, so a hit is a block of 512 tokens that
is not computed. Requests run one after the other: a pool holds what is evictable, and one prompt.

`best possible` is the bound of every policy: Belady's rule, which knows the future and first evicts
the block that is needed again last. `--plot` draws more pool sizes than the table has; it needs
matplotlib, `.venv/bin/pip install matplotlib` in a checkout.
"""

import argparse
import gzip
import heapq
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine import BlockManager

Prompts = list[npt.NDArray[np.int64]]
TOKENS = 512  # of a block
POOLS = (1_000, 3_000, 10_000, 30_000)
PLOTTED = (500, 700, 1_000, 1_700, 3_000, 5_000, 7_000, 10_000, 17_000, 30_000, 42_000, 60_000)


def hit_rate(prompts: Prompts, num_blocks: int, policy: str) -> float:
    """The share of prompt blocks that a pool with this policy did not compute."""
    manager = BlockManager(num_blocks, 1, eviction=policy)
    for prompt in prompts:
        sequence = manager.sequence(prompt)
        plan = manager.begin_step(len(prompt))
        plan.prefill(sequence, len(prompt))
        plan.commit([0])
        sequence.free()
    manager.check()
    return manager.stats().hit_blocks / sum(map(len, prompts))


def best_hit_rate(prompts: Prompts, num_blocks: int) -> float:
    """The same by Belady's rule; of one prompt, the last block goes first."""
    next_use: dict[int, int] = {}
    uses: list[list[tuple[int, int]]] = []  # of each prompt: block, the request that is next
    for number in reversed(range(len(prompts))):
        blocks = prompts[number].tolist()
        uses.append([(block, next_use.get(block, len(prompts))) for block in blocks])
        next_use.update(dict.fromkeys(blocks, number))
    held: dict[int, int] = {}
    furthest: list[tuple[int, int, int]] = []
    hits = 0
    for blocks_used in reversed(uses):
        missing = sum(block not in held for block, _ in blocks_used)
        hits += len(blocks_used) - missing
        while len(held) + missing > num_blocks:
            when, _, block = heapq.heappop(furthest)
            if held.get(block) == -when:  # else it was used since
                del held[block]
        held.update(blocks_used)
        for position, (block, when) in enumerate(blocks_used):
            heapq.heappush(furthest, (-when, -position, block))
    return hits / sum(map(len, prompts))


RATES: dict[str, Callable[[Prompts, int], float]] = {
    "lru": partial(hit_rate, policy="lru"),
    "2q": partial(hit_rate, policy="2q"),
    "best possible": best_hit_rate,
}
LOOKS: dict[str, dict[str, Any]] = {  # and where in the picture the line's name is
    "lru": {"color": "#b8390e", "marker": "o", "label_at": (3_900, 0.072), "linestyle": "-"},
    "2q": {"color": "#1f5fa8", "marker": "s", "label_at": (2_550, 0.12), "linestyle": "-"},
    "best possible": {"color": "#555555", "label_at": (560, 0.228), "linestyle": "--"},
}


def read(trace: Path) -> Prompts:
    """The ids of each prompt's full blocks: a partial last one is never shared."""
    with gzip.open(trace) as lines:
        requests = [json.loads(line) for line in lines]
    full = [request["hash_ids"][: request["input_length"] // TOKENS] for request in requests]
    return [np.array(blocks, np.int64) for blocks in full if blocks]


def print_table(rates: dict[str, dict[int, float]]) -> None:
    """A row for each pool of `POOLS`."""
    print(f"| blocks of {TOKENS} tokens | {' | '.join(rates)} |")
    print("|---" * (1 + len(rates)) + "|")
    for num_blocks in POOLS:
        row = [f"{line[num_blocks]:.1%}" for line in rates.values()]
        print(f"| {num_blocks:,} | {' | '.join(row)} |")


def draw(rates: dict[str, dict[int, float]], endless: float, picture: Path) -> None:
    """A line for each policy, and one across for a pool that nothing is evicted from."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter, StrMethodFormatter

    mpl.rcParams |= {"svg.hashsalt": "eviction", "font.size": 10}
    figure = Figure(figsize=(7, 3.8), layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.axhline(endless, color="#999999", linewidth=1)
    axes.text(PLOTTED[0], endless + 0.006, f"endless pool, {endless:.1%}", color="#555555")
    for name, line in rates.items():
        looks = dict(LOOKS[name])
        axes.text(*looks.pop("label_at"), name, color=looks["color"], weight="bold")
        axes.plot(line.keys(), line.values(), **looks, markersize=4)
    axes.set(
        xscale="log",
        ylim=(0, 0.42),
        xlabel=f"pool, in blocks of {TOKENS} tokens (log scale)",
        ylabel="prompt blocks that are hits",
    )
    axes.xaxis.set_major_locator(FixedLocator([PLOTTED[0], *POOLS, PLOTTED[-1]]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, metadata={"Creator": None, "Date": None})


def main() -> None:
    """Print the table; draw the picture if asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=Path)
    parser.add_argument("--plot", type=Path, metavar="PICTURE")
    given = parser.parse_args()
    prompts = read(given.trace)
    start = time.perf_counter()
    pools = PLOTTED if given.plot else POOLS
    rates = {name: {pool: rate(prompts, pool) for pool in pools} for name, rate in RATES.items()}
    print_table(rates)
    if given.plot:
        draw(rates, best_hit_rate(prompts, sum(map(len, prompts))), given.plot)
    runs, seconds = len(pools) * len(RATES), time.perf_counter() - start
    print(f"\n{len(prompts):,} requests, {runs} runs, {seconds:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
