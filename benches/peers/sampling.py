"""Rounds that take turns, and what is made of their times.

A stream yields the nanoseconds of one operation, or of the parts of one, and prepares the next
outside of what it times. In each round every stream gives a burst of operations, one stream after
the other, beginning with another one each time. A round's value is the median of its burst; the
figure is the median of the rounds, its spread their quartiles, and a ratio of two streams is the
median of the ratios of the same rounds. So what slows the machine for a while slows both sides.

Python's cyclic garbage collector is off while anything is timed, for all alike; it runs between
rounds, with everything that was there before frozen. That favours managers made of Python objects:
a collection that walks them would otherwise fall into their time now and then.
"""

import gc
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter

Stream = Generator[tuple[float, ...], None, None]
Rounds = list[tuple[float, ...]]

BURST_SECONDS, FEWEST, MOST = 0.004, 5, 50
SLOW_SECONDS = 0.05
"""An operation slower than this is timed once per round."""
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Effort:
    """How many rounds, and how many seconds of them a stream may use once it has had three."""

    rounds: int
    seconds: float


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Of one value or more."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        q1, _, q3 = quantiles(values, method="inclusive")
        return cls(median(values), q1, q3)


def ratios(above: list[float], below: list[float]) -> Spread:
    """Of the rounds that both have."""
    return Spread.of([a / b for a, b in zip(above, below, strict=False)])


@contextmanager
def without_collector() -> Iterator[None]:
    """Exclude existing objects from the collector, and collect new ones only on request."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def burst_of(stream: Stream) -> int:
    """Warms a stream up and says how many of its operations make a burst."""
    began = perf_counter()
    took = sum(next(stream)) / 1e9
    while perf_counter() - began < BURST_SECONDS:
        took = sum(next(stream)) / 1e9
    if took > SLOW_SECONDS:
        return 1
    return min(max(round(BURST_SECONDS / max(took, 1e-9)), FEWEST), MOST)


def interleave(
    streams: Mapping[str, Stream], effort: Effort, progress: Callable[[], None]
) -> dict[str, Rounds]:
    """Each stream's rounds. The streams are closed after them: what they hold is freed."""
    rounds: dict[str, Rounds] = {name: [] for name in streams}
    spent = dict.fromkeys(streams, 0.0)
    with without_collector():
        bursts = {name: burst_of(stream) for name, stream in streams.items()}
        order = list(streams)
        for turn in range(effort.rounds):
            gc.collect()
            for name in order:
                if turn >= LEAST_ROUNDS and spent[name] > effort.seconds:
                    continue
                began = perf_counter()
                burst = [next(streams[name]) for _ in range(bursts[name])]
                spent[name] += perf_counter() - began
                rounds[name].append(tuple(median(part) for part in zip(*burst, strict=True)))
            order.append(order.pop(0))
            progress()
        for stream in streams.values():
            stream.close()
    return rounds
