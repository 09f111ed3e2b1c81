"""The cost of finding the shared prefixes of a step: `python -m benches.shared_prefixes`.

Decode steps of 256 and of 1,024 sequences on a pool with blocks of 16. All of them begin with the
same prompt; every sixteen, side by side nowhere in the batch, go on alike; the rest is each one's
own. Every step is filled twice, into two sets of arrays, without and with `shared`: the medians'
difference is what is paid. In "same" the batch never changes; in "changes" one sequence makes way
for another in each step.
"""

from statistics import median
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt

from pyengine.kv_cache import BlockManager, Sequence, SharedPrefixes, StepBuffers, StepPlan

BLOCK, TOGETHER, STEPS = 16, 16, 200
ROWS = (256, 1024)
LENGTHS = {"64 + 16 + 16": (1024, 256, 256), "512 + 64 + 16": (8192, 1024, 256)}  # blocks: tokens


class Batch:
    """Running sequences, of which the first `rows` are in a step."""

    def __init__(self, rows: int, lengths: tuple[int, int, int]) -> None:
        self.rows, self.rng = rows, np.random.default_rng(0)
        common, some, own = lengths
        blocks = (common + rows // TOGETHER * some + (rows + 1) * (own + STEPS)) // BLOCK + 4 * rows
        self.manager = BlockManager(2 * blocks, BLOCK)
        first = self.tokens(common)
        groups = [self.tokens(some) for _ in range(rows // TOGETHER)]
        self.running = [
            self.computed(np.concatenate([first, groups[row % len(groups)], self.tokens(own)]))
            for row in range(rows + 1)
        ]
        self.plain, self.asking = self.buffers(lengths), self.buffers(lengths)
        self.shared = SharedPrefixes(
            order=np.zeros(rows, np.int32),
            own_blocks=np.zeros(rows, np.int32),
            prefixes=np.zeros((rows, 5), np.int32),
        )

    def tokens(self, count: int) -> npt.NDArray[np.int64]:
        """Random ids: no two prompts share a block."""
        return self.rng.integers(0, 2**32, count)

    def computed(self, tokens: npt.NDArray[np.int64]) -> Sequence:
        """A sequence whose tokens are all computed, and one sampled."""
        sequence = self.manager.sequence(tokens)
        plan = self.manager.begin_step(len(tokens))
        plan.prefill(sequence, len(tokens))
        plan.commit([0])
        return sequence

    def buffers(self, lengths: tuple[int, int, int]) -> StepBuffers:
        """The step buffers of a model runner."""
        width = (sum(lengths) + STEPS) // BLOCK + 2
        sizes = {"query_start_loc": self.rows + 1, "block_tables": (self.rows, width)}
        flat = ("input_ids", "positions", "slot_mapping", "seq_lens", "logits_indices")
        sizes |= dict.fromkeys(flat, self.rows)
        return StepBuffers(**{name: np.zeros(size, np.int32 if name != "input_ids" else np.int64)
                              for name, size in sizes.items()})  # fmt: skip

    def step(self) -> tuple[float, float]:
        """Microseconds of a fill without and with sharing."""
        plan = self.manager.begin_step(self.rows)
        plan.decode(self.running[: self.rows])
        without = timed(plan, self.plain, None)
        asked = timed(plan, self.asking, self.shared)
        plan.commit(self.tokens(self.rows))
        return without, asked


def timed(plan: StepPlan, buffers: StepBuffers, shared: SharedPrefixes | None) -> float:
    """Microseconds of one fill."""
    start = perf_counter_ns()
    plan.fill(buffers, shared=shared)
    return (perf_counter_ns() - start) / 1_000


def main() -> None:
    """Prints a table in Markdown."""
    print("| rows | blocks: all + by 16 + own | batch | fill, µs | with sharing | difference |")
    print("|---:|---|---|---:|---:|---:|")
    for rows in ROWS:
        for name, lengths in LENGTHS.items():
            for changes in (False, True):
                batch, times = Batch(rows, lengths), []
                for at in range(STEPS):
                    if changes:
                        running, place = batch.running, at * 7 % rows
                        running[place], running[rows] = running[rows], running[place]
                    times.append(batch.step())
                # The first steps meet cold tables.
                plain, asked = (median(each) for each in zip(*times[10:], strict=True))
                assert batch.shared.num_prefixes == 1 + rows // TOGETHER
                assert (batch.shared.version == 1) is not changes
                kind = "changes" if changes else "same"
                figures = " | ".join(f"{each:.1f}" for each in (plain, asked, asked - plain))
                print(f"| {rows:,} | {name} | {kind} | {figures} |")


if __name__ == "__main__":
    main()
