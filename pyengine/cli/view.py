"""Shows a recording of the block manager on a local page. Works without typer."""

import webbrowser
from contextlib import suppress
from pathlib import Path

from pyengine.cli.terminal import write
from pyengine.errors import InvalidRequestError
from pyengine.kv_cache import TraceError


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
