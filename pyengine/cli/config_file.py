"""`--config FILE`: options from a TOML file, by their names on the command line."""

import inspect
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from pyengine.utils.validation import nearest


def config_option() -> inspect.Parameter:
    """The option `--config`. Other sources take precedence: command line, then environment."""
    option = typer.Option(
        "--config",
        help="TOML file of options, such as `port = 8001`; the command line overrides it.",
        callback=_read,
        is_eager=True,
        show_envvar=False,
    )
    kind = Annotated[Path | None, option]
    return inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind
    )


def _read(context: typer.Context, path: Path | None) -> None:
    """Make the values of a file the defaults of a command. Raises `typer.BadParameter`."""
    if path is None:
        return
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # of TOML or UTF-8
        raise typer.BadParameter(f"{path} is not valid TOML: {error}") from error
    parameters = {
        option.lstrip("-").replace("-", "_"): parameter
        for parameter in context.command.params
        for option in parameter.opts
        if parameter.name not in ("config", "help")
    }
    defaults = {}
    for name, value in values.items():
        key = name.replace("-", "_")
        if key not in parameters:
            raise typer.BadParameter(
                f"{path}: unknown option {name!r}: {nearest(key, list(parameters))}"
            )
        parameter = parameters[key]
        defaults[str(parameter.name)] = _as_text(f"{path}: {name}", value, parameter)
    context.default_map = {**(context.default_map or {}), **defaults}


def _as_text(name: str, value: Any, parameter: Any) -> str | list[str]:
    """A value as it would be written on the command line, which then checks it."""
    is_repeatable = parameter.nargs == -1 or getattr(parameter, "multiple", False)
    values = value if isinstance(value, list) else [value]
    if len(values) != 1 and not is_repeatable:
        raise typer.BadParameter(f"{name} must be a single value")
    if not all(isinstance(each, str | int | float) for each in values):
        raise typer.BadParameter(f"{name} must be a text, a number, true or false")
    texts = [str(each).lower() if isinstance(each, bool) else str(each) for each in values]
    return texts if is_repeatable else texts[0]
