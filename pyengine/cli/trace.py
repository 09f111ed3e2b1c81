"""`pyengine trace replay`: what a recording of the block manager does, and if it still does."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from pyengine.cache import Divergence, Ledger, ReplayReport, Stats, TraceError, replay
from pyengine.cli.display import note, print_rows, write
from pyengine.cli.options import FAILED, guarded
from pyengine.core.errors import InvalidRequestError

trace = typer.Typer(name="trace", no_args_is_help=True)


@trace.callback()
def root() -> None:
    """Recordings of the block manager, written by `BlockManager.record`."""


@trace.command("replay")
def replay_file(
    file: Annotated[Path, typer.Argument(help="What `BlockManager.record` has written.")],
) -> None:
    """Replay FILE and print what it does; status 1 if an operation is answered otherwise now."""
    with guarded():
        started = time.perf_counter()
        report = _replay(file)
        seconds = time.perf_counter() - started
        print_rows("settings", {**report.settings, "recorded by": report.recorded_by})
        print_rows("operations", _grouped(report.operations))
        figures = _grouped(_figures(report.stats))
        rate = _hit_rate(report.stats)
        print_rows("figures", {**figures, "hit rate": rate, "seconds": f"{seconds:.3f}"})
        print_rows("ledger at the end", _grouped(_ledger(report.ledger)))
        if report.failed_check is not None:
            note(f"check() failed: {report.failed_check}")
        if report.divergence is not None:
            _print_divergence(report.divergence)
        if report.failed_check is not None or report.divergence is not None:
            raise typer.Exit(FAILED)
        write(f"{_verdict(report)}\n", bold=True)


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


def _ledger(ledger: Ledger) -> dict[str, int]:
    return {
        "free": ledger.free,
        "idle": ledger.idle,
        "active": ledger.active,
        "leased": ledger.leased,
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
