"""Whether a task that reads slowly delays the others: the times between their tokens.

    .venv/bin/python -m benches.engine.slow_reader [--model FOLDER] [--tokens 64] [--rounds 3]

The real `AsyncEngine` with the embedded model. Each reader is a task on one event loop that streams
an answer token by token; the slow one sleeps for a second after each item. Rows with it and without
it take turns, round by round. Times are the others', between one item and the next, in
milliseconds of the clock, so a busy machine shows in all of them.
"""

import argparse
import asyncio
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from pyengine import AsyncEngine, SamplingParams
from pyengine.sampling_params import RequestOutputKind

SIZES = (8, 64)
PAUSE = 1.0


@dataclass
class Row:
    """`readers` tasks, the first of which may be slow."""

    readers: int
    is_one_slow: bool
    gaps: list[float] = field(default_factory=list)
    """Seconds between items, of all but the first reader."""
    items: list[int] = field(default_factory=list)
    """How many items the first reader got, in each round."""

    def __str__(self) -> str:
        times = np.array(self.gaps) * 1000
        p50, p99 = np.percentile(times, [50, 99])
        slow = f"{PAUSE:.0f} s per item" if self.is_one_slow else "none"
        return (
            f"| {self.readers} | {slow} | {p50:.1f} | {p99:.1f} | {times.max():.1f} "
            f"| {np.mean(self.items):.1f} |"
        )


async def read(engine: AsyncEngine, number: int, tokens: int, pause: float) -> list[float]:
    """The times at which items came; the reader sleeps for `pause` seconds after each."""
    params = SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=tokens, output_kind=RequestOutputKind.DELTA
    )
    times, count = [], 0
    async for item in engine.generate(f"Story number {number} begins like this:", params):
        times.append(perf_counter())
        count += len(item.outputs[0].token_ids)
        if pause:
            await asyncio.sleep(pause)
    assert count == tokens
    return times


async def run(engine: AsyncEngine, row: Row, tokens: int) -> None:
    """One round of a row."""
    pause = PAUSE if row.is_one_slow else 0.0
    slow, *others = await asyncio.gather(
        *(read(engine, at, tokens, 0.0 if at else pause) for at in range(row.readers))
    )
    row.items.append(len(slow))
    for times in others:
        row.gaps += np.diff(times).tolist()


async def compare(engine: AsyncEngine, rows: list[Row], tokens: int, rounds: int) -> None:
    """All rows in turn, once before anything is counted."""
    for row in rows:
        await run(engine, Row(row.readers, is_one_slow=False), 4)
    for _ in range(rounds):
        for row in rows:
            await run(engine, row, tokens)


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--model", default=None)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--rounds", type=int, default=3)
    asked = options.parse_args()
    rows = [Row(size, is_one_slow) for size in SIZES for is_one_slow in (False, True)]
    with AsyncEngine(asked.model) as engine:
        asyncio.run(compare(engine, rows, asked.tokens, asked.rounds))
    print("| readers | slow one | p50, ms | p99, ms | longest, ms | items of the first |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
