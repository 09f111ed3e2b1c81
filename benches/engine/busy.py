"""Tokens per second beside a process that is always busy, and alone.

    .venv/bin/python -m benches.engine.busy [--kinds bfloat16] [--rounds 3] [--nice 0]
    .venv/bin/python -m benches.engine.busy --show

from the root of the repository, on a machine that does nothing else: the works of `works.py`, eager
and compiled, in bfloat16, in float32 and in 4 bits (the embedded file as it is). Two processes of
the engine take turns, one alone and one beside the busy process, of `nice` 19 unless `--nice` says
otherwise. A ratio is the median of the ratios of the same rounds; the lowest one is beside it.

Results: `benches/results/busy-rows-MACHINE.json`, which keeps the kinds that are not measured.
`--docs` puts the table into docs/benchmarks/engine.md.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import sleep
from typing import Any

from benches.engine.child import say
from benches.engine.end_to_end import COMPILED, OURS, Engine
from benches.engine.page import publish
from benches.engine.works import WORKS, Work
from benches.peers.report import heading, libraries, machine, results_file, results_name
from pyengine.models.source import embedded_gguf

KINDS = {"bfloat16": "bfloat16", "float32": "float32", "4 bits": "auto"}
"""The dtype of each; 4 bits are those of the embedded file."""
MODES = {"eager": OURS, "compiled": COMPILED}
MEASURED = WORKS[:7]  # not that of 2,048 shared tokens, which takes minutes
GOAL = 0.45
_LOOP = """
import os
os.nice({nice})
while os.getppid() == {parent}:
    for _ in range(1_000_000): pass
"""
"""Ends with the process that started it, however that ends."""


@contextmanager
def busy_processes(count: int, nice: int) -> Iterator[None]:
    """So many processes that never rest."""
    command = [sys.executable, "-c", _LOOP.format(nice=nice, parent=os.getpid())]
    others = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure_turn(
    alone: Engine, beside: Engine, work: Work, turn: int, nice: int
) -> tuple[float, float]:
    """Seconds alone, and seconds beside a busy process, in an order that changes with the turn."""
    taken = {}
    for engine in (alone, beside) if turn % 2 else (beside, alone):
        with busy_processes(int(engine is beside), nice):
            sleep(0.5)
            request = work.request(Random(turn))
            taken[engine] = engine.generate(request)["seconds"]
    return taken[alone], taken[beside]


def measure(kinds: list[str], options: argparse.Namespace, path: Path, caches: Path) -> None:
    """Measure these kinds, and write what is known to `path` after each row."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"seconds": {}}
    results |= {"machine": machine(), "libraries": libraries(), "nice": options.nice}
    for kind in kinds:
        for mode, name in MODES.items():
            model = embedded_gguf() if kind == "4 bits" else None
            rows = results["seconds"].setdefault(f"{kind}, {mode}", {})
            with ExitStack() as stack:
                alone, beside = (Engine(name, KINDS[kind], caches, model=model) for _ in range(2))
                stack.enter_context(alone)
                stack.enter_context(beside)
                for work in MEASURED:
                    rows[work.name] = []
                    for turn in range(options.rounds):
                        taken = measure_turn(alone, beside, work, turn, options.nice)
                        rows[work.name].append(taken)
                        say(f"{kind}, {mode}, {work.name}: {taken[0]:.2f}, {taken[1]:.2f} s")
                        path.write_text(json.dumps(results, indent=1) + "\n")


def cells(rows: dict[str, list[tuple[float, float]]], work: Work) -> str:
    """Tokens per second alone and beside, the median ratio, and the lowest one."""
    if not (turns := rows.get(work.name)):
        return "| | "
    alone, beside = (work.tokens / median(column) for column in zip(*turns, strict=True))
    shares = [one / other for one, other in turns]
    share = median(shares)
    missed = "" if share >= GOAL else ", missed"
    return f"| {alone:.0f} / {beside:.0f} | {share:.2f} ({min(shares):.2f}{missed})"


def table(results: dict[str, Any]) -> Iterator[str]:
    """Alone and beside a busy process, in markdown."""
    kinds = results["seconds"]
    yield heading(
        results["machine"], {len(turns) for rows in kinds.values() for turns in rows.values()}
    )
    for kind in KINDS:
        modes = [mode for mode in MODES if f"{kind}, {mode}" in kinds]
        if not modes:
            continue
        titles = " | ".join(f"{mode}, alone / beside 1 | ratio (lowest)" for mode in modes)
        yield f"\n| {kind}, tokens per second, nice {results['nice']} | {titles} |"
        yield "|---|" + "---:|---:|" * len(modes)
        for work in MEASURED:
            row = " ".join(cells(kinds[f"{kind}, {mode}"], work) for mode in modes)
            yield f"| {work.name} {row} |"


def main() -> None:
    """Measure, or show."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="names, with commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nice", type=int, default=19, help="of the busy process")
    parser.add_argument("--show", action="store_true", help="the table of the last run")
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}")
    name = results_name("busy-rows")
    path = results_file(name)
    if not options.show:
        with TemporaryDirectory() as folder:
            measure(kinds, options, path, Path(folder))
    publish(name, table(json.loads(path.read_text())), write=options.docs)


if __name__ == "__main__":
    main()
