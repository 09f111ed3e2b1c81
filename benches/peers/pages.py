"""Tables of docs/benchmarks/block-manager.md and the README, from the stored results.

    .venv/bin/python -m benches.peers.pages [--docs]

from the root of the repository: prints them, a column for each machine that has a file of results;
with `--docs` they go into the pages, between their marks.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from benches.engine.page import MANAGER, publish
from benches.peers.goals import (
    GROWTH,
    LIST,
    NANO,
    OURS,
    SGLANG,
    SPEED,
    VLLM,
    Goal,
    Outcome,
    growth,
    memory,
    speed,
)
from benches.peers.report import RESULTS

MARK = "block-manager"
README = MANAGER.parents[2] / "README.md"
PEERS = {VLLM: "vLLM 0.32 (sha256)", SGLANG: "SGLang's Rust index", NANO: "nano-vllm"}
SHORT: tuple[tuple[str, str, str, tuple[str, ...], str], ...] = (
    (
        "prefill of 8,192 new tokens, pool full; ours from a list too",
        "cold-8192",
        LIST,
        (VLLM, NANO),
        "us",
    ),
    ("the same, ours from an array", "cold-8192", OURS, (VLLM, SGLANG), "us"),
    ("prefill of 8,192 cached tokens; ours from a list too", "hot-8192", LIST, (VLLM, NANO), "us"),
    ("the same, ours from an array", "hot-8192", OURS, (VLLM, SGLANG), "us"),
    (
        "requests of 90,000 tokens, 96 % cached; ours from an array",
        "agents-90000",
        OURS,
        (VLLM,),
        "us",
    ),
    ("decode step of 256 sequences", "decode-256", OURS, (VLLM, NANO), "step"),
    ("the step's inputs into arrays", "fill-256", OURS, (NANO,), "us"),
)
"""Rows of the README: what, work, our manager, the peers, the part of the step."""


def results() -> list[dict[str, Any]]:
    """The stored results of whole runs, by the name of the file."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("peers-*.json"))]


def readme(runs: list[dict[str, Any]]) -> Iterator[str]:
    """How many times as fast, a row for each work."""
    yield f"| times as fast | against | {' | '.join(map(column, runs))} |"
    yield "|---|---|" + "---:|" * len(runs)
    for text, work, ours, peers, part in SHORT:
        goals = [Goal(text, work, ours, peer, 0, part) for peer in peers]
        cells = ["; ".join(short(speed(goal, run["works"])) for goal in goals) for run in runs]
        yield f"| {text} | {'; '.join(PEERS[peer] for peer in peers)} | {' | '.join(cells)} |"


def goals(runs: list[dict[str, Any]]) -> Iterator[str]:
    """Goal by goal, with quartiles, and where it is met."""
    yield f"| work | against | {' | '.join(map(column, runs))} | goal | |"
    yield "|---|---|" + "---:|" * len(runs) + "---:|---|"
    for goal in SPEED:
        yield line(runs, [speed(goal, run["works"]) for run in runs])
    for each in GROWTH:
        yield line(runs, [growth(*each, run["works"]) for run in runs])
    yield line(runs, [memory(run["memory"]) for run in runs])


def line(runs: list[dict[str, Any]], outcomes: list[Outcome]) -> str:
    """A goal on every machine."""
    first = outcomes[0]
    met = [
        run["machine"]["cpu"] for run, outcome in zip(runs, outcomes, strict=True) if outcome.met
    ]
    verdict = "met" if len(met) == len(runs) else f"met on {', '.join(met)}" if met else "not met"
    cells = [outcome.measured for outcome in outcomes]
    against = PEERS.get(first.against, first.against)
    return f"| {first.text} | {against} | {' | '.join(cells)} | {first.goal} | {verdict} |"


def column(run: dict[str, Any]) -> str:
    """The head of a machine's column."""
    about = run["machine"]
    return f"{about['cpu']}, {about['isa']}, {about['date']}, {run['rounds']} rounds"


def short(outcome: Outcome) -> str:
    """A ratio without its quartiles."""
    return outcome.measured.partition("x ")[0]


def main() -> None:
    """Print, and write where that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--docs", action="store_true", help="write the tables into the docs")
    options = parser.parse_args()
    runs = results()
    publish(MARK, goals(runs), write=options.docs, page=MANAGER)
    publish(MARK, readme(runs), write=options.docs, page=README)


if __name__ == "__main__":
    main()
