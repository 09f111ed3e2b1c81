"""Families of metrics; histograms: buckets as vLLM has them, and times between tokens."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from pyengine.request.request import SequenceState

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
)
PER_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960),
    *(1920, 7680),
)
STEP_TOKEN_BUCKETS = (1, *(8 << doubling for doubling in range(12)))
SEQUENCE_BUCKETS = (1, 2, 5, 10, 20)


def one_two_five(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    steps = (digit * 10**power for power in range(len(str(limit))) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= limit)


Sample: TypeAlias = tuple[Mapping[str, str], float]
"""A value with its labels."""


def family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    help: str,
    samples: Sequence[Sample],
) -> Metric:
    """A family of metrics in prometheus-client's form; all samples have the same labels."""
    metric = kind(name, help, labels=list(samples[0][0]) if samples else ())
    for labels, value in samples:
        metric.add_metric(list(labels.values()), value)
    return metric


class Histogram:
    """Counts in buckets. Unlike prometheus-client's, it adds several equal values at once."""

    __slots__ = ("bounds", "counts", "help", "name", "total")

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help = name, help
        self.bounds = [float(bound) for bound in bounds]
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Add a value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def family(self, labels: dict[str, str]) -> HistogramMetricFamily:
        """The histogram in prometheus-client's form."""
        family = HistogramMetricFamily(self.name, self.help, labels=list(labels))
        counts, total = list(self.counts), self.total
        sums = [sum(counts[: at + 1]) for at in range(len(counts))]
        names = [*map(floatToGoString, self.bounds), "+Inf"]
        family.add_metric(list(labels.values()), list(zip(names, sums, strict=True)), total)
        return family


class TokenGaps:
    """Measures the time between two tokens of a sequence, for a whole step at once.

    While the same sequences decode, it equals the time between two steps.
    """

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._rows: Sequence[SequenceState] = ()
        self._last = 0.0
        self._live: set[SequenceState] = set()
        self._since: dict[SequenceState, float] = {}
        """Time of the last token of each sequence that the last step left out."""
        self._gone: set[SequenceState] = set()
        """Sequences that have finished. A step in flight may still include them."""

    def stop(self, samples: Iterable[SequenceState]) -> None:
        """Ignore these sequences from now on, also in a step in flight."""
        for sample in samples:
            self._gone.add(sample)
            self._since.pop(sample, None)

    def step(
        self, rows: Sequence[SequenceState], ended: Sequence[SequenceState], now: float
    ) -> int:
        """Record a step and return how many sequences got a token."""
        if not rows:
            return 0
        if rows is self._rows and not self._gone:
            live = self._live
            self._histogram.add(now - self._last, len(live))
        else:
            live = set(rows)
            live -= self._gone
            self._gone.clear()
            continuing = live & self._live
            if continuing:
                self._histogram.add(now - self._last, len(continuing))
            self._change(live, now)
        self._rows, self._live, self._last = rows, live, now
        self._gone.update(ended)
        return len(live)

    def _change(self, live: set[SequenceState], now: float) -> None:
        for sample in live - self._live:
            last = self._since.pop(sample, None)
            if last is not None:
                self._histogram.add(now - last)
        for sample in self._live - live:
            if sample.output.finish_reason is None:
                self._since[sample] = self._last
