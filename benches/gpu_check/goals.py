"""What the figures are meant to reach, and whether they do. Plain arithmetic over rows."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benches.gpu_check.rows import Row

OURS, THEIRS = "pyengine", "transformers"
DUPLICATES = "duplicates in one step"

ROOFLINE_SHARE, ROOFLINE_BATCH = 0.7, 256
RATIO_TO_TRANSFORMERS = 1.5
HIDDEN_SHARE = 0.8
DUPLICATES_RATIO = 1.1


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted and what was found. `met` is None where nothing was measured."""

    name: str
    met: bool | None
    found: str


def goals(rows: Sequence[Row]) -> list[Goal]:
    """All goals, against the rows of a run."""
    judges: tuple[tuple[str, Callable[[Sequence[Row]], tuple[bool, str] | None]], ...] = (
        (f"decode at batch {ROOFLINE_BATCH}: >= {ROOFLINE_SHARE:.0%} of the roofline", _roofline),
        (f">= {RATIO_TO_TRANSFORMERS} x transformers' continuous batching", _transformers),
        (f"host work of a step hidden: >= {HIDDEN_SHARE:.0%} of it", _hidden),
        (f"duplicates in a step cost nothing: <= {DUPLICATES_RATIO} x one prompt", _duplicates),
    )
    found = []
    for name, judge in judges:
        verdict = judge(rows)
        met, words = verdict if verdict is not None else (None, "not measured")
        found.append(Goal(name, met, words))
    return found


def _numbers(rows: Iterable[Row], start: str) -> list[dict[str, Any]]:
    return [dict(row.numbers) for row in rows if row.check.startswith(start) and row.numbers]


def _roofline(rows: Sequence[Row]) -> tuple[bool, str] | None:
    shares = {
        f"{one['shape']} at {one['context']}": one["roofline_share"]
        for one in _numbers(rows, "decode ")
        if one["batch"] == ROOFLINE_BATCH
    }
    if not shares:
        return None
    words = ", ".join(f"{name}: {share:.0%}" for name, share in shares.items())
    return min(shares.values()) >= ROOFLINE_SHARE, words


def _transformers(rows: Sequence[Row]) -> tuple[bool, str] | None:
    rates = {one["engine"]: one for one in _numbers(rows, "continuous batching, ")}
    if not {OURS, THEIRS} <= set(rates):
        return None
    ratio = rates[OURS]["tokens_per_second"] / rates[THEIRS]["tokens_per_second"]
    attention = f"{rates[OURS]['attention']} against {rates[THEIRS]['attention']}"
    return ratio >= RATIO_TO_TRANSFORMERS, f"{ratio:.2f} x ({attention})"


def _hidden(rows: Sequence[Row]) -> tuple[bool, str] | None:
    by_overlap = {one["overlap"]: one for one in _numbers(rows, "host work, ")}
    if set(by_overlap) != {True, False}:
        return None
    hidden = hidden_share(
        by_overlap[False]["step_us"], by_overlap[False]["host_us"], by_overlap[True]["step_us"]
    )
    words = (
        f"{hidden:.0%} of {by_overlap[False]['host_us']:.0f} us; a step takes "
        f"{by_overlap[False]['step_us']:.0f} us without overlap and "
        f"{by_overlap[True]['step_us']:.0f} us with it"
    )
    return hidden >= HIDDEN_SHARE, words


def hidden_share(step_alone: float, host: float, step_overlapped: float) -> float:
    """The part of the host's work that overlap takes out of a step; times in any one unit.

    Without overlap a step is the host's work and then the device's. Negative if overlap costs time.
    """
    return (step_alone - step_overlapped) / host


def _duplicates(rows: Sequence[Row]) -> tuple[bool, str] | None:
    found = _numbers(rows, DUPLICATES)
    if not found:
        return None
    ratio = found[0]["ratio"]
    return ratio <= DUPLICATES_RATIO, f"{ratio:.2f} x ({found[0]['work']})"
