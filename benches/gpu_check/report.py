"""The page that a person reads, from what the sections gave."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benches.gpu_check.goals import Goal, goals
from benches.gpu_check.harness import PartResult, SectionResult
from benches.gpu_check.rows import Row, Status

_CHECKED: tuple[Status, ...] = ("pass", "fail", "refused", "skip")


@dataclass(frozen=True)
class Report:
    """A whole run. `plot` is a file's name, or in words why there is none."""

    device: str
    date: str
    seconds: float
    sections: Sequence[SectionResult]
    plot: str

    @property
    def rows(self) -> list[Row]:
        """Of all sections."""
        return rows_of(self.sections)

    @property
    def goals(self) -> list[Goal]:
        """None on a CPU: its figures only show that the benchmark runs."""
        return goals(self.rows) if self.device.startswith("cuda") else []

    @property
    def has_failed(self) -> bool:
        """Whether any correctness check failed, or could not be made because its process died."""
        return any(_failures(section) for section in self.sections if section.section.is_check)

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "device": self.device,
            "date": self.date,
            "seconds": round(self.seconds, 1),
            "failed": self.has_failed,
            "goals": [asdict(goal) for goal in self.goals],
            "plot": self.plot,
            "sections": [
                {
                    "name": each.section.name,
                    "seconds": round(each.seconds, 1),
                    "error": each.error,
                    "parts": [asdict(part) for part in _parts(each)],
                }
                for each in self.sections
            ],
        }

    def as_markdown(self) -> str:
        """One page."""
        blocks = [self._title(), *_machine(self.rows), *_goals(self.goals)]
        blocks += [*_matrix(self), *_checks(self), *_figures(self.rows)]
        blocks += [f"Plot: {self.plot}", *_failed(self), *_not_run(self)]
        return "\n\n".join(blocks) + "\n"

    def _title(self) -> str:
        sections = [each for each in self.sections if each.section.is_check]
        count = Counter(
            row.status for each in sections for part in _parts(each) for row in part.rows
        )
        dead = sum(len(_dead(each)) + bool(each.error) for each in sections)
        words = ", ".join(f"{count[status]} {_WORDS[status]}" for status in _CHECKED)
        broken = f", {dead} broke off." if dead else "."
        others = [each for each in self.sections if not each.section.is_check]
        lost = sum(len(_dead(each)) + bool(each.error) for each in others)
        broken += f" Of the benchmark {lost} parts broke off." if lost else ""
        verdict = "FAILED" if self.has_failed else "passed"
        return (
            f"# GPU check on {self.device}: {verdict}\n\n"
            f"{self.date}, {self.seconds / 60:.1f} minutes. Checks: {words}{broken}"
        )


_WORDS = {
    "pass": "passed",
    "fail": "failed",
    "refused": "refused",
    "skip": "skipped",
}


def rows_of(sections: Sequence[SectionResult]) -> list[Row]:
    """All rows of these sections, in order."""
    return [row for section in sections for part in _parts(section) for row in part.rows]


def _parts(section: SectionResult) -> list[PartResult]:
    return list(section.parts.values())


def _dead(section: SectionResult) -> list[PartResult]:
    return [part for part in _parts(section) if part.state == "failed"]


def _failures(section: SectionResult) -> bool:
    rows = [row for part in _parts(section) for row in part.rows]
    return bool(section.error or _dead(section) or any(row.status == "fail" for row in rows))


def table(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """A table in markdown."""
    written = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in written)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return str("-" if value is None else value).replace("|", "\\|").replace("\n", " ")


_UNITS = {"bytes_per_second": "GB/s", "flops_per_second": "GFLOP/s"}


def _machine(rows: Sequence[Row]) -> Iterator[str]:
    lines: list[tuple[str, object]] = []
    for row in rows:
        if row.check == "machine":
            lines += [(name, value) for name, value in row.numbers.items()]
        elif row.check in ("copy bandwidth", "matmul"):
            ((name, value), *_) = row.numbers.items()
            lines.append((row.check, f"{value / 1e9:,.0f} {_UNITS[name]}"))
    if lines:
        yield "## Machine\n\n" + table(("", ""), lines)
    choices = [
        (
            row.check.removeprefix("choice for "),
            row.numbers["attention_backend"],
            row.numbers["attention_reason"],
            row.numbers.get("cuda_graphs", "-"),
        )
        for row in rows
        if row.check.startswith("choice for ")
    ]
    if choices:
        yield table(("model", "backend chosen", "because", "CUDA graphs"), choices)


def _goals(found: Sequence[Goal]) -> Iterator[str]:
    if not found:
        yield "Goals are for CUDA devices; figures of a CPU only show that the benchmark runs."
        return
    words = {True: "met", False: "not met", None: "-"}
    lines = [(goal.name, words[goal.met], goal.found) for goal in found]
    yield "## Goals\n\n" + table(("goal", "", "found"), lines)


_ORACLE = "float32, transformers"


