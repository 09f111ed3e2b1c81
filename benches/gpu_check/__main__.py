"""Proves or breaks the GPU path on this machine, in one command and nine minutes.

    python -m benches.gpu_check --device cuda --out FOLDER

from the root of the repository. It needs the built package, torch, transformers and numpy; random
weights are made here. `report.json`, `report.md` and a plot go to FOLDER, progress to standard
error. The exit status is 1 if a correctness check failed. docs/gpu.md says what is checked.
"""

import argparse
import datetime
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from benches.gpu_check.harness import Run, Section, SectionResult
from benches.gpu_check.plot import FILE, draw
from benches.gpu_check.report import Report, rows_of
from benches.gpu_check.rows import Setup
from benches.gpu_check.sections import CHECKS, benchmarks


def main(arguments: list[str] | None = None) -> int:
    """Run, write, say what came of it."""
    options = _options(arguments)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
    begun = monotonic()

    def report(results: Sequence[SectionResult]) -> Report:
        missing = draw(rows_of(results), out)
        return Report(
            device=options.device,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            seconds=monotonic() - begun,
            sections=results,
            plot=f"none: {missing}" if missing else FILE,
        )

    def keep(results: Sequence[SectionResult]) -> None:
        """Write what there is so far: whoever ends this early still has it."""
        _write(report(results), out)

    with TemporaryDirectory(prefix="gpu-check-") as folder:
        results = run(_sections(options), _setup(options, folder), 60 * options.minutes, keep)
    found = report(results)
    print(f"{out / 'report.md'}: {'FAILED' if found.has_failed else 'passed'}", file=sys.stderr)
    return int(found.has_failed)


def _write(report: Report, out: Path) -> None:
    text = json.dumps(report.as_json(), indent=1, default=str)
    (out / "report.json").write_text(text + "\n", encoding="utf-8")
    (out / "report.md").write_text(report.as_markdown(), encoding="utf-8")


def run(
    sections: Sequence[Section],
    setup: Setup,
    seconds: float,
    keep: Callable[[Sequence[SectionResult]], None],
) -> list[SectionResult]:
    """Every section up to the end of its share, then what is left over of them in the time left.

    `keep` is called with all results after each.
    """
    begun = monotonic()
    total = sum(section.share for section in sections)
    results = [SectionResult(section) for section in sections]

    def say(text: str) -> None:
        print(f"{monotonic() - begun:6.1f} s  {text}", file=sys.stderr, flush=True)

    def go_on(result: SectionResult, end: float) -> None:
        facts = {row.check: row.numbers for row in rows_of(results) if row.numbers}
        own = replace(setup, facts=facts, options=result.section.options)
        Run(result, own, say).until(end)
        keep(results)

    planned = 0.0
    for result in results:
        planned += result.section.share
        go_on(result, begun + seconds * planned / total)
    for result in sorted(results, key=lambda one: bool(one.parts)):  # first what never began
        if result.is_open:
            go_on(result, begun + seconds)
    for result in results:
        if result.is_open:
            say(f"{result.section.name}: not all of it was run: out of time")
    return results


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benches.gpu_check", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--device", default="cuda", help="cuda, cuda:1, or cpu for the checks alone"
    )
    parser.add_argument("--out", default="gpu-check", help="folder for the report")
    parser.add_argument("--minutes", type=float, default=9, help="for all of it (default: 9)")
    parser.add_argument("--families", help="only these, separated by commas")
    parser.add_argument("--backends", help="only these, separated by commas")
    parser.add_argument("--only", help="only these sections, separated by commas")
    parser.add_argument(
        "--benchmark",
        action="store_true",
        help="the benchmark on a CPU too, tiny: it shows that it runs, its figures mean nothing",
    )
    return parser.parse_args(arguments)


def _sections(options: argparse.Namespace) -> list[Section]:
    sections = list(CHECKS)
    if options.device.startswith("cuda"):
        sections += benchmarks("Qwen3-0.6B", "Llama-3.1-8B")
    elif options.benchmark:
        sections += benchmarks("tiny", None)
    if options.only is None:
        return sections
    names = options.only.split(",")
    unknown = set(names) - {section.name for section in sections}
    if unknown:
        known = ", ".join(section.name for section in sections)
        raise SystemExit(
            f"--only: there is no section {', '.join(sorted(unknown))}; known: {known}"
        )
    return [section for section in sections if section.name in names]


def _setup(options: argparse.Namespace, folder: str) -> Setup:
    families, backends = (
        tuple(asked.split(",")) if asked else None for asked in (options.families, options.backends)
    )
    return Setup(device=options.device, folder=folder, families=families, backends=backends)


if __name__ == "__main__":
    # so that a section's process ends with this one
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    sys.exit(main())
