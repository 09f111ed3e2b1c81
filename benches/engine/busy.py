"""Tokens per second where others use the CPUs: this engine, transformers, vLLM and llama.cpp.

    .venv/bin/python -m benches.engine.busy [--engines pyengine,transformers] [--rounds 3]
    .venv/bin/python -m benches.engine.busy --ours [--kinds bfloat16] [--rounds 3] [--nice 0]
    .venv/bin/python -m benches.engine.busy [--ours] --show

from the root of the repository, on a machine that does nothing else. SmolLM2-135M-Instruct in
float32 (llama.cpp: the embedded file, Q4_1), every engine as it comes.
Rows: decodes of one sequence and of eight. Columns:

- `alone`;
- `beside 1`, `beside 2`: so many processes that never rest, of `nice` 19 (`--nice 0`: as important
  as the engine);
- `1 of 2 CPUs`: a CPU quota of one CPU by a control group, in which the engine starts. It needs
  the right to make control groups.

Engines are separate processes (`serve.py`), started anew for every column, and take turns.
A line names each missing measurement. Results: `benches/results/busy-MACHINE.json`. The goal is to
reach 0.9 of the fastest other engine in every column; llama.cpp, whose weights have less than a
sixth of the bytes, has a separate line.

`--ours` measures the rows of the end-to-end benchmark, eager and compiled, in bfloat16, in float32
and in 4 bits (the embedded file as it is), alone and beside one process that never rests. Two
processes of the engine take turns, one for each column. A ratio is the median of the ratios of the
same rounds; its goal is 0.45, and the lowest one is beside it. Results:
`benches/results/busy-rows-MACHINE.json`, where kinds that were not asked for stay as they were.

`--docs` puts the table into
docs/benchmarks/engine.md, between this machine's marks.
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

from benches.engine.end_to_end import (
    COMPILED,
    LLAMA,
    NAMES,
    OURS,
    TRANSFORMERS,
    VLLM,
    Engine,
    say,
)
from benches.engine.page import publish
from benches.engine.serve import GenerateRequest
from benches.engine.works import WORKS, Work
from benches.peers.report import heading, libraries, machine, results_file, results_name
from pyengine.models.source import embedded_gguf

ENGINES = (OURS, TRANSFORMERS, VLLM, LLAMA)
ROWS = (1, 8)
PROMPT, TOKENS = 32, 32
BUSY = {"alone": 0, "beside 1": 1, "beside 2": 2}
QUOTA = "1 of 2 CPUs"
GOAL = 0.9
AGAINST = {
    "the best in float32": (TRANSFORMERS, VLLM),
    "llama.cpp, with a weight in 5 bits": (LLAMA,),
}
KINDS = {"bfloat16": "bfloat16", "float32": "float32", "4 bits": "auto"}
"""The dtype of each; 4 bits are those of the embedded file."""
MODES = {"eager": OURS, "compiled": COMPILED}
OWN_WORKS = WORKS[:7]  # not that of 2,048 shared tokens, which takes minutes
OWN_GOAL = 0.45
_PERIOD = 100_000
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
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


@contextmanager
def quota_of_one_cpu() -> Iterator[None]:
    """Inside, this process and those that it starts share one CPU. `OSError`: not allowed here."""
    is_v1 = (_V1 / "cpu.cfs_quota_us").exists()
    root = _V1 if is_v1 else _V2
    paths = dict(
        (controllers, path)
        for _, controllers, path in (
            line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()
        )
    )
    named = next((path for name, path in paths.items() if "cpu" in name.split(",")), "/")
    before = root / (named if is_v1 else paths.get("", "/")).lstrip("/")
    group = before / f"pyengine-busy-{os.getpid()}"
    group.mkdir()
    try:
        if is_v1:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(_PERIOD))
        else:
            (group / "cpu.max").write_text(f"{_PERIOD} {_PERIOD}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def prompts(random: Random, count: int) -> list[list[int]]:
    """Random tokens."""
    return [[random.randrange(3, 49_000) for _ in range(PROMPT)] for _ in range(count)]


def measure(
    names: list[str], rounds: int, missing: dict[str, str], caches: Path
) -> dict[str, dict[str, Any]]:
    """Seconds of each round, for each number of rows and engine that comes up.

    `caches` is the folder in which engines find what they compiled for an earlier column.
    """
    found: dict[str, dict[str, Any]] = {str(rows): {} for rows in ROWS}
    with ExitStack() as stack:
        engines = []
        for name in names:
            try:
                engine = Engine(name, "float32", caches)
            except RuntimeError as error:
                missing[name] = str(error)
                continue
            stack.callback(engine.close)
            engines.append(engine)
        for rows in ROWS:
            random = Random(rows)
            for turn in range(-1, rounds):  # -1: to get warm
                some = prompts(random, rows)
                for engine in engines:
                    taken = engine.generate(GenerateRequest(some, TOKENS if turn >= 0 else 4))[
                        "seconds"
                    ]
                    if turn >= 0:
                        found[str(rows)].setdefault(engine.name, []).append(taken)
                    say(f"{rows} rows: {engine.name} {taken:.2f} s")
                engines = engines[1:] + engines[:1]
    return found


def rate(columns: dict[str, Any], column: str, rows: int, engine: str) -> float | None:
    """Tokens per second."""
    seconds = columns.get(column, {}).get(str(rows), {}).get(engine)
    return rows * TOKENS / median(seconds) if seconds else None


def ratios(columns: dict[str, Any], rows: int, others: tuple[str, ...]) -> Iterator[str]:
    """Ours as a share of the fastest of these, column by column, and whether the goal is missed."""
    for column in columns:
        ours = rate(columns, column, rows, OURS)
        best = max(
            filter(None, (rate(columns, column, rows, each) for each in others)), default=None
        )
        share = ours and best and ours / best
        yield f"{share:.2f}{'' if share >= GOAL else ' (missed)'}" if share else ""


def tables(results: dict[str, Any]) -> Iterator[str]:
    """Tokens per second and the goal, in markdown."""
    columns = results["seconds"]
    counts = {
        len(seconds)
        for each in columns.values()
        for engines in each.values()
        for seconds in engines.values()
    }
    yield heading(results["machine"], counts)
    yield f"\n| tokens per second, nice {results['nice']} | {' | '.join(columns)} |"
    yield "|---|" + "---:|" * len(columns)
    for rows in ROWS:
        count = f"{rows} row" if rows == 1 else f"{rows} rows"
        for engine in ENGINES:
            rates = [rate(columns, column, rows, engine) for column in columns]
            if any(rates):
                cells = [f"{each_rate:.1f}" if each_rate else "" for each_rate in rates]
                yield f"| {count}, {engine} | {' | '.join(cells)} |"
        for title, others in AGAINST.items():
            yield f"| {count}, against {title} | {' | '.join(ratios(columns, rows, others))} |"
    for name, why in results["missing"].items():
        yield f"\nNot measured: {name}: {why}"


def measure_all(names: list[str], asked: argparse.Namespace, path: Path, caches: Path) -> None:
    """Measure column by column, and write what is known to `path` after each."""
    missing: dict[str, str] = {}
    results: dict[str, Any] = {
        "machine": machine(),
        "libraries": libraries(),
        "nice": asked.nice,
        "seconds": {},
        "missing": missing,
    }
    for column, count in BUSY.items():
        say(column)
        with busy_processes(count, asked.nice):
            results["seconds"][column] = measure(names, asked.rounds, missing, caches)
        path.write_text(json.dumps(results, indent=1) + "\n")
    say(QUOTA)
    try:
        with quota_of_one_cpu():
            results["seconds"][QUOTA] = measure(names, asked.rounds, missing, caches)
    except OSError as error:
        missing[QUOTA] = str(error)
    path.write_text(json.dumps(results, indent=1) + "\n")


def measure_turn(
    alone: Engine, beside: Engine, work: Work, turn: int, nice: int
) -> tuple[float, float]:
    """Seconds alone, and seconds beside a busy process, in an order that changes with the turn."""
    taken = {}
    for engine in (alone, beside) if turn % 2 else (beside, alone):
        with busy_processes(int(engine is beside), nice):
            sleep(0.5)
            request = work.asked(Random(turn))
            taken[engine] = engine.generate(request)["seconds"]
    return taken[alone], taken[beside]


def measure_ours(kinds: list[str], asked: argparse.Namespace, path: Path, caches: Path) -> None:
    """Measure these kinds, and write what is known to `path` after each row."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"seconds": {}}
    results |= {"machine": machine(), "libraries": libraries(), "nice": asked.nice}
    for kind in kinds:
        for mode, name in MODES.items():
            model = embedded_gguf() if kind == "4 bits" else None
            rows = results["seconds"].setdefault(f"{kind}, {mode}", {})
            with ExitStack() as stack:
                alone, beside = (Engine(name, KINDS[kind], caches, model=model) for _ in range(2))
                stack.callback(alone.close)
                stack.callback(beside.close)
                for work in OWN_WORKS:
                    rows[work.name] = []
                    for turn in range(asked.rounds):
                        taken = measure_turn(alone, beside, work, turn, asked.nice)
                        rows[work.name].append(taken)
                        say(f"{kind}, {mode}, {work.name}: {taken[0]:.2f}, {taken[1]:.2f} s")
                        path.write_text(json.dumps(results, indent=1) + "\n")


