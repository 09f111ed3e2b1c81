"""The one line of figures that closes an answer."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from pyengine.cli.backend import Engine
from pyengine.core.outputs import RequestOutput


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one run cost: tokens, wall seconds, blocks taken, shared in a step, merged after it."""

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    seconds: float
    blocks_used: int
    in_flight_blocks: int
    merged_blocks: int

    def __str__(self) -> str:
        """The closing line."""
        rate = self.new_tokens / self.seconds if self.seconds > 0 else 0.0
        parts = (
            f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached)",
            f"{self.new_tokens} new tokens",
            f"{rate:.1f} tok/s",
            f"{self.blocks_used} blocks used",
            f"{self.in_flight_blocks} shared in flight",
            f"{self.merged_blocks} merged",
        )
        return " · ".join(parts)


@dataclass(frozen=True)
class Meter:
    """Counters and clock as they were before a run."""

    engine: Engine
    counters: Mapping[str, int]
    started: float

    @classmethod
    def start(cls, engine: Engine) -> Self:
        """Read the engine's counters and the clock."""
        return cls(engine, dict(engine.stats().counters), time.perf_counter())

    def read(self, outputs: Iterable[RequestOutput]) -> Figures:
        """What the run that gave these outputs (finished or cut short) cost since the start.

        `tok/s` is new tokens over the wall time since the start, prefill included.
        """
        seconds = time.perf_counter() - self.started
        now = self.engine.stats().counters
        results = list(outputs)
        return Figures(
            prompt_tokens=sum(len(result.prompt_token_ids) for result in results),
            cached_tokens=sum(result.num_cached_tokens for result in results),
            new_tokens=sum(len(out.token_ids) for result in results for out in result.outputs),
            seconds=seconds,
            blocks_used=now["allocated_blocks"] - self.counters["allocated_blocks"],
            in_flight_blocks=now["in_flight_blocks"] - self.counters["in_flight_blocks"],
            merged_blocks=now["merged_blocks"] - self.counters["merged_blocks"],
        )
