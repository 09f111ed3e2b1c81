"""The tables of `benches.engine.floor`: parts of a step, their floors, and the largest gaps."""

from collections.abc import Iterator
from typing import Any

from benches.engine.floor.machine import Limits, limits_of
from benches.engine.floor.parts import BETWEEN, PARTS, Arithmetic
from benches.peers.report import heading

_GAPS = 4
"""Parts that the summary names."""


def tables(content: dict[str, Any]) -> Iterator[str]:
    """A summary of all steps, then a table of parts for each; in markdown."""
    variants = content["variants"]
    rounds = " or ".join(sorted({f"{variant['rounds']}" for variant in variants.values()}))
    yield f"{heading(content['machine'])}, the fastest quarter of the steps of {rounds} rounds"
    yield ""
    for name, variant in variants.items():
        yield f"- {name}: {_limits_text(limits_of(variant['limits']))}"
    yield from _summary(variants)
    for name, variant in variants.items():
        limits = limits_of(variant["limits"])
        for step, figures in variant["steps"].items():
            yield from _parts(f"{name}, {step}", figures, limits)


def _limits_text(limits: Limits) -> str:
    reading, alone, again = limits.reading, limits.reading_alone, limits.reading_again
    peaks = ", ".join(
        f"{kind} {rate.per_second / 1e9:,.0f} ({rate.program})"
        for kind, rate in limits.peaks.items()
    )
    return (
        f"{limits.threads} threads read {reading.per_second / 1e9:.1f} GB/s of memory "
        f"({reading.program}), one thread {alone.per_second / 1e9:.1f}; "
        f"{limits.weight_bytes / 1e6:,.0f} MB, as many as the weights, again and again "
        f"{again.per_second / 1e9:.1f}. Products, GFLOP/s: {peaks}"
    )


def rates(figures: dict[str, Any]) -> tuple[float, float]:
    """Tokens per second of a step, and those of its floor."""
    parts = figures["parts"].values()
    measured, floor = (sum(part[name] for part in parts) for name in ("seconds", "floor"))
    return figures["tokens"] / measured, figures["tokens"] / floor


def _summary(variants: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "| step | tokens/s | floor's | measured / floor's | most above their floors, ms |"
    yield "|---|---:|---:|---:|---|"
    for name, variant in variants.items():
        for step, figures in variant["steps"].items():
            rate, highest = rates(figures)
            parts = figures["parts"]
            gaps = {part: figure["seconds"] - figure["floor"] for part, figure in parts.items()}
            largest = sorted(gaps, key=gaps.__getitem__, reverse=True)[:_GAPS]
            text = ", ".join(f"{part} {gaps[part] * 1e3:.1f}" for part in largest)
            cells = f"{rate:,.1f} | {highest:,.1f} | {rate / highest:.2f} | {text}"
            yield f"| {name}, {step} | {cells} |"


def _parts(title: str, figures: dict[str, Any], limits: Limits) -> Iterator[str]:
    parts = figures["parts"]
    whole = sum(part["seconds"] for part in parts.values())
    floor = sum(part["floor"] for part in parts.values())
    threads = f"one thread / {limits.threads}"
    yield f"\n| {title} | MB | MFLOP | floor, ms | ms | floor / ms | share | {threads} |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for name in PARTS:
        part = parts.get(name)
        if part is None or not (part["seconds"] or part["floor"]):
            continue
        yield _row(name, part, whole)
    names = ("bytes", "operations", "seconds_of_one_thread")
    sums = {name: sum(part[name] for part in parts.values()) for name in names}
    yield _row("whole step", {**sums, "seconds": whole, "floor": floor}, whole)
    rate, highest = rates(figures)
    yield (
        f"\n{rate:,.1f} tokens per second; the floor's {highest:,.1f}. {_waiting(figures, limits)}"
    )


def _row(name: str, part: dict[str, float], whole: float) -> str:
    seconds, floor = part["seconds"], part["floor"]
    share = f"{floor / seconds:.2f}" if floor and seconds else ""
    sizes = f"{_size(part['bytes'])} | {_size(part['operations'])}"
    times = f"{floor * 1e3:.3f} | {seconds * 1e3:.3f}"
    gain = f"{part['seconds_of_one_thread'] / seconds:.2f}" if seconds else ""
    return f"| {name} | {sizes} | {times} | {share} | {seconds / whole:.1%} | {gain} |"


def _size(number: float) -> str:
    """Millions; empty if there are none."""
    if not number:
        return ""
    return f"{number / 1e6:,.0f}" if number >= 1e8 else f"{number / 1e6:.3g}"


def _waiting(figures: dict[str, Any], limits: Limits) -> str:
    """The cost of timers, and the time in which threads had no work or no processor."""
    idle = limits.threads * figures["seconds"] - figures["processor_seconds"]
    return (
        f"A step takes {figures['seconds_without_timers'] * 1e3:.2f} ms without timers, "
        f"{figures['seconds'] * 1e3:.2f} with them (`{BETWEEN}` not included). Of it, "
        f"{limits.threads} threads were {max(0.0, idle) * 1e3:.2f} ms not on a processor; "
        f"the engine's thread waited {figures['own_waiting'] * 1e3:.2f} ms for one, "
        f"the others {figures['other_waiting'] * 1e3:.2f} ms."
    )


def peaks_of(limits: Limits) -> dict[Arithmetic, float]:
    """Operations per second by kind of arithmetic."""
    return {kind: rate.per_second for kind, rate in limits.peaks.items()}
