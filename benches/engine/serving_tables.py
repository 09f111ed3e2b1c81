"""The tables of `serving.py`, in markdown."""

from collections.abc import Iterator
from statistics import median
from typing import Any

from benches.peers.report import heading

SERVERS = OURS, VLLM, VLLM32 = "pyengine", "vllm", "vllm32"
AT_ONCE, SLOTS, ALONE = "offline, all at once", "offline, with slots", "engine alone"
TITLES = {
    OURS: "`pyengine serve --compile`",
    VLLM: "vLLM's server",
    VLLM32: "vLLM's, `--block-size 32`",
    SLOTS: "`LLM.generate`, a slot for each client",
    AT_ONCE: "`LLM.generate`, all at once",
    ALONE: "`AsyncEngine` alone",
}
GOAL = 0.95
"""Of the tokens per second of `LLM.generate` with a slot for each client."""
COLUMNS = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
HEAD = "tokens/s | first token, ms: p50 | p99 | between tokens, ms: p50 | p99"


def tables(content: dict[str, Any]) -> Iterator[str]:
    """In markdown."""
    about, loads = content["machine"], content["found"]
    rounds = {
        len(turns) for rows in loads.values() for name, turns in rows.items() if name in SERVERS
    }
    yield f"{heading(about, rounds)}, {content['dtype']}"
    for load, rows in loads.items():
        rate = content.get("rates", {}).get(load)
        yield ""
        yield f"| {load}{f' ({rate:.2f} a second)' if rate else ''} | {HEAD} |"
        yield "|---|---:|---:|---:|---:|---:|"
        for name, rounds in rows.items():
            cells = [cell(rounds, part) for part in COLUMNS]
            yield f"| {TITLES.get(name, name)} | {' | '.join(cells)} |"
        if (ratio := share_of_offline(rows)) is not None:
            met = "met" if ratio >= GOAL else "not met"
            yield f"\n{ratio:.2f} of {TITLES[SLOTS]}; goal {GOAL}, {met}."
    if "profile" in content:
        threads, loop = content["profile"]["threads"], content["profile"]["loop"]
        yield "\n| of a core, while the crowd is served | |\n|---|---:|"
        yield f"| event loop | {threads['MainThread']:.0%} |"
        yield f"| engine's thread | {threads['pyengine-engine']:.0%} |"
        yield "\n| of the event loop's work | |\n|---|---:|"
        for work, share in sorted(loop.items(), key=lambda item: -item[1]):
            yield f"| {work} | {share:.0%} |"
    for name, reason in content["missing"].items():
        yield f"\n{name}: missing ({reason})"


def cell(rounds: list[Any], part: str) -> str:
    """The median of the rounds; nothing where it was not measured."""
    values = [each_round[part] for each_round in rounds if part in each_round]
    return f"{median(values):,.0f}" if values else ""


def share_of_offline(rows: dict[str, list[Any]]) -> float | None:
    """Tokens per second of our server, of those without a server: the median of the rounds."""
    part = "output_throughput"
    pairs = zip(rows.get(OURS, []), rows.get(SLOTS, []), strict=False)
    ratios = [item[part] / other[part] for item, other in pairs]
    return median(ratios) if ratios else None
