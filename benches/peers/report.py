"""The report of a run: the machine, the tables, the file."""

import datetime
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benches.peers.goals import OURS, Outcome
from benches.peers.sampling import Rounds, Spread

RESULTS = Path(__file__).parents[1] / "results"
_LEVELS = (("amx", "amx_tile"), ("avx512", "avx512f"), ("avx2", "avx2"))
"""Names of instruction levels, the best first, and the processor's flag for each."""
_FAMILIES = ("xeon", "epyc", "ryzen", "core", "neoverse", "graviton")
LIBRARIES = ("numpy", "torch", "xxhash", "matplotlib")


def machine() -> dict[str, Any]:
    """The processor, the system, the date, and the commit that is measured."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    cores = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": len(cores),
        "isa": _level(flags),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
    }


def _level(flags: set[str]) -> str:
    """The instruction level that the processor has, and the one that this process is held to."""
    level = next((name for name, flag in _LEVELS if flag in flags), platform.machine())
    held = os.environ.get("PYENGINE_CPU_ISA")
    return f"{level} held to {held}" if held else level


def commit() -> str:
    """The commit of this checkout, with `+` where files differ from it; empty without git."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def machine_name(about: Mapping[str, Any]) -> str:
    """A short name of a kind of machine, for files and marks: `xeon-amx`."""
    cpu = str(about["cpu"]).lower()
    family = next((name for name in _FAMILIES if name in cpu), "")
    level = str(about["isa"]).replace(" ", "-")
    return f"{family or re.sub(r'[^a-z0-9]+', '-', cpu).strip('-')}-{level}"


def results_name(name: str) -> str:
    """The name of this machine's file of results."""
    return f"{name}-{machine_name(machine())}"


def results_file(name: str) -> Path:
    """The file of results with this name."""
    return RESULTS / f"{name}.json"


def heading(about: Mapping[str, Any], rounds: Iterable[int] = ()) -> str:
    """The machine and the date of a table, and how many rounds its medians are of."""
    text = f"{about['cpu']} ({about['isa']}), {about['cores']} cores, {about['date']}"
    counts = sorted(set(rounds))
    if not counts:
        return text
    if counts == [1]:
        return f"{text}, one round"
    span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{text}, medians of {span} rounds"


def libraries() -> dict[str, str]:
    """Versions of what the managers stand on."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def figures(rounds: Rounds, parts: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Microseconds of each part: median, quartiles, all rounds."""
    columns = [[ns / 1000 for ns in column] for column in zip(*rounds, strict=True)]
    spreads = {}
    for part, column in zip(parts, columns, strict=True):
        spread = Spread.of(column)
        spreads[part] = {
            "median": round(spread.median, 4),
            "q1": round(spread.q1, 4),
            "q3": round(spread.q3, 4),
            "rounds": [round(us, 4) for us in column],
        }
    return spreads


def shown(us: float) -> str:
    """Three digits."""
    return f"{us:,.0f}" if us >= 100 else f"{us:.3g}"


def works_table(works: dict[str, Any]) -> Iterator[str]:
    """Microseconds, and how many times ours."""
    yield "| work | manager | us | quartiles | x ours |"
    yield "|---|---|---:|---:|---:|"
    for work, managers in works.items():
        for manager, parts in managers.items():
            ours = managers.get(OURS, {})
            for part, figure in parts.items():
                name = work if part == "us" else f"{work}: {part}"
                against = ours.get(part, {}).get("median")
                ratio = f"{figure['median'] / against:,.1f}" if against else ""
                quartiles = f"{shown(figure['q1'])} to {shown(figure['q3'])}"
                yield f"| {name} | {manager} | {shown(figure['median'])} | {quartiles} | {ratio} |"


def goals_table(outcomes: list[Outcome]) -> Iterator[str]:
    """Goal by goal."""
    yield "| work | against | goal | measured (quartiles) | |"
    yield "|---|---|---:|---:|---|"
    for row in outcomes:
        yield f"| {row.text} | {row.against} | {row.goal} | {row.measured} | {row.verdict} |"


def replay_table(replays: dict[str, Any]) -> Iterator[str]:
    """Workload by workload."""
    yield (
        "| workload | manager | hit rate | duplicate blocks stored | duplicate tokens computed "
        "| of those computed | manager time per prompt, us |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|"
    for name, workload in replays.items():
        for manager, row in workload["managers"].items():
            stored, computed = row["duplicate_blocks_stored"], row["duplicate_tokens_computed"]
            yield (
                f"| {name} | {manager} | {row['hit_rate']:.1%} | {stored:,} | {computed:,} "
                f"| {row['duplicate_share']:.1%} | {shown(row['us_per_prompt'])} |"
            )


def memory_table(memory: dict[str, float]) -> Iterator[str]:
    """This manager's own."""
    yield f"| pool of {memory['num_blocks']:,.0f} blocks of 16 tokens, all in use | |"
    yield "|---|---:|"
    yield f"| the whole process | {memory['process_mb']:,.0f} MB |"
    yield f"| bytes per block | {memory['bytes_per_block']:.0f} |"
    yield f"| bytes per block before its first use | {memory['bytes_per_block_before_use']:.0f} |"
    yield f"| bytes per sequence | {memory['bytes_per_sequence']:.0f} |"
    yield f"| bytes per token of a sequence | {memory['bytes_per_token']:.1f} |"


def text(results: dict[str, Any], outcomes: list[Outcome]) -> Iterator[str]:
    """The whole report, in Markdown."""
    described = results["machine"]
    yield (
        f"{described['cpu']}, {described['cores']} cores, Python {described['python']}, "
        f"{described['date']}, load {described['load_at_start']} at the start"
    )
    yield ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    for name, reason in results["missing"].items():
        yield f"MISSING: {name}: {reason}"
    if results["works"]:
        yield from ("", "## Works", "", *works_table(results["works"]))
    if results["replay"]:
        yield from ("", "## Replay", "")
        for name, workload in results["replay"].items():
            pool = f"{workload['num_blocks']:,} blocks of {workload['block_size']}"
            yield f"- {name}: {workload['about']}; {pool}"
        yield from ("", *replay_table(results["replay"]))
    if results["memory"]:
        yield from ("", "## Memory", "", *memory_table(results["memory"]))
    yield from ("", "## Goals", "", *goals_table(outcomes))
