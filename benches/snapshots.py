"""Policies of snapshots on traces, and the memory of blocks and states, as markdown tables.

    .venv/bin/python -m benches.snapshots FOLDER [--requests 2000] [--every 4]

FOLDER has `mooncake_conversation.jsonl.gz` and `bbh_text.tar.gz` (see `benches/peers/traces.py`).
Prompts go one after the other through the block manager alone: no model computes. Those of the chat
service are cut to their whole blocks of 512 tokens: of other tokens the trace does not say what
follows them. The pool holds 64 GiB, in the shapes of three released models.

- A column has the share of prompt tokens that are not computed again. `keys and values` are those
  that are cached, whatever states are: the bound of every policy. The next columns add kinds of
  snapshots, one after the other: at the ends of prompts, at branch points, every 512 tokens of a
  prompt, every 128.
- The last column has the bytes that cached tokens and states need, over those of their blocks, at
  the end of the run with snapshots every 512 tokens: a state takes whole blocks.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benches.peers.adapters.base import Tokens
from benches.peers.traces import bbh, mooncake
from pyengine import BlockManager, Prefilled, Sequence

BLOCK = 16
POOL_BYTES = 64 << 30
NEVER = 1 << 40


@dataclass(frozen=True)
class Shape:
    """Bytes of keys and values for each token, and of a state."""

    name: str
    token_bytes: int
    state_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return BLOCK * self.token_bytes

    @property
    def state_blocks(self) -> int:
        """Blocks of a snapshot."""
        return -(-self.state_bytes // self.block_bytes)

    def manager(self, *, states: bool, cadence: int = 0, min_tokens: int = 64) -> BlockManager:
        """A pool for the shape."""
        blocks = POOL_BYTES // self.block_bytes
        if not states:
            return BlockManager(blocks, BLOCK)
        return BlockManager(
            blocks,
            BLOCK,
            state_blocks=self.state_blocks,
            snapshot_cadence=cadence,
            snapshot_min_tokens=min_tokens,
        )


_DELTA = 32 * 128 * 128 * 4 + 3 * 8192 * 2  # matrices in float32; inputs of the convolution
_MAMBA = 48 * 64 * 128 * 4 + 3 * (48 * 64 + 2 * 128) * 2
SHAPES = (
    Shape("LFM2-1.2B", 6 * 2 * 8 * 64 * 2, 10 * 2 * 2048 * 2),
    Shape("Qwen3.5-4B", 8 * 2 * 4 * 256 * 2, 24 * _DELTA),
    Shape("Granite-4.0-H-Tiny", 4 * 2 * 4 * 128 * 2, 36 * _MAMBA),
)


@dataclass
class Run:
    """The result of a policy on a trace."""

    reused: float
    memory: float


def replay(prompts: Iterable[Tokens], manager: BlockManager, shape: Shape, *, ends: bool) -> Run:
    """Prompts one after the other; with `ends`, snapshots are asked for at those of prompts."""
    cached = total = 0
    for prompt in prompts:
        sequence = manager.sequence(prompt)
        if ends:
            sequence.want_snapshots([len(prompt) - 1])
        total += len(prompt)
        cached += compute(manager, sequence, len(prompt))
        sequence.free()
    manager.check()
    return Run(cached / total, used_share(manager, shape))


def compute(manager: BlockManager, sequence: Sequence, length: int) -> int:
    """Compute a prompt, chunk by chunk; returns the tokens that its first chunk reused."""
    cached, samples = None, False
    while not samples:
        plan = manager.begin_step(length)
        answer = plan.prefill(sequence, length)
        if not isinstance(answer, Prefilled):
            raise SystemExit(f"a prompt of {length} tokens does not fit into the pool: {answer}")
        plan.copies()
        samples = plan.num_samples > 0
        plan.commit([0] if samples else [])
        cached = answer.num_cached_tokens if cached is None else cached
    return cached or 0


def used_share(manager: BlockManager, shape: Shape) -> float:
    """Bytes that cached tokens and states need, over the bytes of their blocks."""
    usage, states = manager.usage(), manager.state_usage()
    blocks = manager.num_blocks - usage.free
    needed = (blocks - states.blocks) * shape.block_bytes + states.snapshots * shape.state_bytes
    return needed / (blocks * shape.block_bytes)


POLICIES: dict[str, Callable[[Iterable[Tokens], Shape], Run]] = {
    "keys and values": lambda prompts, shape: replay(
        prompts, shape.manager(states=False), shape, ends=False
    ),
    "ends": lambda prompts, shape: replay(
        prompts, shape.manager(states=True, min_tokens=NEVER), shape, ends=True
    ),
    "+ branch points": lambda prompts, shape: replay(
        prompts, shape.manager(states=True), shape, ends=False
    ),
    "+ every 512": lambda prompts, shape: replay(
        prompts, shape.manager(states=True, cadence=512), shape, ends=False
    ),
    "+ every 128": lambda prompts, shape: replay(
        prompts, shape.manager(states=True, cadence=128), shape, ends=False
    ),
}


def table(name: str, prompts: list[Tokens]) -> None:
    """Print the policies of each shape on one trace."""
    print(f"| {name}: {len(prompts):,} prompts | {' | '.join(POLICIES)} | bytes needed / used |")
    print("|---" * (2 + len(POLICIES)) + "|")
    for shape in SHAPES:
        runs = [policy(prompts, shape) for policy in POLICIES.values()]
        shares = " | ".join(f"{run.reused:.1%}" for run in runs)
        label = f"{shape.name}, {shape.state_blocks} blocks a state"
        print(f"| {label} | {shares} | {runs[-2].memory:.3f} |", flush=True)
    print()


def main() -> None:
    """Print a table for each trace."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=2000, help="of the chat service")
    parser.add_argument("--every", type=int, default=4, help="n-th question of each task")
    options = parser.parse_args()
    groups = mooncake(options.folder / "mooncake_conversation.jsonl.gz", options.requests)
    whole = [(prompt.tokens, len(prompt.block_ids) * 512) for group in groups for prompt in group]
    chat = [tokens[:length] for tokens, length in whole if length]
    questions = bbh(options.folder / "bbh_text.tar.gz", BLOCK, options.every, 1)
    few_shot = [prompt.tokens for prompt in questions]
    mixed = [*chat, *few_shot]
    Random(0).shuffle(mixed)
    for name, prompts in (("Mooncake", chat), ("BBH", few_shot), ("mixed", mixed)):
        table(name, prompts)


if __name__ == "__main__":
    main()
