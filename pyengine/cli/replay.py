"""Replays a recording of the block manager and prints its figures. Works without typer."""

import time
from collections.abc import Mapping
from pathlib import Path

from pyengine.cli.display import print_rows
from pyengine.cli.status import FAILED
from pyengine.cli.terminal import note, write
from pyengine.errors import InvalidRequestError
from pyengine.kv_cache import Divergence, PoolUsage, ReplayReport, Stats, TraceError, replay


def show_recording(file: Path) -> int:
    """Replay FILE and print its figures; status 1 if an operation returns a different result."""
    started = time.perf_counter()
    replayed = _replay(file)
    seconds = time.perf_counter() - started
    print_rows("settings", {**replayed.settings, "recorded by": replayed.recorded_by})
    print_rows("operations", _grouped(replayed.operations))
    figures = _grouped(_figures(replayed.stats))
    rate = _hit_rate(replayed.stats)
    print_rows("figures", {**figures, "hit rate": rate, "seconds": f"{seconds:.3f}"})
    print_rows("usage at the end", _grouped(_usage(replayed.usage)))
    if replayed.failed_check is not None:
        note(f"check() failed: {replayed.failed_check}")
    if replayed.divergence is not None:
        _print_divergence(replayed.divergence)
    if replayed.failed_check is not None or replayed.divergence is not None:
        return FAILED
    write(f"{_verdict(replayed)}\n", bold=True)
    return 0


def _replay(file: Path) -> ReplayReport:
    try:
        return replay(file)
    except TraceError as error:
        raise InvalidRequestError(f"{file}: {error}") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidRequestError(f"cannot read {file}: {reason}; give a recording") from error


def _figures(stats: Stats) -> dict[str, int]:
    return {
        "steps committed": stats.committed_steps,
        "steps rolled back": stats.rolled_back_steps,
        "prompt tokens": stats.prompt_tokens,
        "prompt tokens cached": stats.cached_tokens,
        "tokens computed": stats.computed_tokens,
        "blocks allocated": stats.allocated_blocks,
        "blocks evicted": stats.evicted_blocks,
        "blocks merged": stats.merged_blocks,
    }


def _hit_rate(stats: Stats) -> str:
    prompt = stats.prompt_tokens
    return f"{stats.cached_tokens / prompt:.1%}" if prompt else "no prompts"


def _usage(usage: PoolUsage) -> dict[str, int]:
    states = ("free", "evictable", "active", "pinned", "loading")
    return {name: getattr(usage, name) for name in states}


def _grouped(counts: Mapping[str, int]) -> dict[str, str]:
    return {name: f"{count:,}" for name, count in counts.items()}


def _print_divergence(divergence: Divergence) -> None:
    note(
        f"operation {divergence.operation} returned a different result\n"
        f"  call      {divergence.call}\n"
        f"  recorded  {divergence.recorded}\n"
        f"  obtained  {divergence.obtained}"
    )


def _verdict(report: ReplayReport) -> str:
    count = sum(report.operations.values())
    end = "" if report.is_complete else "; the recording was not closed by stop_recording()"
    return f"{count:,} operations, all results as recorded{end}"
