"""Refused requests and usage per key: counted for `/metrics`, logged."""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from time import monotonic
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pyengine.server.callers import Caller
from pyengine.server.histograms import family
from pyengine.server.request_log import LineLog
from pyengine.server.settings import LogFormat

_LINES_AT_ONCE = 5
"""Burst size of the log lines for refusals of one status."""
_SECONDS_PER_LINE = 1.0
"""Interval of further lines of that status."""

_log = logging.getLogger("pyengine.refusal")


@dataclass(slots=True)
class KeyCounts:
    """Usage of one key. Each field is a metric, `pyengine:key_...`."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    refusals: int = 0


_HELP = {
    "requests": "Completions and chats that were queued.",
    "prompt_tokens": "Prompt tokens of requests whose answer has begun.",
    "cached_tokens": "Of these, cached tokens as reported in the usage.",
    "generation_tokens": "Tokens of the answers.",
    "refusals": "Responses with a status of 400 or more.",
}


class _Rate:
    """A rate limit: a burst of a few lines, then one a second."""

    def __init__(self) -> None:
        self._credit = float(_LINES_AT_ONCE)
        self._last = monotonic()
        self.num_left_out = 0

    def allows(self) -> bool:
        now = monotonic()
        earned = (now - self._last) / _SECONDS_PER_LINE
        self._last, self._credit = now, min(_LINES_AT_ONCE, self._credit + earned)
        if self._credit < 1:
            self.num_left_out += 1
            return False
        self._credit -= 1
        return True


class Traffic:
    """Counts usage and refusals on the event loop. Logs refusals between `open` and `close`."""

    def __init__(self) -> None:
        self.keys: defaultdict[str, KeyCounts] = defaultdict(KeyCounts)
        self.num_connections = 0
        self.num_refused_connections = 0
        self._refusals: Counter[tuple[int, str]] = Counter()
        self._rates: defaultdict[int, _Rate] = defaultdict(_Rate)
        self._lines: LineLog | None = None

    def open(self, format: LogFormat) -> None:
        """Start to log refusals, unless the format is "none"."""
        if format != "none":
            self._lines = LineLog(_log.name, format)

    def close(self) -> None:
        """Flush the log."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def refuse(self, status: int, code: str | None, **about: Any) -> None:
        """Count a response of status 400 or more, and log it within the rate limit."""
        self._refusals[status, code or ""] += 1
        rate = self._rates[status]
        if self._lines is not None and rate.allows():
            left_out, rate.num_left_out = rate.num_left_out or None, 0
            self._lines.put({"refused": status, "code": code, **about, "left_out": left_out})

    def collect(self, model_name: str, caller: Caller) -> Iterator[Metric]:
        """Metrics of all keys for an admin, of the own key for a client."""
        if caller.is_admin:
            yield from self._of_all(model_name)
        names = list(self.keys) if caller.is_admin else [caller.name]
        for counter in fields(KeyCounts):
            samples = [
                ({"model_name": model_name, "key": name}, getattr(self.keys[name], counter.name))
                for name in names
            ]
            name, help = f"pyengine:key_{counter.name}", _HELP[counter.name]
            yield family(CounterMetricFamily, name, help, samples)

    def _of_all(self, model_name: str) -> Iterator[Metric]:
        own = {"model_name": model_name}
        refusals = [
            ({**own, "status": f"{status}", "code": code}, count)
            for (status, code), count in self._refusals.items()
        ]
        open_now, refused = [(own, self.num_connections)], [(own, self.num_refused_connections)]
        above = "Connections refused above the limit."
        yield family(CounterMetricFamily, "pyengine:http_refusals", _HELP["refusals"], refusals)
        yield family(GaugeMetricFamily, "pyengine:http_connections", "Open connections.", open_now)
        yield family(CounterMetricFamily, "pyengine:http_refused_connections", above, refused)
