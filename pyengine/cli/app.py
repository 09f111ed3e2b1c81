"""The typer application and `pyengine info`. Nothing heavy is imported here."""

import platform
from typing import Annotated, Any, Literal

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]
from typer.core import TyperGroup

from pyengine.cli.backend import factory_of
from pyengine.cli.bench import bench
from pyengine.cli.cache import cache
from pyengine.cli.chat import chat
from pyengine.cli.display import print_rows
from pyengine.cli.doctor import examine
from pyengine.cli.explain import explain
from pyengine.cli.generate import generate
from pyengine.cli.models import MODELS, list_models, pull
from pyengine.cli.options import Command, Json, command, guarded
from pyengine.cli.serve import serve
from pyengine.cli.terminal import write
from pyengine.cli.trace import trace
from pyengine.config import EngineSettings
from pyengine.utils.packaging import documentation, installed_version, package_version

LIBRARIES = ("numpy", "torch", "transformers", "tokenizers", "safetensors", "gguf")

_VARIABLE = "_PYENGINE_COMPLETE"
"""The script of a shell sets it when it asks for completions."""

ELSEWHERE = {
    "run": "`pyengine chat`, or `pyengine generate PROMPT` for one answer",
    "complete": "`pyengine generate PROMPT`",
    "ls": "`pyengine list`",
    "show": "`pyengine info MODEL`",
    "download": "`pyengine pull MODEL`",
    "start": "`pyengine serve MODEL`",
    "version": "`pyengine -V`",
}
"""Commands of other programs, and what they are here."""


class Group(TyperGroup):
    """The commands. One that another program has is refused with the name that it has here."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; called by typer."""
        if args[0] in ELSEWHERE:
            ctx.fail(f"there is no command {args[0]!r}: use {ELSEWHERE[args[0]]}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="pyengine",
    cls=Group,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={
        "auto_envvar_prefix": "PYENGINE",  # PYENGINE_SERVE_PORT, and so on
        "help_option_names": ["-h", "--help"],
        "max_content_width": 120,  # or the terminal's, if that is less
    },
)


@command()
def info(context: typer.Context, *, settings: EngineSettings) -> None:
    """Print versions, then open the model and print device, attention backend and why."""
    versions: dict[str, object] = {"pyengine": package_version()}
    versions["python"] = platform.python_version()
    versions |= {name: installed_version(name) or "not installed" for name in LIBRARIES}
    print_rows("versions", versions)
    engine = factory_of(context)(settings)
    rows = {key: value for key, value in engine.describe().items() if key not in versions}
    print_rows("engine", {"model_path": engine.model_path, **rows})


def show_help(
    context: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]", help="A command, or `models`.")
    ] = None,
) -> None:
    """Show help on a command; `models` lists models to start with, their size and memory."""
    if words == ["models"]:
        write(f"{'MODEL (-m MODEL downloads it)':<48}  {'file':>6}  memory\n", bold=True)
        write("".join(f"{name:<48}  {size}  {memory}\n" for name, size, memory in MODELS))
        return
    root: Any = context.find_root().command
    root.main([*(words or []), "--help"], prog_name="pyengine", standalone_mode=False)
    if not words and (address := documentation()):
        write(f"\nDocumentation: {address}\n")


def doctor(as_json: Json = False) -> None:
    """Print versions, machine and findings; status 1 if something is missing or slow."""
    with guarded():
        status = examine(as_json=as_json)
    if status:
        raise typer.Exit(status)


for body, name, summary in (
    (generate, "generate", "Answer one prompt, or many from a file."),
    (chat, "chat", "Chat with the model."),
    (serve, "serve", "Serve a model with OpenAI's HTTP API."),
    (info, "info", "Open the model and print what the engine uses."),
    (bench, "bench", "Is this machine as fast as it should be?"),
    (explain, "explain", "Where do two prompts differ, for the cache?"),
    (pull, "pull", "Download a model and check it."),
    (list_models, "list", "Print the models on this machine."),
    (doctor, "doctor", "Find what is missing or slow."),
    (show_help, "help", "Help on a command, or on models to start with."),
):
    app.command(name, cls=Command, short_help=summary)(body)
app.add_typer(trace)
app.add_typer(cache)
completion_init()  # the scripts of --completion may ask now


def _print_completion(shell: str | None) -> None:
    if shell is not None:
        typer.echo(get_completion_script(prog_name="pyengine", complete_var=_VARIABLE, shell=shell))
        raise typer.Exit


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pyengine {package_version()}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool,
        typer.Option(
            *("--version", "-V"),
            help="Print the version.",
            callback=_print_version,
            is_eager=True,
            show_envvar=False,
        ),
    ] = False,
    completion: Annotated[
        Literal["bash", "zsh", "fish"] | None,
        typer.Option(
            help="Print a script for this shell, which completes commands and options.",
            callback=_print_completion,
            is_eager=True,
            show_envvar=False,
        ),
    ] = None,
) -> None:
    """Run language models through a Rust KV-cache block manager.

    Each option may also be in the environment: PYENGINE_SERVE_PORT is --port of serve. Commands
    that open a model read a file of options, too: --config FILE.
    """
