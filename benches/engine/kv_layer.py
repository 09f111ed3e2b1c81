"""One layer of attention in a decode step over long contexts, by type of the KV cache, in turns.

    .venv/bin/python -m benches.engine.kv_layer [--sequences 32] [--context 2048] [--dtype float32]

from the root of the repository. Milliseconds of processor time with one thread; other programs may
work meanwhile. `PYENGINE_CPU_ISA` lowers the level of instructions.
"""

import argparse
from collections.abc import Callable
from statistics import median
from time import thread_time

import torch

from benches.engine.attention import BLOCK, DIM, HEADS, KV_HEADS
from pyengine.attention.backend import AttentionOptions, StepInputs
from pyengine.attention.cpu import CpuBackend
from pyengine.kv_cache.pool import KVCacheSpec, KVPool
from pyengine.utils.dtypes import dtype_of

CACHES = ("auto", "int8")


def layer(kv: str, dtype: torch.dtype, sequences: int, context: int) -> Callable[[], torch.Tensor]:
    """Attention of one layer with a cache of random keys and values."""
    cached = dtype if kv == "auto" else torch.int8
    width = context // BLOCK
    spec = KVCacheSpec(KV_HEADS, DIM, DIM, dtype_of(cached))
    pool = KVPool([spec], sequences * width + 1, BLOCK, torch.device("cpu"))
    backend = CpuBackend(pool)
    options = AttentionOptions(scaling=DIM**-0.5)
    tables = torch.randperm(pool.num_blocks)[: sequences * width].view(sequences, width)

    def inputs(positions: torch.Tensor) -> StepInputs:
        """A step of the tokens at these positions of all sequences."""
        count = len(positions)
        slots = tables[:, positions // BLOCK] * BLOCK + positions % BLOCK
        starts = torch.arange(sequences + 1, dtype=torch.int32) * count
        lengths = torch.full((sequences,), int(positions[-1]) + 1, dtype=torch.int32)
        return StepInputs(
            input_ids=torch.zeros(sequences * count, dtype=torch.int64),
            positions=positions.repeat(sequences),
            slot_mapping=slots.flatten()[None],
            query_start_loc=starts,
            seq_lens=lengths,
            block_tables=tables.to(torch.int32)[None],
            logits_indices=torch.arange(sequences),
            host_query_start_loc=starts.numpy(),
            host_seq_lens=lengths.numpy(),
            host_block_tables=tables.to(torch.int32)[None].numpy(),
        )

    def rows(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query = torch.randn(sequences * count, HEADS, DIM).to(dtype)
        key, value = torch.randn(2, sequences * count, KV_HEADS, DIM).to(dtype)
        return query, key, value

    for first in range(0, context, BLOCK):
        positions = torch.arange(first, first + BLOCK)
        backend.plan(inputs(positions)).forward(0, rows(BLOCK), options)
    plan, decode = backend.plan(inputs(torch.tensor([context - 1]))), rows(1)
    return lambda: plan.forward(0, decode, options)


def layers(dtype: torch.dtype, sequences: int, context: int, rounds: int) -> None:
    """One layer with each cache, in turns."""
    torch.set_num_threads(1)
    attend = {kv: layer(kv, dtype, sequences, context) for kv in CACHES}
    times: dict[str, list[float]] = {kv: [] for kv in CACHES}
    for turn in range(-3, rounds):
        for kv in CACHES:
            start = thread_time()
            with torch.inference_mode():
                attend[kv]()
            if turn >= 0:
                times[kv].append(thread_time() - start)
    medians = {kv: median(times[kv]) for kv in CACHES}
    for kv in CACHES:
        print(f"{kv}: {1000 * medians[kv]:.2f} ms")
    print(f"int8 / auto: {medians['auto'] / medians['int8']:.2f} times as fast")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    layers(dtype, options.sequences, options.context, options.rounds)


if __name__ == "__main__":
    main()
