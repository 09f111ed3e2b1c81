"""Recordings of the block manager: their figures, and a local page. Works without typer."""

import time
import webbrowser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pyengine.cli.display import print_rows
from pyengine.cli.status import FAILED
from pyengine.cli.terminal import note, write
from pyengine.errors import InvalidRequestError
from pyengine.kv_cache import BLOCK_STATES, Stats, TraceError, replay


def show_recording(file: Path) -> int:
    """Replay FILE and print its figures; status 1 if an operation returns a different result."""
    started = time.perf_counter()
    with _named(file):
        replayed = replay(file)
    seconds = time.perf_counter() - started
    print_rows("settings", {**replayed.settings, "recorded by": replayed.recorded_by})
    print_rows("operations", _grouped(replayed.operations))
    figures = _grouped(_figures(replayed.stats))
    prompt, cached = replayed.stats.prompt_tokens, replayed.stats.cached_tokens
    rate = f"{cached / prompt:.1%}" if prompt else "no prompts"
    print_rows("figures", {**figures, "hit rate": rate, "seconds": f"{seconds:.3f}"})
    usage = {state: getattr(replayed.usage, state) for state in BLOCK_STATES}
    print_rows("usage at the end", _grouped(usage))
    if replayed.failed_check is not None:
        note(f"check() failed: {replayed.failed_check}")
    if (divergence := replayed.divergence) is not None:
        note(
            f"operation {divergence.operation} returned a different result\n"
            f"  call      {divergence.call}\n"
            f"  recorded  {divergence.recorded}\n"
            f"  obtained  {divergence.obtained}"
        )
    if replayed.failed_check is not None or replayed.divergence is not None:
        return FAILED
    end = "" if replayed.is_complete else "; the recording was not closed by stop_recording()"
    count = sum(replayed.operations.values())
    write(f"{count:,} operations, all results as recorded{end}\n", bold=True)
    return 0


def view_recording(file: Path, *, port: int = 0, is_opened: bool = False) -> None:
    """Show FILE on a page of this machine, operation by operation, until Ctrl-C."""
    from pyengine.server.dashboard.trace_page import Recording, TraceServer

    with _named(file):
        recording = Recording(file)
    with TraceServer(recording, port) as server:
        write(f"{server.url}\n", bold=True)
        write(f"{recording.num_operations:,} operations; Ctrl-C ends it\n")
        if is_opened:
            webbrowser.open(server.url)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Turn errors about a recording into `InvalidRequestError`s that name it."""
    try:
        yield
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


def _grouped(counts: Mapping[str, int]) -> dict[str, str]:
    return {name: f"{count:,}" for name, count in counts.items()}
