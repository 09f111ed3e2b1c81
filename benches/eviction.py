"""Hit rates of the eviction policies on the Mooncake conversation trace, as a markdown table.

    python benches/eviction.py path/to/mooncake_conversation.jsonl.gz

Each of the 12,031 requests names its prompt's blocks of 512 tokens by id; equal ids are equal
whole prefixes. Here an id is a token and a block holds one, so a hit is a block of 512 tokens that
is not computed. Requests run one after the other: a pool holds what is evictable, and one prompt.

`best possible` is the bound of every policy: Belady's rule, which knows the future and first evicts
the block that is needed again last.
"""

import argparse
import gzip
import heapq
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pyengine import BlockManager

Prompts = list[npt.NDArray[np.int64]]
TOKENS = 512  # of a block
POOLS = (1_000, 3_000, 10_000, 30_000)


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


def read(trace: Path) -> Prompts:
    """The ids of each prompt's full blocks: a partial last one is never shared."""
    with gzip.open(trace) as lines:
        requests = [json.loads(line) for line in lines]
    full = [request["hash_ids"][: request["input_length"] // TOKENS] for request in requests]
    return [np.array(blocks, np.int64) for blocks in full if blocks]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", type=Path)
    prompts = read(parser.parse_args().trace)
    print(f"| blocks of {TOKENS} tokens | {' | '.join(RATES)} |")
    print("|---" * (1 + len(RATES)) + "|")
    for num_blocks in POOLS:
        cells = [f"{rate(prompts, num_blocks):.1%}" for rate in RATES.values()]
        print(f"| {num_blocks:,} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
