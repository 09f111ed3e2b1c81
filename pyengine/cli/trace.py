"""`pyengine trace`: replays a recording of the block manager, or shows it on a local page."""

from pathlib import Path
from typing import Annotated

import typer

from pyengine.cli.options import Command, guarded
from pyengine.cli.recordings import show_recording, view_recording

trace = typer.Typer(name="trace", no_args_is_help=True)

_File = Annotated[Path, typer.Argument(help="Recording written by `BlockManager.record`.")]


@trace.callback()
def root() -> None:
    """Replay recordings of the block manager."""


@trace.command(
    "replay", cls=Command, help=show_recording.__doc__, short_help="Replay FILE and compare."
)
def replay_file(file: _File) -> None:
    """Replay a recording."""
    with guarded():
        status = show_recording(file)
    if status:
        raise typer.Exit(status)


@trace.command("view", cls=Command, help=view_recording.__doc__, short_help="Show FILE by steps.")
def view_file(
    file: _File,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 0,
    is_opened: Annotated[bool, typer.Option("--open", help="Open the browser.")] = False,
) -> None:
    """Show a recording on a local page."""
    with guarded():
        view_recording(file, port=port, is_opened=is_opened)
