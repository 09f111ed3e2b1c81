"""Shows a recording of the block manager on a local page. Works without typer."""

import argparse
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pyengine.cli.status import report
from pyengine.cli.terminal import write
from pyengine.errors import InvalidRequestError
from pyengine.kv_cache import TraceError


def run_bare(arguments: Sequence[str]) -> int:
    """`pyengine trace view` without typer: parses the arguments, returns the exit status."""
    parser = argparse.ArgumentParser("pyengine trace view", description=view_recording.__doc__)
    parser.add_argument("file", type=Path, help="recording written by `BlockManager.record`")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--open", action="store_true", help="open the browser")
    given = parser.parse_args(arguments)
    try:
        view_recording(given.file, port=given.port, is_opened=given.open)
    except (Exception, KeyboardInterrupt) as error:
        return report(error)
    return 0


def view_recording(file: Path, *, port: int = 0, is_opened: bool = False) -> None:
    """Show FILE on a page of this machine, operation by operation, until Ctrl-C."""
    from pyengine.server.dashboard.trace_page import Recording, TraceServer

    try:
        recording = Recording(file)
    except TraceError as error:
        raise InvalidRequestError(f"{file}: {error}") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidRequestError(f"cannot read {file}: {reason}; give a recording") from error
    with TraceServer(recording, port) as server:
        write(f"{server.url}\n", bold=True)
        write(f"{recording.num_operations:,} operations; Ctrl-C ends it\n")
        if is_opened:
            webbrowser.open(server.url)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
