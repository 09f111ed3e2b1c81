"""The typer application and `pyengine info`. Nothing heavy is imported here."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from pyengine.cli.backend import factory_of
from pyengine.cli.cache import cache
from pyengine.cli.chat import chat
from pyengine.cli.display import print_rows
from pyengine.cli.generate import generate
from pyengine.cli.options import command
from pyengine.cli.serve import serve
from pyengine.cli.trace import trace
from pyengine.config import EngineSettings
from pyengine.utils.packaging import package_version

LIBRARIES = ("numpy", "torch", "transformers", "tokenizers", "safetensors", "gguf")

app = typer.Typer(
    name="pyengine",
    help="Run language models through a Rust KV-cache block manager.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"auto_envvar_prefix": "PYENGINE"},  # PYENGINE_SERVE_PORT, and so on
)


@command()
def info(context: typer.Context, *, settings: EngineSettings) -> None:
    """Print versions, then open the model and print device, attention backend and why."""
    versions = _versions()
    print_rows("versions", versions)
    engine = factory_of(context)(settings)
    rows = {key: value for key, value in engine.describe().items() if key not in versions}
    print_rows("engine", {"model_path": engine.model_path, **rows})


app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(info)
app.add_typer(trace)
app.add_typer(cache)


def _versions() -> dict[str, object]:
    found: dict[str, object] = {"pyengine": package_version(), "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


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
