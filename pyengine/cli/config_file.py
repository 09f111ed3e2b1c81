"""`--config FILE`: options from a TOML file, by their names on the command line.

Options at its top are for every command that has them; those of a section, for that command.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from pyengine.utils.validation import nearest


def _read(context: typer.Context, path: Path | None) -> None:
    """Make the values of a file the defaults of a command. Raises `typer.BadParameter`."""
    if path is None:
        return
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # of TOML or UTF-8
        raise typer.BadParameter(f"{path} is not valid TOML: {error}") from None
    known = _commands(context)
    sections = {
        name: value for name, value in values.items() if name in known and isinstance(value, dict)
    }
    shared = {name: value for name, value in values.items() if name not in sections}
    for name, section in sections.items():
        _check_names(f"{path}, [{name}]", section, known[name])
    own = known[str(context.info_name)]
    _check_names(str(path), shared, {**own, **known}, *known.values())
    shared = {name: value for name, value in shared.items() if _key(name) in own}
    defaults = {}
    for name, value in {**shared, **sections.get(str(context.info_name), {})}.items():
        parameter = own[_key(name)]
        defaults[str(parameter.name)] = _as_text(f"{path}: {name}", value, parameter)
    context.default_map = {**(context.default_map or {}), **defaults}


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="TOML file of options, such as `port = 8001`, or of sections such as `[serve]`; the "
        "command line overrides it. Default: the variable PYENGINE_CONFIG.",
        callback=_read,
        is_eager=True,
        envvar="PYENGINE_CONFIG",
    ),
]
"""The option `--config`. Other sources take precedence: command line, then environment."""


def _commands(context: typer.Context) -> dict[str, dict[str, Any]]:
    """The parameters that a file may set, by command and key."""
    group: Any = context.find_root().command
    return {
        name: {
            _key(option): parameter
            for parameter in command.params
            for option in parameter.opts
            if parameter.name not in ("config", "help", "named_model") and len(option) > 2
        }
        for name, command in group.commands.items()
        if any(parameter.name == "config" for parameter in command.params)
    }


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _check_names(where: str, names: Mapping[str, Any], *commands: Mapping[str, Any]) -> None:
    """Raise `typer.BadParameter` for a name that none of the commands knows."""
    for name in names:
        if not any(_key(name) in known for known in commands):
            hint = nearest(_key(name), list({key: None for known in commands for key in known}))
            raise typer.BadParameter(f"{where}: unknown option {name!r}: {hint.replace('_', '-')}")


def _as_text(name: str, value: Any, parameter: Any) -> str | list[str]:
    """A value as it would be written on the command line, which then checks it."""
    is_repeatable = parameter.nargs == -1 or getattr(parameter, "multiple", False)
    values = value if isinstance(value, list) else [value]
    if len(values) != 1 and not is_repeatable:
        raise typer.BadParameter(f"{name} must be a single value")
    if not all(isinstance(value, str | int | float) for value in values):
        raise typer.BadParameter(f"{name} must be a text, a number, true or false")
    texts = [str(value).lower() if isinstance(value, bool) else str(value) for value in values]
    return texts if is_repeatable else texts[0]