def own_cells(rows: dict[str, list[tuple[float, float]]], work: Work) -> str:
    """Tokens per second alone and beside, the median ratio, and the lowest one."""
    if not (turns := rows.get(work.name)):
        return "| | "
    alone, beside = (work.tokens / median(column) for column in zip(*turns, strict=True))
    shares = [one / other for one, other in turns]
    share = median(shares)
    missed = "" if share >= OWN_GOAL else ", missed"
    return f"| {alone:.0f} / {beside:.0f} | {share:.2f} ({min(shares):.2f}{missed})"


def own_table(results: dict[str, Any]) -> Iterator[str]:
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
        for work in OWN_WORKS:
            cells = " ".join(own_cells(kinds[f"{kind}, {mode}"], work) for mode in modes)
            yield f"| {work.name} {cells} |"


def main() -> None:
    """Measure column by column, or show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", default=",".join(ENGINES), help="names, with commas")
    parser.add_argument("--ours", action="store_true", help="the rows of end to end")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of --ours, with commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nice", type=int, default=19, help="of the busy processes")
    parser.add_argument("--show", action="store_true", help="the tables of the last run")
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    asked = parser.parse_args()
    names = asked.engines.split(",")
    if unknown := set(names) - set(NAMES):
        parser.error(f"no such engines: {', '.join(sorted(unknown))}")
    kinds = asked.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}")
    name = results_name("busy-rows" if asked.ours else "busy")
    path = results_file(name)
    if not asked.show:
        with TemporaryDirectory() as folder:
            if asked.ours:
                measure_ours(kinds, asked, path, Path(folder))
            else:
                measure_all(names, asked, path, Path(folder))
    show = own_table if asked.ours else tables
    publish(name, show(json.loads(path.read_text())), write=asked.docs)


if __name__ == "__main__":
    main()
