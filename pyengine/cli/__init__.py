"""The command line, `pyengine`. `pyengine --help` lists the commands."""

import atexit
import gc
import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING

from pyengine.cli.status import interruptible_imports, report
from pyengine.utils.openmp import wait_briefly

if TYPE_CHECKING:
    from pyengine.cli.backend import EngineFactory


def main(factory: "EngineFactory | None" = None) -> None:
    """Run the command line. If libraries are missing, name the extra that installs them.

    `factory` creates the engines, by default real ones.
    """
    if sys.platform == "win32":
        raise SystemExit(_run_on_windows())
    wait_briefly()
    # Imports create many objects (torch a million) and free none: collections would take a fifth
    # of the time to the first token. `open_llm` turns them on again.
    gc.disable()
    end = _QuickEnd()
    atexit.register(end.leave)  # handlers run in reverse order, so this one last
    _prepare_streams()
    try:
        with interruptible_imports():
            from pyengine.cli.app import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        if (status := _run_bare()) is not None:
            raise SystemExit(status) from None
        from pyengine.utils.packaging import needs_extra

        print(f"error: {needs_extra('engine', 'the command line', 'typer')}", file=sys.stderr)
        raise SystemExit(1) from None
    try:
        app(obj=factory)
    except (KeyboardInterrupt, OSError) as error:  # raised outside of a command
        end.status = report(error)
        raise SystemExit(end.status) from None
    except SystemExit as left:
        end.status = left.code if isinstance(left.code, int) else None
        raise
    finally:
        _discard_unwritable_output()


def _run_on_windows() -> int:
    """Run the commands that need the block manager only; refuse the rest."""
    if (status := _run_bare()) is not None:
        return status
    from pyengine.utils.packaging import require_posix

    try:
        require_posix("the command line")
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
    return 1


def _run_bare() -> int | None:
    """Run `trace` or `doctor`, which work in the base install; None for other commands."""
    if sys.argv[1:2] not in (["trace"], ["doctor"]):
        return None
    import argparse
    from pathlib import Path

    parser = argparse.ArgumentParser("pyengine")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor").add_argument("--json", action="store_true")
    recordings = commands.add_parser("trace").add_subparsers(dest="action", required=True)
    for action in ("replay", "view"):
        below = recordings.add_parser(action)
        below.add_argument("file", type=Path, help="recording written by `BlockManager.record`")
    below.add_argument("--port", type=int, default=0, help="0: any free one")
    below.add_argument("--open", action="store_true", help="open the browser")
    given = parser.parse_args()
    try:
        if given.command == "doctor":
            from pyengine.cli.doctor import examine

            return examine(as_json=given.json)
        from pyengine.cli.recordings import show_recording, view_recording

        if given.action == "replay":
            return show_recording(given.file)
        view_recording(given.file, port=given.port, is_opened=given.open)
    except (Exception, KeyboardInterrupt) as error:
        return report(error)
    return 0


class _QuickEnd:
    """Exits at once after all handlers have run and output is flushed.

    Freeing the million objects of torch and transformers would take the interpreter seconds.
    """

    status: int | None = None
    """Exit status of the command; None if it ended with another exception."""

    def leave(self) -> None:
        """Called by `atexit` after other threads have ended."""
        if self.status is None or "torch" not in sys.modules:
            return
        with suppress(OSError, ValueError):  # the interpreter reports output that fails
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.status)


def _discard_unwritable_output() -> None:
    """Discard buffered output that cannot be written, for example to a full disk.

    Otherwise the interpreter would try again at exit and change the status to 120.
    """
    try:
        sys.stderr.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


def _prepare_streams() -> None:
    """Make sure that all three streams exist and can encode any text."""
    for name, mode, errors in (
        ("stdin", "r", "surrogateescape"),
        ("stdout", "w", "backslashreplace"),
        ("stderr", "w", "backslashreplace"),
    ):
        if getattr(sys, name) is None:  # closed by the parent: the next open file would be it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)
