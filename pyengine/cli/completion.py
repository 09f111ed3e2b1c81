"""`pyengine --completion SHELL`: a script that completes commands and options by typer."""

import os
from enum import StrEnum

import typer
from typer.completion import (  # type: ignore[attr-defined]
    completion_init,
    get_completion_script,
)

_VARIABLE = "_PYENGINE_COMPLETE"
"""The script sets it when it asks for completions."""


class Shell(StrEnum):
    """Shells with completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def answer_shells() -> None:
    """Let the application answer the requests of the script."""
    if _VARIABLE in os.environ:
        completion_init()


def print_completion(shell: Shell | None) -> None:
    """Print the script of a shell and exit; without a shell, do nothing."""
    if shell is None:
        return
    script = get_completion_script(prog_name="pyengine", complete_var=_VARIABLE, shell=shell.value)
    typer.echo(script)
    raise typer.Exit
