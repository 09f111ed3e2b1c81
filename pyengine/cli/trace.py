"""`pyengine trace replay`: replays a recording of the block manager and compares the results."""

from pathlib import Path
from typing import Annotated

import typer

from pyengine.cli.options import guarded
from pyengine.cli.replay import show_recording

trace = typer.Typer(name="trace", no_args_is_help=True)


@trace.callback()
def root() -> None:
    """Replay recordings of the block manager."""


@trace.command("replay", help=show_recording.__doc__, short_help="Replay FILE and compare.")
def replay_file(
    file: Annotated[Path, typer.Argument(help="Recording written by `BlockManager.record`.")],
) -> None:
    """Replay a recording."""
    with guarded():
        status = show_recording(file)
    if status:
        raise typer.Exit(status)
