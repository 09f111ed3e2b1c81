"""The first hour on a GPU: three parts of at most ten minutes each, every one with a report.

    python3 -m benches.gpu.parts runs|right|fast --device cuda --out FOLDER [--minutes 9]

from a checkout in which `pyengine/` holds the built extension; torch, transformers, numpy and
pytest are there, flashinfer's wheels if they are. Steps run one after the other, each in a separate
process that is ended when its time is up. FOLDER/PART.md has a line for each step as soon as it is
over, so an interrupted run keeps all earlier lines, and SIGTERM adds the current one. Steps that
did not begin in time are named. With `--device cpu` everything is small, to see that it runs.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import FrameType

from benches.gpu.child import Child
from benches.gpu.steps import Found, NotHere, Step, Target

PARTS = {"runs": "Does it run?", "right": "Is it right?", "fast": "How fast is it?"}


class Report:
    """A file that is whole after every line."""

    def __init__(self, path: Path, title: str) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._begun = monotonic()
        self.now = "the start"
        """The step that runs."""
        self.failed = 0
        self._write(f"# {title}\n")

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return monotonic() - self._begun

    def add(self, name: str, outcome: str, found: Found) -> None:
        """A step that is over."""
        self.failed += outcome == "failed"
        words = {key: value for key, value in found.items() if "\n" not in str(value)}
        blocks = [str(value) for key, value in found.items() if key not in words]
        said = ", ".join(f"{key} {_shown(value)}" for key, value in words.items())
        self._write(f"- {self.seconds:4.0f} s  {outcome}  {name}{': ' if said else ''}{said}")
        for block in blocks:
            self._write(f"\n{block.strip()}\n")

    def end(self, why: str) -> None:
        """The last line."""
        self._write(f"\n{why} after {self.seconds:.0f} s; {self.failed} failed.")
        self._file.close()

    def _write(self, line: str) -> None:
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def take(step: Step, target: Target, child: Child) -> tuple[str, Found]:
    """A step's outcome, and what is to be written down of it."""
    begun = monotonic()
    try:
        here = replace(target, seconds=step.seconds)
        found = child.run(step.call, here, *step.arguments, seconds=step.seconds)
    except NotHere as why:
        return "not here", {"because": str(why)}
    except Exception as error:  # whatever it is, the next step is tried
        cause = f"\n{error.__cause__}" if error.__cause__ is not None else ""
        return "failed", {"error": f"```\n{type(error).__name__}: {error}{cause}\n```"}
    return "done", {**found, "took": f"{monotonic() - begun:.1f} s"}


def run(steps: Sequence[Step], target: Target, report: Report, minutes: float) -> None:
    """One step after the other, until it is late."""
    left = list(steps)
    while left:
        now = [left.pop(0)]
        while left and now[0].beside and left[0].beside == now[0].beside:
            now.append(left.pop(0))
        report.now = " and ".join(step.name for step in now)
        remaining = 60 * minutes - report.seconds
        if remaining < 5:
            report.add(report.now, "not run", {"because": "out of time"})
            continue
        for step, (outcome, found) in zip(now, _taken(now, target, remaining), strict=True):
            report.add(step.name, outcome, found)


def _taken(steps: Sequence[Step], target: Target, remaining: float) -> list[tuple[str, Found]]:
    children = [Child() for _ in steps]
    with ThreadPoolExecutor(len(steps)) as threads:
        works = [
            threads.submit(take, replace(step, seconds=min(step.seconds, remaining)), target, child)
            for step, child in zip(steps, children, strict=True)
        ]
        try:
            return [work.result() for work in works]
        finally:  # before the threads are waited for: who is cut off waits for no step
            for child in children:
                child.end()


class CutOff(BaseException):
    """Somebody ends this from outside."""


def _cut_off(_number: int, _frame: FrameType | None) -> None:
    raise CutOff


def main(arguments: list[str] | None = None) -> int:
    """Run a part; 1 if a step failed."""
    parser = argparse.ArgumentParser(prog="python -m benches.gpu.parts", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu: small, to see it run")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder for reports")
    parser.add_argument("--minutes", type=float, default=9, help="nothing runs after that (9)")
    parser.add_argument("--only", default="", help="steps whose name holds this")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(options.out.resolve() / "built"))
    signal.signal(signal.SIGTERM, _cut_off)
    steps = importlib.import_module(f"benches.gpu.part_{options.part}").STEPS
    report = Report(options.out / f"{options.part}.md", f"{PARTS[options.part]} {options.device}")
    target = Target(options.device, str(options.out.resolve()))
    asked = [step for step in steps if options.only in step.name]
    try:
        run(asked, target, report, options.minutes)
    except (CutOff, KeyboardInterrupt):
        report.add(report.now, "failed", {"because": "cut off"})
        report.end("Cut off")
        return 1
    report.end("Through")
    return int(report.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