def _matrix(report: Report) -> Iterator[str]:
    """Families and backends, the largest error and its bound; the oracle against transformers."""
    section = next((each for each in report.sections if each.section.name == "backends"), None)
    if section is None or not section.parts:
        return
    cells: dict[str, dict[str, str]] = {}
    reasons: dict[str, list[str]] = {}
    for part in _parts(section):
        family, _, backend = part.name.partition(": ")
        if not backend:
            continue
        backend = backend if backend != "oracle" else _ORACLE
        cells.setdefault(family, {})[backend] = _verdict(part)
        for row in part.rows:
            if row.status == "refused":
                reasons.setdefault(row.detail, []).append(family)
    names = list(dict.fromkeys(name for line in cells.values() for name in line))
    lines = [[family, *(line.get(name) for name in names)] for family, line in cells.items()]
    yield (
        "## Backends against the oracle\n\n"
        "Largest difference of log-probabilities, and its bound: of the gather backend in float32 "
        "from transformers' own forward pass; of each backend from the gather backend in "
        "bfloat16, where rounding sets the bound.\n\n" + table(("family", *names), lines)
    )
    if reasons:
        named = {why: _all_or(of, list(cells)) for why, of in reasons.items()}
        yield "\n".join(f"- refused ({of}): {why}" for why, of in named.items())


def _all_or(some: Sequence[str], everything: Sequence[str]) -> str:
    return "all families" if len(some) == len(everything) > 1 else ", ".join(some)


def _verdict(part: PartResult) -> str:
    if part.state == "failed":
        return "BROKE OFF"
    if not part.rows:
        return "not run"
    row = part.rows[0]
    if row.status not in ("pass", "fail") or "error" not in row.numbers:
        return "FAIL" if row.status == "fail" else row.status
    word = "FAIL " if row.status == "fail" else ""
    dtype = " in float32" if row.numbers.get("dtype") == "float32" else ""
    return f"{word}{_cell(row.numbers['error'])} of {_cell(row.numbers['bound'])}{dtype}"


def _checks(report: Report) -> Iterator[str]:
    """Every check that is not in the matrix, but those that a backend refused."""
    rows = [
        row
        for each in report.sections
        if each.section.is_check
        for part in _parts(each)
        for row in part.rows
        if "family" not in row.numbers and row.status not in ("refused", "info")
    ]
    if not rows:
        return
    skipped = Counter(row.detail for row in rows if row.status == "skip")
    lines: list[tuple[str, ...]] = [
        (row.check, row.status if row.status != "fail" else "FAIL", ", ".join(_pairs(row)))
        for row in rows
        if row.status != "skip"
    ]
    lines += [(f"{count} skipped", "skip", why) for why, count in skipped.items()]
    yield "## Checks\n\n" + table(("check", "", "numbers"), lines)


def _pairs(row: Row) -> list[str]:
    hidden = ("family", "backend")
    shown = [(name, value) for name, value in row.numbers.items() if name not in hidden]
    return [f"{name.replace('_', ' ')} {_cell(value)}" for name, value in shown]


_TABLES = {  # rows that begin so: the columns
    "decode ": (
        *("shape", "batch", "context", "step_ms", "tokens_per_second"),
        *("roofline_tokens_per_second", "roofline_share", "backend", "cuda_graphs"),
    ),
    "prefill ": ("shape", "prompts", "length", "tokens_per_second", "matmul_share"),
    "continuous batching": ("engine", "shape", "work", "tokens_per_second", "attention"),
    "shared prefix": ("shape", "work", "shares", "seconds", "computed_tokens"),
    "duplicates": ("shape", "work", "one_ms", "all_ms", "ratio"),
    "host work": (
        *("work", "overlap", "step_us", "host_us", "schedule_us", "fill_us", "launch_us"),
        *("wait_us", "commit_us", "outputs_us", "host_share"),
    ),
}


def _figures(rows: Sequence[Row]) -> Iterator[str]:
    title = "## Figures\n\n"
    for start, columns in _TABLES.items():
        of = [row for row in rows if row.check.startswith(start)]
        lines = [[row.numbers.get(name) for name in columns] for row in of if row.numbers]
        if lines:
            yield title + table([name.replace("_", " ") for name in columns], lines)
            title = ""
        for row in of:
            if row.status == "skip":
                yield f"- {row.check}: {row.detail}"


def _failed(report: Report) -> Iterator[str]:
    """Failed checks in words, and the last lines of what broke off."""
    blocks = []
    for each in report.sections:
        if each.error:
            blocks.append(f"**{each.section.name}**\n\n```\n{each.error}\n```")
        for part in _parts(each):
            failed = [row for row in part.rows if row.status == "fail"]
            blocks += [f"**{each.section.name}: {row.check}**\n\n{row.detail}" for row in failed]
            if part.state == "failed":
                blocks.append(f"**{each.section.name}: {part.name}**\n\n```\n{part.error}\n```")
    if blocks:
        yield "\n\n".join(["## What failed", *blocks])


def _not_run(report: Report) -> Iterator[str]:
    lines = []
    for each in report.sections:
        if each.is_open and not each.parts:
            lines.append(f"- {each.section.name}: all of it, out of time")
        names = [part.name for part in _parts(each) if part.state == "open"]
        if names:
            lines.append(f"- {each.section.name}: {', '.join(names)}: out of time")
    if lines:
        yield "\n".join(["## Not run", "", *lines])
