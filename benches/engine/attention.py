"""Paged attention on the CPU, one layer of a decode step: which way is the fastest.

    .venv/bin/python -m benches.engine.attention [--quick] [--no-flex]

from the root of the repository. 9 query heads on 3 KV heads of dimension 64, float32, blocks of 16
that lie anywhere in the pool, lengths that differ by up to a block. Each way gives the same
numbers (checked). FlexAttention is compiled first, which takes most of a minute and a C++
compiler.

- `kernel`: the cpu backend as the engine runs it, the write of the new keys and values included:
  Rust that reads the blocks where they are.
- `gather`: the gather backend in the same way. Gathers a few sequences at a time, as much as a
  core's cache holds.
- `padded`: all sequences gathered at once, to the longest, and one call of SDPA.
- `per sequence`: each gathered by itself, one call each, the query heads of a KV head as rows.
- `flex`: compiled FlexAttention that reads the blocks where they are.

A table goes to standard output, everything to `benches/results/attention.json`.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns as clock
from typing import Any

import torch
import torch.nn.functional as F

from benches.peers.report import libraries, machine
from benches.peers.sampling import Effort, Spread, Stream, interleave
from pyengine.attention.backend import AttentionBackend, AttentionOptions, StepInputs
from pyengine.attention.cpu import CpuBackend
from pyengine.attention.gather import GatherBackend
from pyengine.kv_cache.pool import KVCacheSpec, KVPool

ROOT = Path(__file__).parents[2]
BLOCK, HEADS, KV_HEADS, DIM = 16, 9, 3, 64
GROUP = HEADS // KV_HEADS
SIZES = ((8, 64), (32, 64), (8, 512), (32, 512), (8, 2048), (32, 2048))
QUICK = ((32, 64), (8, 512))
Attend = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One token each for `batch` sequences of about `context` tokens, in a pool of one layer."""

    pool: KVPool
    tables: torch.Tensor
    lengths: torch.Tensor
    query: torch.Tensor

    @classmethod
    def of(cls, batch: int, context: int) -> "Step":
        """Random keys, values and queries."""
        width = context // BLOCK
        spec = KVCacheSpec(KV_HEADS, DIM, DIM, "float32")
        pool = KVPool([spec], batch * width + 64, BLOCK, torch.device("cpu"))
        pool.keys[0].normal_()
        pool.values[0].normal_()
        tables = torch.randperm(pool.num_blocks)[: batch * width].view(batch, width)
        lengths = context - torch.arange(batch) % BLOCK
        return cls(pool, tables, lengths, torch.randn(batch, HEADS, DIM))

    @property
    def mask(self) -> torch.Tensor:
        """True for the gathered keys that each sequence sees."""
        return (torch.arange(self.tables.shape[1] * BLOCK) < self.lengths[:, None])[:, None, None]

    def inputs(self) -> StepInputs:
        """As the runner hands them over."""
        batch = len(self.lengths)
        last = self.lengths - 1
        slots = self.tables[torch.arange(batch), last // BLOCK] * BLOCK + last % BLOCK
        starts = torch.arange(batch + 1, dtype=torch.int32)
        tables, lengths = self.tables.to(torch.int32)[None], self.lengths.to(torch.int32)
        return StepInputs(
            input_ids=torch.zeros(batch, dtype=torch.int64),
            positions=last,
            slot_mapping=slots[None],
            query_start_loc=starts,
            seq_lens=lengths,
            block_tables=tables,
            logits_indices=torch.arange(batch),
            host_query_start_loc=starts.numpy(),
            host_seq_lens=lengths.numpy(),
            host_block_tables=tables.numpy(),
        )


def kernel(step: Step) -> Attend:
    """The engine's own, in Rust."""
    return backend(CpuBackend(step.pool), step)


def gather(step: Step) -> Attend:
    """The engine's own, in torch."""
    return backend(GatherBackend(step.pool), step)


def backend(attention: AttentionBackend, step: Step) -> Attend:
    """A backend; what it prepares once for all layers of a step is not timed."""
    inputs = step.inputs()
    plan = attention.plan(inputs)
    options = AttentionOptions(scaling=DIM**-0.5)
    slots = inputs.slot_mapping[0]
    key = step.pool.keys[0].flatten(0, 1)[slots].clone()
    value = step.pool.values[0].flatten(0, 1)[slots].clone()
    return lambda: plan.forward(0, (step.query, key, value), options)


def padded(step: Step) -> Attend:
    """Everything at once."""
    blocks, mask, batch = step.tables.flatten(), step.mask, len(step.tables)
    rows = step.query.view(batch, KV_HEADS, GROUP, DIM)

    def gathered(cache: torch.Tensor) -> torch.Tensor:
        return cache.index_select(0, blocks).view(batch, -1, KV_HEADS, DIM).transpose(1, 2)

    def attend() -> torch.Tensor:
        key, value = gathered(step.pool.keys[0]), gathered(step.pool.values[0])
        return F.scaled_dot_product_attention(rows, key, value, attn_mask=mask).flatten(1, 2)

    return attend


def per_sequence(step: Step) -> Attend:
    """One call each, nothing padded."""
    lengths, tables = step.lengths.tolist(), list(step.tables)
    rows = step.query.view(-1, 1, KV_HEADS, GROUP, DIM)
    out = torch.empty_like(step.query)

    def attend() -> torch.Tensor:
        for at, (length, table) in enumerate(zip(lengths, tables, strict=True)):
            key, value = (
                cache[0].index_select(0, table).flatten(0, 1)[:length].transpose(0, 1)[None]
                for cache in (step.pool.keys, step.pool.values)
            )
            out[at] = F.scaled_dot_product_attention(rows[at], key, value)[0].flatten(0, 1)
        return out

    return attend


def flex(step: Step) -> Attend:
    """The block table as a block mask: whole blocks unmasked, the last one masked by length."""
    from torch.nn.attention.flex_attention import BlockMask

    batch, width = step.tables.shape
    num_blocks = step.pool.num_blocks + 1
    first, valid = step.tables[:, -1] * BLOCK, step.lengths - (width - 1) * BLOCK

    def is_valid(b: Any, _head: Any, _query: Any, key: Any) -> Any:
        return key - first[b] < valid[b]

    def index(blocks: torch.Tensor) -> torch.Tensor:
        padded = torch.zeros(batch, 1, 1, num_blocks, dtype=torch.int32)
        padded[:, 0, 0, : blocks.shape[1]] = blocks
        return padded

    mask = BlockMask.from_kv_blocks(
        torch.ones(batch, 1, 1, dtype=torch.int32),
        index(step.tables[:, -1:]),
        torch.full((batch, 1, 1), width - 1, dtype=torch.int32),
        index(step.tables[:, :-1]),
        BLOCK_SIZE=(1, BLOCK),
        mask_mod=is_valid,
        seq_lengths=(1, num_blocks * BLOCK),
    )
    key, value = (
        cache[0].flatten(0, 1).transpose(0, 1)[None].expand(batch, -1, -1, -1)
        for cache in (step.pool.keys, step.pool.values)
    )
    query = step.query[:, :, None]

    def attend() -> torch.Tensor:
        found: torch.Tensor = compiled_flex()(query, key, value, block_mask=mask, enable_gqa=True)
        return found[:, :, 0]

    return attend


_compiled: list[Any] = []


def compiled_flex() -> Any:
    """Made once: every size uses the same code."""
    if not _compiled:
        from torch.nn.attention.flex_attention import flex_attention

        _compiled.append(torch.compile(flex_attention, dynamic=True))
    return _compiled[0]


WAYS = {
    "kernel": kernel,
    "gather": gather,
    "padded": padded,
    "per sequence": per_sequence,
    "flex": flex,
}


def timed(attend: Attend) -> Stream:
    """Nanoseconds of a call."""
    while True:
        start = clock()
        with torch.inference_mode():
            attend()
        yield (clock() - start,)


def why_no_flex() -> str | None:
    """The reason why FlexAttention cannot be compiled here; None if it can."""
    try:
        with torch.inference_mode():
            flex(Step.of(2, 64))()
    except Exception as error:  # the compiler's errors have many types
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


def measure(sizes: tuple[tuple[int, int], ...], ways: list[str], effort: Effort) -> dict[str, Any]:
    """By size and way: microseconds of a call."""
    results: dict[str, Any] = {}
    for batch, context in sizes:
        print(f"{batch} x {context}", file=sys.stderr)
        step = Step.of(batch, context)
        calls = {way: WAYS[way](step) for way in ways}
        with torch.inference_mode():
            expected = padded(step)()
            for way, attend in calls.items():
                torch.testing.assert_close(attend(), expected, msg=f"{way} differs")
        streams = {way: timed(attend) for way, attend in calls.items()}
        rounds = interleave(streams, effort, lambda: None)
        spreads = {way: Spread.of([ns[0] / 1000 for ns in each]) for way, each in rounds.items()}
        results[f"{batch} x {context}"] = {
            way: {"median": item.median, "q1": item.q1, "q3": item.q3}
            for way, item in spreads.items()
        }
    return results


def table(results: dict[str, Any], ways: list[str]) -> Iterator[str]:
    """In markdown; times as much as the kernel in brackets."""
    yield "| batch x context, us per layer | " + " | ".join(ways) + " |"
    yield "|---|" + "---|" * len(ways)
    for size, found in results.items():
        ours = found["kernel"]["median"]
        cells = [f"{found[w]['median']:,.0f} ({found[w]['median'] / ours:.2f}x)" for w in ways]
        yield f"| {size} | " + " | ".join(cells) + " |"


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two sizes, few rounds")
    parser.add_argument("--no-flex", action="store_true", help="without compiling FlexAttention")
    parser.add_argument("--results", default="attention", help="name of the JSON file")
    options = parser.parse_args()
    torch.manual_seed(0)
    missing = "not asked for" if options.no_flex else why_no_flex()
    ways = [way for way in WAYS if way != "flex" or missing is None]
    effort = Effort(7, 2.0) if options.quick else Effort(21, 5.0)
    results = measure(QUICK if options.quick else SIZES, ways, effort)
    print("\n".join(table(results, ways)))
    if missing:
        print(f"\nflex: missing ({missing})")
    target = ROOT / "benches/results" / f"{options.results}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine(), "libraries": libraries(), "flex": missing, "us": results}
    target.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{target.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
