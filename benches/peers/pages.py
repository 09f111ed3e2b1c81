"""The table of goals in docs/benchmarks/block-manager.md, from the stored results.

    .venv/bin/python -m benches.peers.pages [--docs]

from the root of the repository: prints it, a column for each machine that has a file of results;
`--docs` writes it into the page, between its marks.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from benches.engine.page import MANAGER, publish
from benches.peers.goals import (
    GROWTH,
    NANO,
    SGLANG,
    SPEED,
    VLLM,
    Outcome,
    growth,
    memory,
    speed,
)
from benches.peers.report import RESULTS

MARK = "block-manager"
PEERS = {VLLM: "vLLM 0.32 (sha256)", SGLANG: "SGLang's Rust index", NANO: "nano-vllm"}


def results() -> list[dict[str, Any]]:
    """The stored results of whole runs, by the name of the file."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("peers-*.json"))]


def goals(runs: list[dict[str, Any]]) -> Iterator[str]:
    """Goal by goal, with quartiles, and where it is met."""
    yield f"| work | against | {' | '.join(map(column, runs))} | goal | |"
    yield "|---|---|" + "---:|" * len(runs) + "---:|---|"
    for goal in SPEED:
        yield line(runs, [speed(goal, run["works"]) for run in runs])
    for row in GROWTH:
        yield line(runs, [growth(*row, run["works"]) for run in runs])
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


def main() -> None:
    """Print, and write where that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    options = parser.parse_args()
    publish(MARK, goals(results()), write=options.docs, page=MANAGER)


if __name__ == "__main__":
    main()
