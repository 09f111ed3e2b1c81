"""Replay a recording of the block manager and print what it does. Needs no typer."""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pyengine.cache import Divergence, PoolUsage, ReplayReport, Stats, TraceError, replay
from pyengine.cli.display import note, print_rows, write
from pyengine.cli.status import FAILED, report
from pyengine.core.errors import InvalidRequestError


def run_bare(arguments: Sequence[str]) -> int:
    """`pyengine trace replay` where typer is missing; returns the exit status.

    `argparse` reads the arguments, those after `replay`.
    """
    parser = argparse.ArgumentParser("pyengine trace replay", description=show_recording.__doc__)
    parser.add_argument("file", type=Path, help="what `BlockManager.record` has written")
    try:
        return show_recording(parser.parse_args(arguments).file)
    except (Exception, KeyboardInterrupt) as error:
        return report(error)


def show_recording(file: Path) -> int:
    """Replay FILE and print what it does; status 1 if an operation is answered otherwise now."""
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
        "contents evicted": stats.evicted_blocks,
        "blocks merged": stats.merged_blocks,
    }


def _hit_rate(stats: Stats) -> str:
    prompt = stats.prompt_tokens
    return f"{stats.cached_tokens / prompt:.1%}" if prompt else "no prompt was computed"


def _usage(usage: PoolUsage) -> dict[str, int]:
    return {
        "free": usage.free,
        "evictable": usage.evictable,
        "active": usage.active,
        "pinned": usage.pinned,
    }


def _grouped(counts: Mapping[str, int]) -> dict[str, str]:
    return {name: f"{count:,}" for name, count in counts.items()}


def _print_divergence(parted: Divergence) -> None:
    note(
        f"operation {parted.operation} is answered otherwise\n"
        f"  call      {parted.call}\n"
        f"  recorded  {parted.recorded}\n"
        f"  obtained  {parted.obtained}"
    )


def _verdict(report: ReplayReport) -> str:
    count = sum(report.operations.values())
    end = "" if report.is_complete else "; the recording was not ended by stop_recording()"
    return f"{count:,} operations, all answered as recorded{end}"
