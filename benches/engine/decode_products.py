"""Decode steps with each product of linear layers, at instruction levels of this processor.

    .venv/bin/python -m benches.engine.decode_products [--model FILE_OR_FOLDER] [--rounds 3]
    .venv/bin/python -m benches.engine.decode_products --show

from the root of the repository. float32; the embedded model unless `--model` names one. Every
round starts a process for each product (`linear_backend`: torch, onednn, pyengine, auto) and level,
in turns:

- `native`: what the processor has.
- `avx2`: torch, oneDNN and MKL held to AVX2 by their switches.
- `avx2, generic MKL`: MKL held to the kernels that run on every processor (`MKL_CBWR=COMPATIBLE`),
  as near as an Intel processor comes to MKL on another one.

A figure is the median of milliseconds of processor time of a decode step, computed with one thread,
which other programs hardly change; `--threads 2` measures the clock with so many threads instead.
Results: `benches/results/decode-products-MACHINE.json`; a run replaces those of its model and
number of threads. `--docs` puts the tables into docs/benchmarks/engine.md, between this machine's
marks.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

from benches.engine.page import publish
from benches.engine.serve import AVX2
from benches.peers.report import heading, machine, results_file, results_name

ROOT = Path(__file__).parents[2]
ROWS = (1, 2, 8, 32)
STEPS = 10
BACKENDS = ("torch", "onednn", "pyengine", "auto")
LEVELS: dict[str, dict[str, str]] = {
    "native": {},
    "avx2": AVX2,
    "avx2, generic MKL": AVX2 | {"MKL_CBWR": "COMPATIBLE"},
}


def child(model: str, backend: Any, threads: int) -> None:
    """Print the milliseconds of decode steps for each number of rows, and what was chosen."""
    from pyengine import LLM, SamplingParams

    llm = LLM(
        model or None,
        dtype="float32",
        quantization="none",
        num_blocks=512,
        max_num_seqs=max(ROWS),
        max_model_len=128,
        linear_backend=backend,
        num_threads=threads,
    )
    clock = process_time if threads == 1 else perf_counter
    ends: list[float] = []

    class Observer:
        def on_arrival(self, _request: object) -> None:
            pass

        def on_step(self, _result: object) -> None:
            ends.append(clock())

        def on_finish(self, _request: object) -> None:
            pass

    llm.observe(Observer())
    params = SamplingParams(temperature=0, max_tokens=STEPS + 2, ignore_eos=True, detokenize=False)
    found: dict[str, float] = {}
    for count in ROWS:
        ends.clear()
        llm.generate([[5 + row, 7, 9, 11] for row in range(count)], params, use_tqdm=False)
        steps = [end - start for start, end in pairwise(ends[1:])]
        found[str(count)] = median(steps) * 1e3
    reason = llm.describe()["linear_reason"]
    print(json.dumps({"milliseconds": found, "reason": reason}))


def measured(model: str, level: str, backend: str, threads: int) -> dict[str, Any]:
    """The output of a child process."""
    command = [sys.executable, "-m", "benches.engine.decode_products", "--child", backend]
    done = subprocess.run(
        [*command, "--model", model, "--threads", str(threads)],
        env=os.environ | LEVELS[level],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _count(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"


def tables(results: dict[str, Any]) -> Iterator[str]:
    """A table for each model and number of threads, in markdown."""
    yield heading(results["machine"])
    for title, rounds in results["runs"].items():
        yield f"\n| {title}, ms a step | product | {' | '.join(map(_count, ROWS))} |"
        yield "|---|---|" + "---:|" * len(ROWS)
        for level, backends in rounds.items():
            for backend, answers in backends.items():
                cells = [
                    f"{median(answer['milliseconds'][str(rows)] for answer in answers):.1f}"
                    for rows in ROWS
                ]
                yield f"| {level} | {backend} | {' | '.join(cells)} |"


def main() -> None:
    """Measure in turns, or show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="a GGUF file or a folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="the tables of the last runs")
    parser.add_argument("--docs", action="store_true", help="write the tables into the docs")
    parser.add_argument("--child", choices=BACKENDS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.model, asked.child, asked.threads)
        return
    name = results_name("decode-products")
    path = results_file(name)
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    if not asked.show:
        results["machine"] = machine()
        model = Path(asked.model).stem if asked.model else "SmolLM2-135M-Instruct"
        what = "processor time" if asked.threads == 1 else f"clock, {asked.threads} threads"
        found: dict[str, dict[str, list[Any]]] = {
            level: {backend: [] for backend in BACKENDS} for level in LEVELS
        }
        results["runs"][f"{model}, {what}"] = found
        for _ in range(asked.rounds):
            for level in LEVELS:
                for backend in BACKENDS:
                    answer = measured(asked.model, level, backend, asked.threads)
                    found[level][backend].append(answer)
                    print(level, backend, answer["milliseconds"], file=sys.stderr, flush=True)
            path.write_text(json.dumps(results, indent=1) + "\n")
    publish(name, tables(results), write=asked.docs)


if __name__ == "__main__":
    main()
