"""The typer application and `pyengine info`. Nothing heavy is imported here."""

import platform
from typing import Annotated

import typer

from pyengine.cli.backend import factory_of
from pyengine.cli.bench import bench
from pyengine.cli.cache import cache
from pyengine.cli.chat import chat
from pyengine.cli.completion import Shell, print_completion
from pyengine.cli.display import print_rows
from pyengine.cli.doctor import JSON_HELP, examine
from pyengine.cli.explain import explain
from pyengine.cli.generate import generate
from pyengine.cli.models import list_models, pull
from pyengine.cli.options import command, guarded
from pyengine.cli.serve import serve
from pyengine.cli.trace import trace
from pyengine.config import EngineSettings
from pyengine.utils.packaging import installed_version, package_version

LIBRARIES = ("numpy", "torch", "transformers", "tokenizers", "safetensors", "gguf")

app = typer.Typer(
    name="pyengine",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
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


@app.command("doctor", help=examine.__doc__, short_help="Find what is missing or slow.")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP, show_envvar=False)] = False,
) -> None:
    """Examine this machine."""
    with guarded():
        status = examine(as_json=as_json)
    if status:
        raise typer.Exit(status)


for body, summary in (
    (generate, "Answer one prompt, or many from a file."),
    (chat, "Chat with the model."),
    (serve, "Serve a model with OpenAI's HTTP API."),
    (info, "Open the model and print what the engine uses."),
):
    app.command(short_help=summary)(body)
app.command(short_help="Is this machine as fast as it should be?")(bench)
app.command(short_help="Where do two prompts differ, for the cache?")(explain)
app.command(short_help="Download a model and check it.")(pull)
app.command("list", short_help="Print the models on this machine.")(list_models)
app.add_typer(trace)
app.add_typer(cache)


def _versions() -> dict[str, object]:
    found: dict[str, object] = {"pyengine": package_version(), "python": platform.python_version()}
    return found | {name: installed_version(name) or "not installed" for name in LIBRARIES}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pyengine {package_version()}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version.",
            callback=_print_version,
            is_eager=True,
            show_envvar=False,
        ),
    ] = False,
    completion: Annotated[
        Shell | None,
        typer.Option(
            help="Print a script for this shell, which completes commands and options.",
            callback=print_completion,
            is_eager=True,
            show_envvar=False,
        ),
    ] = None,
) -> None:
    """Run language models through a Rust KV-cache block manager.

    Each option may also be in the environment: PYENGINE_SERVE_PORT is --port of serve. Commands
    that open a model read a file of options, too: --config FILE.
    """
