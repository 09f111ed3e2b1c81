"""Goals, and whether a run reaches them: ratios of figures measured alternately."""

from dataclasses import dataclass
from typing import Any

from benches.peers.sampling import Spread, ratios

OURS, LIST = "pyengine", "pyengine, list"
VLLM, SGLANG, NANO = "vLLM sha256", "SGLang Rust core", "nano-vllm"


@dataclass(frozen=True)
class Goal:
    """At least so many times faster than a peer; block 16, 65,536 blocks, steady state."""

    text: str
    work: str
    ours: str
    peer: str
    least: float
    part: str = "us"


@dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    text: str
    against: str
    goal: str
    measured: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """In words."""
        return {True: "met", False: "NOT MET", None: "not measured"}[self.met]


SPEED = (
    Goal("cold prefill 8,192, array", "cold-8192", OURS, VLLM, 100),
    Goal("cold prefill 8,192, array", "cold-8192", OURS, SGLANG, 1.2),
    Goal("hot prefill 8,192, array", "hot-8192", OURS, VLLM, 250),
    Goal("hot prefill 8,192, array", "hot-8192", OURS, SGLANG, 1.2),
    Goal("cold prefill 8,192, list", "cold-8192", LIST, VLLM, 20),
    Goal("cold prefill 8,192, list", "cold-8192", LIST, NANO, 10),
    Goal("hot prefill 8,192, list", "hot-8192", LIST, VLLM, 20),
    Goal("hot prefill 8,192, list", "hot-8192", LIST, NANO, 3_000),
    Goal("decode step, 256 sequences", "decode-256", OURS, VLLM, 200, "step"),
    Goal("decode step, 256 sequences", "decode-256", OURS, NANO, 25, "step"),
    Goal("inputs of that step", "fill-256", OURS, NANO, 300),
    Goal("agents, requests of 90,000, 96 % cached", "agents-90000", OURS, VLLM, 100),
)
GROWTH = (
    ("scale-hot", "hot prefill 8,192, one prompt again", 2.0),
    ("scale-hot-any", "hot prefill 8,192, any prompt of the pool", 2.0),
    ("scale-cold", "cold prefill 8,192", 1.7),
)
GROWS_FROM, GROWS_TO = 10_000, 10_000_000
MOST_BYTES = 110
"""Of host memory for a block in use, its tokens included."""


def rounds(works: dict[str, Any], work: str, manager: str, part: str) -> list[float] | None:
    """The rounds of one figure, if it was measured."""
    figure = works.get(work, {}).get(manager, {}).get(part)
    return None if figure is None else figure["rounds"]


def speed(goal: Goal, works: dict[str, Any]) -> Outcome:
    """A ratio to a peer."""
    ours = rounds(works, goal.work, goal.ours, goal.part)
    peer = rounds(works, goal.work, goal.peer, goal.part)
    wanted = f">= {goal.least:,g}x"
    if ours is None or peer is None:
        return Outcome(goal.text, goal.peer, wanted, "", None)
    spread = ratios(peer, ours)
    return Outcome(goal.text, goal.peer, wanted, times(spread), spread.median >= goal.least)


def growth(work: str, name: str, bound: float, works: dict[str, Any]) -> Outcome:
    """The dearest pool against the cheapest, of those between 10^4 and 10^7 blocks."""
    text = f"{name}; 10^4 to 10^7 blocks"
    wanted = f"<= {bound:g}x"
    figures = {
        int(column.partition(" @ ")[2]): parts["us"]["rounds"]
        for column, parts in works.get(work, {}).items()
        if column.startswith(f"{OURS} @ ")
    }
    figures = {size: turns for size, turns in figures.items() if size >= GROWS_FROM}
    if GROWS_TO not in figures or GROWS_FROM not in figures:
        return Outcome(text, "itself", wanted, "", None)
    by_cost = sorted(figures.values(), key=lambda turns: Spread.of(turns).median)
    spread = ratios(by_cost[-1], by_cost[0])
    return Outcome(text, "itself", wanted, times(spread), spread.median <= bound)


def memory(measured: dict[str, float]) -> Outcome:
    """A pool that is all in use."""
    text, wanted = "bytes per block in use", f"<= {MOST_BYTES}"
    size = measured.get("bytes_per_block")
    if size is None:
        return Outcome(text, "itself", wanted, "", None)
    return Outcome(text, "itself", wanted, f"{size:.0f}", size <= MOST_BYTES)


def times(spread: Spread) -> str:
    """A ratio and its quartiles."""
    numbers = (spread.median, spread.q1, spread.q3)
    middle, low, high = (f"{n:,.0f}" if n >= 20 else f"{n:.2g}" for n in numbers)
    return f"{middle}x ({low} to {high})"


def outcomes(works: dict[str, Any], measured: dict[str, float]) -> list[Outcome]:
    """Every goal."""
    return [
        *(speed(goal, works) for goal in SPEED),
        *(growth(*row, works) for row in GROWTH),
        memory(measured),
    ]
