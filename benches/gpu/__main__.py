"""Times the GPU path on this machine; the figures are written down one by one.

    python -m benches.gpu --device cuda --out FOLDER [--only decode,host] [--minutes 5]

from the root of the repository. It needs the built package, torch, transformers and numpy; random
weights are made here. Every figure is a line of FOLDER/figures.jsonl as soon as it is known, and
FOLDER/figures.md, goals and tables, is written anew after each work, so an interrupted run has
both. Each work has a separate process; one that fails or hangs is named, and the next one begins.
On a CPU everything is tiny: it shows that it runs. Whether the path is right: `make gpu-check`.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from benches.gpu.child import Child
from benches.gpu.works import WORKS, Bench, Figures, write_down

SECONDS = 150.0
"""For one work."""
ROOFLINE_BATCH = 256


def read(lines: Path) -> list[Figures]:
    """What is written down."""
    return [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]


def tables(figures: list[Figures]) -> Iterator[str]:
    """Goals, a table for each work, and what there is no figure for; in markdown."""
    yield f"# The GPU path, {datetime.now(UTC).date().isoformat()}"
    if any(figure.get("device") == "cpu" for figure in figures):
        yield "Figures of a CPU show only that everything runs."
    else:
        yield table(
            [{"goal": goal, "found": found, "": met} for goal, found, met in goals(figures)]
        )
    failed = [figure for figure in figures if "failed" in figure]
    for work in WORKS:
        rows = [figure for figure in figures if figure["work"] == work and figure not in failed]
        for columns in dict.fromkeys(tuple(row) for row in rows if "skipped" not in row):
            yield f"## {work}\n\n{table([row for row in rows if tuple(row) == columns])}"
        for row in rows:
            if "skipped" in row:
                yield "- " + ", ".join(f"{name} {shown(value)}" for name, value in row.items())
    yield from (
        f"## {failure['work']}: failed\n\n```\n{failure['failed']}\n```" for failure in failed
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Rows that have the same columns."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(map(shown, row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('_', ' ') for cell in line)} |" for line in lines)


def shown(value: object) -> str:
    """A cell."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def goals(figures: list[Figures]) -> Iterator[tuple[str, str, str]]:
    """Each with what was found, and whether it is met."""
    shares = [
        figure["roofline_share"]
        for figure in figures
        if figure.get("batch") == ROOFLINE_BATCH and "roofline_share" in figure
    ]
    rates = {
        figure["engine"]: figure["tokens_per_second"] for figure in figures if "engine" in figure
    }
    hosts = {figure["overlap"]: figure for figure in figures if "overlap" in figure}
    ratios = [figure["ratio"] for figure in figures if "ratio" in figure]
    hidden = None
    if len(hosts) == 2:
        hidden = (hosts[False]["step_us"] - hosts[True]["step_us"]) / hosts[False]["host_us"]
    against = rates["pyengine"] / rates["transformers"] if len(rates) == 2 else None
    for name, found, least in (
        (
            f"decode at batch {ROOFLINE_BATCH}, share of the roofline",
            min(shares, default=None),
            0.7,
        ),
        ("times as fast as transformers' continuous batching", against, 1.5),
        ("share of the host's work that overlap hides", hidden, 0.8),
        ("one prompt / the same 32 times in one step", 1 / ratios[0] if ratios else None, 1 / 1.1),
    ):
        if found is None:
            yield f"{name} >= {least:.3g}", "not measured", "-"
        else:
            yield f"{name} >= {least:.3g}", f"{found:.3g}", "met" if found >= least else "not met"


def run(options: argparse.Namespace) -> None:
    """Work by work, each in a new process; the report after each."""
    lines, page = options.out / "figures.jsonl", options.out / "figures.md"
    options.out.mkdir(parents=True, exist_ok=True)
    lines.write_text("")
    begun, child = monotonic(), Child()
    small, large = ("Qwen3-0.6B", "Llama-3.1-8B") if options.device != "cpu" else ("tiny", None)
    bench = Bench(options.device, small)
    asked = [(work, bench) for work in WORKS if work in options.only]
    if large:
        asked += [(work, replace(bench, shape_name=large)) for work, _ in asked if work == "decode"]
    for work, of in asked:
        print(f"{monotonic() - begun:4.0f} s  {work}, {of.shape_name}", file=sys.stderr, flush=True)
        failed = "not run: out of time"
        try:
            if monotonic() - begun < 60 * options.minutes:
                rates = next((item for item in read(lines) if item["work"] == "machine"), {})
                child.run(write_down, work, replace(of, rates=rates), lines, seconds=SECONDS)
                failed = ""
        except Exception as error:
            failed = f"{type(error).__name__}: {error}\n{error.__cause__ or ''}".strip()
        finally:
            child.end()
        if failed:
            with lines.open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps({"work": f"{work}, {of.shape_name}", "failed": failed}) + "\n"
                )
        page.write_text("\n\n".join(tables(read(lines))) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Run, say where the figures are."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--device", default="cuda", help="cuda, cuda:1, or cpu: tiny, to see it run"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder for the figures")
    parser.add_argument(
        "--only",
        default=",".join(WORKS),
        help=f"of {', '.join(WORKS)}; machine is always among them",
    )
    parser.add_argument("--minutes", type=float, default=5, help="no work begins after that (5)")
    options = parser.parse_args(arguments)
    options.only = ["machine", *options.only.split(",")]
    if unknown := set(options.only) - set(WORKS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(WORKS)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
    run(options)
    print(options.out / "figures.md", file=sys.stderr)


if __name__ == "__main__":
    main()
