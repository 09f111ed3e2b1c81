"""Prompt tokens computed with partial reuse and without, on BIG-Bench-Hard, as a markdown table.

    python benches/partial.py path/to/bbh_text.tar.gz [--limit 8]

The 6,511 questions, each behind the three worked examples of its task, in the tokens of the default
model. One prompt after the other through the block manager alone, task by task and in random order;
the pool holds everything. `--limit` takes so many questions of each task.
"""

import argparse
import json
import random
import tarfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from pyengine import BlockManager, Stats
from pyengine.models.source import resolve_source

Tokens = npt.NDArray[np.int64]
BLOCK_SIZES = (16, 64, 256)
SEED = 0


def read(archive: Path, limit: int | None) -> list[str]:
    """The prompts, task by task."""
    texts: list[str] = []
    with tarfile.open(archive) as files:

        def text(name: str) -> str:
            member = files.extractfile(name)
            assert member is not None, name
            return member.read().decode()

        heads = sorted(name for name in files.getnames() if name.startswith("cot-prompts/"))
        for name in heads:
            if name.endswith(".txt"):
                head = text(name).split("-----\n", 1)[-1].strip()
                task = Path(name).stem
                examples = json.loads(text(f"bbh/{task}.json"))["examples"]
                texts += [f"{head}\n\nQ: {one['input']}\nA:" for one in examples[:limit]]
    return texts


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
        before, after = (one.computed_tokens / len(prompts) for one in (without, with_it))
        each = with_it.partial_tokens / max(with_it.partial_hits, 1)
        print(
            f"| {size} | {before:.1f} | {after:.1f} | {1 - after / before:.1%} "
            f"| {with_it.partial_hits / len(prompts):.1%} | {each:.1f} |"
        )


def main() -> None:
    """Print a table for each order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("archive", type=Path)
    parser.add_argument("--limit", type=int)
    given = parser.parse_args()
    texts = read(given.archive, given.limit)
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
