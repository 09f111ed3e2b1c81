"""Whole generations on the CPU: this engine, transformers `generate` and vLLM, in one run.

    .venv/bin/python -m benches.engine.end_to_end [--quick] [--only NAME] [--engines A,B]

from the root of the repository. SmolLM2-135M-Instruct, float32, greedy, end of sequence ignored,
prompts of random tokens, new ones each round and the same for all. Every engine is a process of
its own (`serve.py`) and they take turns, in a different order each round; a ratio is the median of
the ratios of the same rounds. vLLM is looked for in `.venv-peers` (`benches/peers/env.py` makes
it) and takes a minute or two to start; where it is not there, a line says so.

A table goes to standard output, everything to `benches/results/end-to-end.json`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryFile
from time import perf_counter
from typing import Any

from benches.peers.report import libraries, machine
from pyengine.models.source import embedded_model

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".venv-peers/bin/python"
VOCABULARY = 49_000
OURS, COMPILED, TRANSFORMERS, VLLM = "pyengine", "compiled", "transformers", "vllm"
START = "start to first token"


@dataclass(frozen=True)
class Work:
    """`count` prompts of `shared` tokens that are the same and `own` that are not."""

    count: int
    shared: int
    own: int
    max_tokens: int
    slow: bool = False
    """Whether an engine that shares nothing takes more than a minute."""

    @property
    def name(self) -> str:
        """As the tables say it."""
        parts = [f"{self.shared} shared" if self.own else f"{self.shared} identical"]
        length = " + ".join(parts * bool(self.shared) + [f"{self.own} own"] * bool(self.own))
        length = length if self.shared else str(self.own)
        return f"{self.count} x ({length} in, {self.max_tokens} out)"

    @property
    def tokens(self) -> int:
        """What the rate counts: tokens out, or tokens in where only one comes out."""
        per_prompt = self.max_tokens if self.max_tokens > 1 else self.shared + self.own
        return self.count * per_prompt

    def prompts(self, random: Random) -> list[list[int]]:
        """New ones."""
        shared = random.choices(range(VOCABULARY), k=self.shared)
        return [shared + random.choices(range(VOCABULARY), k=self.own) for _ in range(self.count)]


WORKS = (
    Work(1, 0, 32, 64),
    Work(32, 0, 32, 64),
    Work(8, 0, 512, 1),
    Work(32, 512, 16, 32, slow=True),
    Work(32, 512, 0, 32, slow=True),
)
GOALS: tuple[tuple[str, str, str, float], ...] = (  # work, ours, theirs, least ratio
    (WORKS[1].name, OURS, VLLM, 1.0),
    (WORKS[1].name, COMPILED, VLLM, 1.2),
    (WORKS[1].name, OURS, TRANSFORMERS, 1.5),
    (WORKS[4].name, OURS, VLLM, 4.0),
    (WORKS[3].name, OURS, VLLM, 1.3),
    (WORKS[0].name, COMPILED, VLLM, 1.0),
    (START, OURS, VLLM, 15.0),
)


class Engine:
    """A process that generates. Raises `RuntimeError` if it does not come up."""

    def __init__(self, name: str, python: Path | str, folder: Path) -> None:
        self.name = name
        environment = {"VLLM_LOGGING_LEVEL": "ERROR"} | os.environ
        self._errors = TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        start = perf_counter()
        self._process = subprocess.Popen(
            [str(python), "-m", "benches.engine.serve", name, str(folder)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.version = self._answer()["ready"]
        self.start_seconds = perf_counter() - start

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            said = [one.strip() for one in self._errors if re.search(r"\w+Error: ", one)]
            raise RuntimeError(f"{self.name} ended with {status}: {said[0] if said else 'no word'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def generate(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds, and the tokens."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return answer["seconds"], answer["tokens"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()


def start(names: list[str], folder: Path) -> tuple[list[Engine], dict[str, str]]:
    """The engines that come up, one after the other, and why the others do not."""
    engines, missing = [], {}
    for name in names:
        python = PEERS if name == VLLM else Path(sys.executable)
        if not python.exists():
            missing[name] = f"no {python.relative_to(ROOT)}; benches/peers/env.py makes it"
            continue
        print(f"starting {name}", file=sys.stderr)
        try:
            engines.append(Engine(name, python, folder))
        except RuntimeError as error:
            missing[name] = str(error)
    return engines, missing


def measure(engines: list[Engine], works: list[Work], rounds: int) -> dict[str, Any]:
    """By work and engine: seconds of each round; and how many sequences gave the same tokens."""
    results: dict[str, Any] = {}
    random = Random(0)
    for work in works:
        seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
        same = dict.fromkeys(seconds, 0)
        order = list(engines)
        for engine in engines:  # shapes that it has not seen yet, memory that it has not touched
            if not (work.slow and engine.name == TRANSFORMERS):
                engine.generate(work.prompts(random), min(work.max_tokens, 4))
        for turn in range(rounds):
            prompts, tokens = work.prompts(random), {}
            for engine in order:
                if work.slow and engine.name == TRANSFORMERS and turn > 0:
                    continue
                took, tokens[engine.name] = engine.generate(prompts, work.max_tokens)
                seconds[engine.name].append(took)
                print(f"{work.name}: {engine.name} {took:.2f} s", file=sys.stderr)
            reference = tokens.get(TRANSFORMERS) or tokens[engines[0].name]
            for name, found in tokens.items():
                same[name] += sum(a == b for a, b in zip(found, reference, strict=True))
            order.append(order.pop(0))
        results[work.name] = {"tokens": work.tokens, "seconds": seconds, "same_tokens": same}
    return results


def ratio(results: dict[str, Any], work: str, ours: str, theirs: str) -> float | None:
    """How many times as fast: the median of the rounds that both have."""
    seconds = results.get(work, {}).get("seconds", {})
    pairs = list(zip(seconds.get(theirs, []), seconds.get(ours, []), strict=False))
    return median([a / b for a, b in pairs]) if pairs else None


def report(results: dict[str, Any], missing: dict[str, str]) -> Iterator[str]:
    """Rates, ratios and goals in markdown."""
    names = list(results[START]["seconds"])
    peers = [name for name in names if name in (TRANSFORMERS, VLLM)]
    columns = names + [f"{ours} / {peer}" for ours in names if ours not in peers for peer in peers]
    yield "| tokens per second | " + " | ".join(columns) + " |"
    yield "|---|" + "---|" * len(columns)
    for work, result in results.items():
        cells = []
        for name in names:
            took = median(result["seconds"][name])
            cells.append(f"{took:.1f} s" if work == START else f"{result['tokens'] / took:,.1f}")
        for ours in names:
            for peer in peers if ours not in peers else ():
                found = ratio(results, work, ours, peer)
                cells.append("" if found is None else f"{found:.2f}x")
        yield f"| {work} | " + " | ".join(cells) + " |"
    for name, reason in missing.items():
        yield f"\n{name}: missing ({reason})"
    yield "\n| goal | least | found |"
    yield "|---|---|---|"
    for work, ours, theirs, least in GOALS:
        found = ratio(results, work, ours, theirs)
        answer = "not measured"
        if found is not None:
            answer = f"{found:.2f}x, {'met' if found >= least else 'not met'}"
        yield f"| {work}: {ours} / {theirs} | {least:.1f}x | {answer} |"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round, without the slow works")
    parser.add_argument("--only", default="", help="works whose name contains this")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per work (3)")
    parser.add_argument(
        "--engines",
        default=f"{OURS},{TRANSFORMERS},{VLLM}",
        help="of pyengine, compiled, transformers, vllm",
    )
    parser.add_argument("--results", default="end-to-end", help="name of the JSON file")
    return parser.parse_args()


def main() -> None:
    """Run, print, write."""
    options = parse()
    works = [work for work in WORKS if options.only in work.name]
    if options.quick:
        works = [work for work in works if not work.slow]
    engines, missing = start(options.engines.split(","), embedded_model())
    if not engines:
        sys.exit(f"nothing can be measured: {missing}")
    try:
        results: dict[str, Any] = {
            START: {"seconds": {engine.name: [engine.start_seconds] for engine in engines}},
            **measure(engines, works, 1 if options.quick else options.rounds),
        }
    finally:
        for engine in engines:
            engine.close()
    print("\n".join(report(results, missing)))
    target = ROOT / "benches/results" / f"{options.results}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "machine": machine(),
        "libraries": libraries(),
        "engines": {engine.name: engine.version for engine in engines},
        "missing": missing,
        "results": results,
    }
    target.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{target.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
