"""Runs the benchmark in the peers' environment, which `benches/peers/env.py` makes.

    .venv-peers/bin/python -m benches.peers [--quick] [--only NAME ...] [--rounds N]

from the root of the repository. The table goes to standard output, progress to standard error,
everything to `benches/results/NAME.json`, plots to `docs/images`.
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path
from time import perf_counter
from typing import Any

from benches.peers import goals, memory, report, scaling, works
from benches.peers.adapters import Loaded, load
from benches.peers.adapters.base import STEPS, Manager
from benches.peers.replay import replay
from benches.peers.sampling import Effort, interleave
from benches.peers.traces import workloads

ROOT = Path(__file__).resolve().parents[2]
REPLAYED = {"pyengine", "vLLM sha256", "nano-vllm"}


class Run:
    """One run and what it found."""

    def __init__(self, options: argparse.Namespace, loaded: Loaded) -> None:
        self.options, self.managers = options, loaded.managers
        rounds = options.rounds or (3 if options.quick else 15)
        self.effort = Effort(rounds, 0.3 if options.quick else 2.0)
        self.began = perf_counter()
        self.results: dict[str, Any] = {
            "machine": report.machine(),
            "versions": loaded.versions | report.libraries(),
            "missing": loaded.missing,
            "rounds": rounds,
            "works": {},
            "replay": {},
            "memory": {},
        }

    def wanted(self, name: str) -> bool:
        """Whether `--only` lets it run."""
        patterns = self.options.only
        return not patterns or any(fnmatch(name, f"*{pattern}*") for pattern in patterns)

    def say(self, line: str, end: str = "\n") -> None:
        """Progress."""
        seconds = perf_counter() - self.began
        clear = "\r\033[K" if sys.stderr.isatty() else ""
        if clear or end:
            print(f"{clear}{seconds:5.0f} s  {line}", end=end, file=sys.stderr, flush=True)

    def progress(self, name: str) -> Any:
        """Something to call after each round."""
        done = 0

        def one_more() -> None:
            nonlocal done
            done += 1
            self.say(f"{name}: {done}", end="")

        return one_more

    def time(self, key: str, streams: dict[str, Any], parts: tuple[str, ...]) -> None:
        """Takes turns on one work."""
        rounds = interleave(streams, self.effort, self.progress(key))
        figures = {name: report.figures(turns, parts) for name, turns in rounds.items()}
        self.results["works"][key] = figures
        last = parts[-1]
        medians = [f"{name} {report.shown(f[last]['median'])}" for name, f in figures.items()]
        self.say(f"{key}: {', '.join(medians)} us")

    def micro(self) -> None:
        """The works, grouped by the pool that they share."""
        by_block = defaultdict(list)
        for work in works.works():
            if self.wanted(work.key) and (work.quick or not self.options.quick):
                by_block[work.block_size].append(work)
        for block_size, group in by_block.items():
            needed = {work.needs for work in group}
            kinds = [kind for kind in self.managers if kind.works & needed]
            num_blocks = works.POOL_TOKENS // block_size
            self.say(f"filling {len(kinds)} pools of {num_blocks:,} blocks of {block_size}")
            worlds = [works.World(kind, num_blocks, block_size) for kind in kinds]
            for work in group:
                users = [world for world in worlds if work.needs in world.kind.works]
                streams = {world.kind.name: work.of(world) for world in users}
                self.time(work.key, streams, work.parts)

    def scale(self) -> None:
        """Pools of every size."""
        keys = [key for key in scaling.WORKS if self.wanted(key)]
        if not keys:
            return
        self.say("filling pools of every size")
        pools = scaling.worlds(self.managers, self.options.quick)
        for key in keys:
            self.time(key, scaling.streams(key, pools), ("us",))

    def traces(self) -> None:
        """The replays."""
        folder = self.options.traces
        if not self.wanted("replay"):
            return
        if folder is None or not folder.is_dir():
            self.say("replay: skipped, --traces names no folder (see benches/peers/traces.py)")
            return
        kinds: list[type[Manager]] = [
            kind for kind in self.managers if STEPS in kind.works and kind.name in REPLAYED
        ]
        for workload in workloads(folder, self.options.quick):
            figures = replay(workload, kinds, self.progress(workload.name))
            self.results["replay"][workload.name] = {
                "about": workload.about,
                "block_size": workload.block_size,
                "num_blocks": workload.num_blocks,
                "managers": figures,
            }
            self.say(f"replay: {workload.name}, {workload.about}")

    def weigh(self) -> None:
        """Memory."""
        if self.wanted("memory"):
            self.results["memory"] = memory.in_a_process(10**6 if self.options.quick else 10**7)
            self.say("memory")

    def all(self) -> dict[str, Any]:
        """Everything that is wanted."""
        self.weigh()
        self.micro()
        self.scale()
        self.traces()
        return self.results


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benches.peers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    traces = os.environ.get("PYENGINE_TRACES")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no large sizes")
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="works whose name contains this, * allowed; also scale, replay, memory; repeatable",
    )
    parser.add_argument("--rounds", type=int, help="rounds per work (15; 3 with --quick)")
    parser.add_argument(
        "--traces",
        type=Path,
        default=Path(traces) if traces else None,
        help="folder with the traces (PYENGINE_TRACES)",
    )
    parser.add_argument("--results", help="name of the JSON file (peers-MACHINE; else partial)")
    parser.add_argument(
        "--plots", type=Path, help="folder for the plots (docs/images for a whole run, else none)"
    )
    return parser.parse_args()


def main() -> None:
    """Run, print, write."""
    options = parse()
    whole = not options.quick and not options.only
    results = Run(options, load()).all()
    if not any(results[part] for part in ("works", "replay", "memory")):
        names = [work.key for work in works.works()] + [*scaling.WORKS, "replay", "memory"]
        sys.exit(f"nothing was run; --only takes parts of: {', '.join(names)}")
    outcomes = goals.outcomes(results["works"], results["memory"])
    results["goals"] = [vars(outcome) for outcome in outcomes]
    target = report.results_file(
        options.results or (report.results_name("peers") if whole else "partial")
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(report.text(results, outcomes)))
    print(f"\n{target.relative_to(ROOT)}", file=sys.stderr)
    folder = options.plots or (ROOT / "docs/images" if whole else None)
    if folder:
        from benches.peers import plots

        for path in plots.draw(results, folder):
            print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
