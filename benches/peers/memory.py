"""Memory of this block manager, as the resident size of a separate process.

    python -m benches.peers.memory NUM_BLOCKS

prints JSON: megabytes of the whole process with that pool in full use (every block is
cached), bytes per block of it, and bytes per sequence and per token of a sequence.
"""

import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np

from pyengine import BlockManager

BLOCK, PROMPT = 16, 8_192
SEQUENCES, LONG_SEQUENCES = 100_000, 1_000


def resident() -> int:
    """Bytes of this process that are in memory."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def use_every_block(manager: BlockManager) -> None:
    """Prompts that no two share, one after the other, until nothing is free."""
    rng = np.random.default_rng(0)
    while manager.usage().free:
        sequence = manager.sequence(rng.integers(0, 2**32, PROMPT))
        plan = manager.begin_step(PROMPT)
        plan.prefill(sequence, PROMPT)
        plan.commit([1])
        sequence.free()


def sequences(count: int, tokens: int) -> float:
    """Bytes per waiting sequence of so many tokens, its Python handle included."""
    manager = BlockManager(1, BLOCK)
    prompt = np.arange(tokens)
    gc.collect()
    before = resident()
    kept = [manager.sequence(prompt) for _ in range(count)]
    return (resident() - before) / len(kept)


def measure(num_blocks: int) -> dict[str, float]:
    """In this process, once."""
    shorter, longer = sequences(SEQUENCES, 1), sequences(LONG_SEQUENCES, PROMPT)
    gc.collect()
    before = resident()
    manager = BlockManager(num_blocks, BLOCK)
    empty = resident()
    use_every_block(manager)
    after = resident()
    return {
        "num_blocks": num_blocks,
        "process_mb": after / 1e6,
        "bytes_per_block": (after - before) / num_blocks,
        "bytes_per_block_before_use": (empty - before) / num_blocks,
        "bytes_per_sequence": shorter,
        "bytes_per_token": (longer - shorter) / (PROMPT - 1),
    }


def in_a_process(num_blocks: int) -> dict[str, float]:
    """The same in a separate process."""
    command = [sys.executable, "-m", "benches.peers.memory", str(num_blocks)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
