"""Hit rates of the eviction policies on the Mooncake conversation trace, as a markdown table.

    python benches/eviction.py path/to/mooncake_conversation.jsonl.gz

Each of the 12,031 requests names its prompt's blocks of 512 tokens by id; equal ids are equal
whole prefixes. Here an id is a token and a block holds one, so a hit is a block of 512 tokens that
is not computed. Requests run one after the other: a pool holds what is idle, and one prompt.
"""

import gzip
import json
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pyengine import BlockManager

POOLS = (1_000, 3_000, 10_000, 30_000)
POLICIES = ("lru", "2q")


def hit_rate(prompts: list[npt.NDArray[np.int64]], num_blocks: int, policy: str) -> float:
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


def main(trace: Path) -> None:
    """Print the table."""
    with gzip.open(trace) as lines:
        prompts = [np.array(json.loads(line)["hash_ids"], np.int64) for line in lines]
    print(f"| blocks of 512 tokens | {' | '.join(POLICIES)} |")
    print("|---" * (1 + len(POLICIES)) + "|")
    start = time.perf_counter()
    for num_blocks in POOLS:
        rates = [f"{hit_rate(prompts, num_blocks, policy):.1%}" for policy in POLICIES]
        print(f"| {num_blocks:,} | {' | '.join(rates)} |")
    runs = len(POOLS) * len(POLICIES)
    seconds = time.perf_counter() - start
    print(f"\n{len(prompts):,} requests, {runs} runs, {seconds:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
