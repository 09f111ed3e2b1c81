"""Whole generations of vLLM on the CPU, with its own KV-cache manager and with ours, in one run.

    .venv/bin/python -m benches.integrations.end_to_end            # half an hour on two cores
    .venv/bin/python -m benches.integrations.end_to_end --quick    # does it run; 5 minutes

from the root of the repository; vLLM is in `.venv-peers`. The rows are those of
`benches.engine.end_to_end`. Blocks are of 128 (vLLM's choice on a CPU) or of 32; two processes
each, one with `PYENGINE_BLOCK_MANAGER=1`, which take turns. A ratio is the median of the ratios of
the same rounds; greedy rows must have the same tokens. That ours is engaged is read in vLLM's log.

Progress goes to standard error, the table and each row's verdict to standard output; `--docs` puts
them into docs/benchmarks/vllm.md too, between their marks. `--json` is written with every row;
`--show` prints what such a file holds. Two processes at a time: 6 GB.
"""

import argparse
import json
import os
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benches.engine.child import ROOT, say
from benches.engine.end_to_end import VLLM, VLLM32, Engine
from benches.engine.page import publish
from benches.engine.works import WORKS, Work
from benches.peers.report import heading, libraries, machine, machine_name

SIZES = {"128": VLLM, "32": VLLM32}
ENGAGED = "KV-cache blocks are managed by pyengine"
PAGE = ROOT / "docs/benchmarks/vllm.md"
LEAST = 0.98
GOALS = {(WORKS[6].name, "128"): 1.8, (WORKS[6].name, "32"): 1.0}
"""Least ratio of a row at a size of blocks; of all others, `LEAST`."""


def plugin_folder(folder: Path) -> Path:
    """A folder for `PYTHONPATH` with the entry point that an installed wheel would give vLLM."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    about = folder / "pyengine_kv-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: pyengine-kv\nVersion: 0\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def start(size: str, dtype: str, ours: bool, folder: Path) -> Engine:
    """vLLM with one of the two managers. Raises `RuntimeError` if ours did not step in."""
    settings = {
        "PYENGINE_BLOCK_MANAGER": "1" if ours else "0",
        "PYTHONPATH": f"{folder / 'plugin'}{os.pathsep}{ROOT}",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    engine = Engine(SIZES[size], dtype, folder, environment=settings)
    if any(ENGAGED in line for line in engine.log()) is not ours:
        engine.__exit__()
        raise RuntimeError(
            f"blocks of {size}: our manager {'did not step' if ours else 'stepped'} in"
        )
    return engine


def measure(pair: list[Engine], work: Work, rounds: int) -> dict[str, Any]:
    """Seconds of each, the ratio, and how many sequences have the same tokens."""
    random, same, count = Random(work.name), 0, 0
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(-1, rounds):
        request = work.request(random)
        if turn < 0:
            request = replace(request, max_tokens=min(work.max_tokens, 4))
        answers: list[dict[str, Any]] = [{}, {}]
        for index in (0, 1) if turn % 2 else (1, 0):
            answers[index] = pair[index].generate(request)
            say(f"{work.name}: {('stock', 'ours')[index]} {answers[index]['seconds']:.2f} s")
        if turn >= 0:
            for index in (0, 1):
                seconds[index].append(answers[index]["seconds"])
            stock, ours = (column["tokens"] for column in answers)
            same += sum(a == b for a, b in zip(stock, ours, strict=True))
            count += len(stock)
    ratio = median([a / b for a, b in zip(*seconds, strict=True)])
    rates = [work.tokens / median(column) for column in seconds]
    return {"rates": rates, "ratio": ratio, "same": same, "of": count, "seconds": seconds}


def main() -> None:
    """Measure, print a table in markdown, keep the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--dtype", default="float32", help="in bfloat16 other shapes round otherwise"
    )
    parser.add_argument("--sizes", default="128,32")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--quick", action="store_true", help="one round of the smallest row")
    parser.add_argument("--json", type=Path, help="where the figures are kept")
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    parser.add_argument("--show", action="store_true", help="print --json's, measure nothing")
    options = parser.parse_args()
    if options.show and not options.json:
        parser.error("--show needs --json FILE")
    kept = json.loads(options.json.read_text(encoding="utf-8")) if options.show else run(options)
    name = f"vllm-end-to-end-{machine_name(kept['about']['machine'])}"
    publish(name, table(kept), write=options.docs, page=PAGE)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what was asked for, size by size; what is known is kept after every row."""
    works = [work for work in WORKS if options.only in work.name]
    works, rounds = (works[:1], 1) if options.quick else (works, options.rounds)
    about = {"machine": machine(), "libraries": libraries(), "dtype": options.dtype}
    kept: dict[str, Any] = {"about": about, "rows": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plugin_folder(folder / "plugin")
        for size in options.sizes.split(","):
            with ExitStack() as stack:
                pair = []
                for ours in (False, True):
                    say(f"blocks of {size}: starting {'ours' if ours else 'stock'}")
                    pair.append(stack.enter_context(start(size, options.dtype, ours, folder)))
                for work in works:
                    result = measure(pair, work, rounds)
                    kept["rows"].setdefault(work.name, {})[size] = result
                    say(f"blocks of {size}: {work.name}: {', '.join(verdict(work, size, result))}")
                    if options.json:
                        options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return kept


def verdict(work: Work, size: str, figures: dict[str, Any]) -> Iterator[str]:
    """Whether a row at a size of blocks is as fast as wanted, and has the same tokens."""
    minimum, ratio = GOALS.get((work.name, size), LEAST), figures["ratio"]
    yield f"{ratio:.2f} (goal {minimum:.2f}: {'met' if ratio >= minimum else 'NOT MET'})"
    if work.kind != "sampled":
        equal = figures["same"] == figures["of"]
        yield (
            "same tokens" if equal else f"{figures['same']} of {figures['of']} have the SAME TOKENS"
        )


def table(kept: dict[str, Any]) -> Iterator[str]:
    """Tokens per second of both and the verdict, for each size of blocks; in markdown."""
    rows, dtype, about = kept["rows"], kept["about"]["dtype"], kept["about"]["machine"]
    sizes = [size for size in SIZES if any(size in row for row in rows.values())]
    rounds = {len(figures["seconds"][0]) for row in rows.values() for figures in row.values()}
    yield f"{dtype}, tokens per second, {heading(about, rounds)}:"
    head = "".join(f" stock, {size} | ours, {size} | ours / stock |" for size in sizes)
    yield f"\n| |{head}\n|---|" + "---:|---:|---|" * len(sizes)
    for work in WORKS:
        row = rows.get(work.name, {})
        cells = [cell for size in sizes if size in row for cell in cells_of(work, size, row[size])]
        if cells:
            yield f"| {work.name} | " + " | ".join(cells) + " |"


def cells_of(work: Work, size: str, figures: dict[str, Any]) -> Iterator[str]:
    """Both rates and the verdict."""
    yield from (f"{rate:,.0f}" for rate in figures["rates"])
    yield ", ".join(verdict(work, size, figures))


if __name__ == "__main__":
    main()
