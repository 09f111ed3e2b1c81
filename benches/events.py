"""The cost of events: cold prompts of 8,192 tokens, arrays, in a full pool of 65,536 blocks of 16.

    python -m benches.events [ROUNDS]

Four managers take turns: without events, with events that are read apart, with events that are read
packed, and as objects, in the time. Prints medians in microseconds, and their ratios to the first.
"""

import sys
from itertools import count
from statistics import median
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt

from pyengine import BlockManager

TOKENS, BLOCKS, BLOCK, AT_ONCE = 8_192, 65_536, 16, 4
Prompt = npt.NDArray[np.int32]
NUMBERS = count()


def prompts() -> list[Prompt]:
    """Some that no other one begins like."""
    firsts = (next(NUMBERS) * TOKENS for _ in range(AT_ONCE))
    # An odd factor: different numbers stay different.
    known = (np.arange(first, first + TOKENS, dtype=np.uint64) for first in firsts)
    return [(each * np.uint64(2_654_435_761) % np.uint64(2**31)).astype(np.int32) for each in known]


def serve(manager: BlockManager, prompt: Prompt) -> None:
    """A request, from tokens to end, in one step."""
    sequence = manager.sequence(prompt)
    plan = manager.begin_step(TOKENS)
    plan.prefill(sequence, TOKENS, reserve=0)
    plan.commit([1])
    sequence.free()


def full(events: bool) -> BlockManager:
    """A manager without a free block, whose events were read."""
    manager = BlockManager(BLOCKS, BLOCK, events=events, hash_seed=1)
    while manager.usage().free:
        for prompt in prompts():
            serve(manager, prompt)
    manager.take_packed_events()
    return manager


def main(rounds: int) -> None:
    """Times and prints."""
    without, apart, packed, objects = map(full, (False, True, True, True))
    times: dict[str, list[int]] = {}

    def timed(name: str, start: int) -> None:
        times.setdefault(name, []).append(perf_counter_ns() - start)

    for _ in range(rounds):
        some = prompts()
        for prompt in some:
            start = perf_counter_ns()
            serve(without, prompt)
            timed("without events", start)
        for prompt in some:
            start = perf_counter_ns()
            serve(apart, prompt)
            timed("with events", start)
            start = perf_counter_ns()
            apart.take_packed_events()
            timed("to read them packed", start)
        for prompt in some:
            start = perf_counter_ns()
            serve(packed, prompt)
            packed.take_packed_events()
            timed("with events, read packed", start)
        for prompt in some:
            start = perf_counter_ns()
            serve(objects, prompt)
            taken = objects.take_events()
            timed("with events, read as objects", start)
            del taken
    first = median(times["without events"])
    for name, each in times.items():
        print(f"{name:30} {median(each) / 1_000:7.1f} us {median(each) / first:6.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 300)
