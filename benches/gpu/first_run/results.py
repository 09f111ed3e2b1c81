"""The files of a run: every figure at once, and pages made of them."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
_TABLE_ROWS = 14


def append(path: Path, line: str) -> None:
    """Append a line to a file that other processes append to; it is on the disk afterwards."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, f"{line}\n".encode())
        os.fsync(file)
    finally:
        os.close(file)


def read(path: Path) -> list[Figures]:
    """The lines of results.jsonl; empty if there is none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def is_wrong(figures: Figures) -> bool:
    """True for an error, or a check that failed."""
    return "failed" in figures or figures.get("ok") is False or bool(figures.get("wrong"))


@dataclass(frozen=True)
class Goal:
    """A figure that a run should reach: at least, or at most, `bound`."""

    name: str
    where: Figures
    figure: str
    bound: float
    is_floor: bool = True

    def value(self, lines: Sequence[Figures]) -> float | None:
        """The last such figure of a run, if any."""
        matching = [
            line[self.figure]
            for line in lines
            if line.get(self.figure) is not None
            and all(line.get(key) == value for key, value in self.where.items())
        ]
        return matching[-1] if matching else None


_LARGE = {"shape": "Llama-3.1-8B", "compiled": True}
GOALS = (
    Goal(
        "8B, decode of 256: share of the bandwidth roofline",
        {**_LARGE, "work": "decode", "batch": 256},
        "roofline_share",
        0.7,
    ),
    Goal(
        "8B, decode of 256: step / graph replay alone",
        {**_LARGE, "work": "decode", "batch": 256},
        "step_over_graph",
        1.1,
        is_floor=False,
    ),
    Goal(
        "8B, prefill: share of the throughput of a matrix product",
        {**_LARGE, "work": "prefill"},
        "matmul_share",
        0.6,
    ),
    Goal(
        "8B, 32 equal prompts / one prompt, first token",
        {**_LARGE, "work": "equal prompts"},
        "ratio",
        1.1,
        is_floor=False,
    ),
    Goal(
        "8B, top-p 0.9: milliseconds more than a greedy step of 256",
        {**_LARGE, "work": "sampling", "kind": "top-p 0.9"},
        "more_ms",
        0.5,
        is_floor=False,
    ),
    Goal(
        "0.6B: throughput / transformers' continuous batching",
        {"work": "batching", "engine": "ratio"},
        "ratio",
        1.5,
    ),
    Goal(
        "0.6B: share of the host time that overlap hides",
        {"work": "overlap"},
        "hidden_share",
        0.8,
    ),
)


def page(lines: Sequence[Figures], device: str) -> Iterator[str]:
    """Lines of found.md: goals, then every figure."""
    if device == "cpu":
        yield "A run on a CPU shows that everything runs. Its figures mean nothing.\n"
    else:
        yield "| goal | value | |\n|---|---:|---|"
        for goal in GOALS:
            value = goal.value(lines)
            bound = f"{'>=' if goal.is_floor else '<='} {goal.bound:g}"
            if value is None:
                yield f"| {goal.name} {bound} | not measured | |"
                continue
            is_met = value >= goal.bound if goal.is_floor else value <= goal.bound
            yield f"| {goal.name} {bound} | {value:.3g} | {'met' if is_met else 'not met'} |"
        yield ""
    for line in lines:
        words = (
            f"{key} {shown(value)}" for key, value in line.items() if key not in {"part", "table"}
        )
        mark = "**WRONG** " if is_wrong(line) else ""
        yield f"- {mark}{line['part']}: {', '.join(words)}"
        for row in line.get("table", [])[:_TABLE_ROWS]:
            yield f"    {row[2]:>9} us  {row[1]:>6}x  {row[0]}"


def shown(value: object) -> str:
    """A number with three digits, or the value's words."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
