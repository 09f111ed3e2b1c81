"""The typer application. Commands live in files of their own; nothing heavy is imported here."""

from typing import Annotated

import typer

from pyengine.cli.chat import chat
from pyengine.cli.generate import generate
from pyengine.cli.info import info
from pyengine.cli.trace import trace
from pyengine.core.distribution import package_version

app = typer.Typer(
    name="pyengine",
    help="Run language models through a Rust KV-cache block manager.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(chat)
app.command()(info)
app.add_typer(trace)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pyengine {package_version()}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Run language models through a Rust KV-cache block manager."""
