"""Prompt tokens computed with partial reuse and without, on BIG-Bench-Hard, as a markdown table.

    python -m benches.partial path/to/bbh_text.tar.gz [--limit 8]

The 6,511 questions, each behind the three worked examples of its task, in the tokens of the default
model. One prompt after the other through the block manager alone, task by task and in random order;
the pool holds everything. `--limit` takes so many questions of each task.
"""

import argparse
import random
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from benches.peers.adapters.base import Tokens
from benches.peers.traces import bbh_tasks
from pyengine import BlockManager, Stats
from pyengine.models.source import resolve_source

BLOCK_SIZES = (16, 64, 256)
SEED = 0


def run(prompts: list[Tokens], block_size: int, *, partial_reuse: bool) -> Stats:
    """One token for each prompt, one after the other."""
    blocks = sum(-(-len(prompt) // block_size) + 1 for prompt in prompts)
    manager = BlockManager(blocks, block_size, partial_reuse=partial_reuse)
    for prompt in prompts:
        sequence = manager.sequence(prompt)
        plan = manager.begin_step(len(prompt))
        plan.prefill(sequence, len(prompt))
        plan.copies()
        plan.commit([0])
        sequence.free()
    manager.check()
    return manager.stats()


def print_table(prompts: list[Tokens]) -> None:
    """Computed tokens per request for each size of block, and what became of the difference."""
    print(
        "| block | computed without | computed with | saved | requests that copy | tokens copied |"
    )
    print("|---:" * 6 + "|")
    for size in BLOCK_SIZES:
        without, with_it = (run(prompts, size, partial_reuse=on) for on in (False, True))
        before, after = (item.computed_tokens / len(prompts) for item in (without, with_it))
        copied = with_it.partial_tokens / max(with_it.partial_hits, 1)
        print(
            f"| {size} | {before:.1f} | {after:.1f} | {1 - after / before:.1%} "
            f"| {with_it.partial_hits / len(prompts):.1%} | {copied:.1f} |"
        )


def main() -> None:
    """Print a table for each order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("archive", type=Path)
    parser.add_argument("--limit", type=int)
    given = parser.parse_args()
    tasks = bbh_tasks(given.archive)
    texts = [task.prompt(question) for task in tasks for question in task.questions[: given.limit]]
    tokenizer = AutoTokenizer.from_pretrained(resolve_source(None).folder)
    prompts = [np.array(ids) for ids in tokenizer(texts)["input_ids"]]
    average = sum(map(len, prompts)) / len(prompts)
    print(f"{len(prompts):,} prompts of {average:.0f} tokens\n\nTask by task:\n")
    print_table(prompts)
    random.Random(SEED).shuffle(prompts)
    print("\nIn random order:\n")
    print_table(prompts)


if __name__ == "__main__":
    main()
