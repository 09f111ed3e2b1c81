"""Shared by all commands: options created from the fields of settings, and error handling."""

import inspect
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from pyengine.cli.config_file import config_option
from pyengine.cli.status import report
from pyengine.config import EngineSettings
from pyengine.errors import InvalidRequestError
from pyengine.sampling_params import MAX_FORMAT_BYTES, SamplingParams, StructuredOutputs
from pyengine.server.settings import ServerSettings
from pyengine.utils.settings import option_of


@contextmanager
def guarded() -> Iterator[None]:
    """Print expected errors without a traceback and exit.

    Status 2: invalid input. Status 1: other errors of the engine or the system. Status 130: Ctrl-C.
    Status 141: closed pipe, silently. Unexpected errors keep their traceback.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        raise typer.Exit(report(error)) from error


@dataclass(frozen=True, slots=True)
class _Sampling:
    """Default and help of the option for a field of `SamplingParams`."""

    default: Any
    help: str
    kind: Any


_SAMPLING: Mapping[str, _Sampling] = {
    "max_tokens": _Sampling(256, "Maximum of new tokens per prompt.", int),
    "min_tokens": _Sampling(0, "Minimum of new tokens.", int),
    "temperature": _Sampling(0.0, "Sampling temperature; 0: greedy.", float),
    "top_p": _Sampling(1.0, "Sample from the most likely tokens of this total probability.", float),
    "top_k": _Sampling(0, "Sample from the K most likely tokens; 0: all.", int),
    "min_p": _Sampling(0.0, "Minimum probability relative to the most likely token.", float),
    "repetition_penalty": _Sampling(1.0, "Above 1: repeat less.", float),
    "presence_penalty": _Sampling(0.0, "Above 0: penalize tokens that have occurred.", float),
    "frequency_penalty": _Sampling(0.0, "Above 0: penalize tokens by their frequency.", float),
    "stop": _Sampling(None, "Stop at this text; repeatable.", list[str] | None),
    "ignore_eos": _Sampling(False, "Continue after the end-of-sequence token.", bool),
}
"""Fields of `SamplingParams` that the commands offer."""

_FORMS: Mapping[str, _Sampling] = {
    "json_schema": _Sampling(None, "Answer with JSON of the schema in this file.", Path | None),
    "json_object": _Sampling(False, "Answer with a JSON object.", bool),
    "regex": _Sampling(None, "Answer with text that matches this expression.", str | None),
    "choice": _Sampling(None, "Answer with one of these texts; repeatable.", list[str] | None),
    "grammar": _Sampling(None, "Answer by the grammar in this file (Lark or GBNF).", Path | None),
}
"""Structured outputs: one field of `StructuredOutputs` each."""


def command(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command to have an option for every field of its settings.

    The parameters `settings`, `params` and `server` stand for `EngineSettings`, `SamplingParams`
    and `ServerSettings`. Other parameters stay, and replace the option of a setting with the same
    name. `defaults` replace defaults of options. `--config` reads options from a file. Errors are
    handled as by `guarded`.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        own = dict(inspect.signature(body).parameters)
        makers: dict[str, Callable[[dict[str, Any]], Any]] = {}
        options = [config_option()]
        if own.pop("params", None):
            makers["params"] = _sampling_params
            options += [_sampling_option(*item) for item in {**_SAMPLING, **_FORMS}.items()]
        serves = "server" in own
        for name, kind in (("settings", EngineSettings), ("server", ServerSettings)):
            if own.pop(name, None):
                makers[name] = partial(_settings, kind)
                options += [
                    _setting_option(field, serves)
                    for field in fields(kind)
                    if field.name not in own
                ]
        options = [
            option.replace(default=defaults.get(option.name, option.default)) for option in options
        ]

        @wraps(body)
        def run(**values: Any) -> None:
            with guarded():
                settings = {name: make(values) for name, make in makers.items()}
                body(**{name: values[name] for name in own}, **settings)

        for parameter in own.values():
            for option in getattr(parameter.annotation, "__metadata__", ()):
                option.show_envvar = False  # the epilog names the rule
        shown: Any = run  # what typer reads
        shown.__signature__ = inspect.Signature([*own.values(), *options])
        shown.__annotations__ = {
            parameter.name: parameter.annotation for parameter in (*own.values(), *options)
        }
        return run

    return decorate


def _option(name: str, default: Any, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _sampling_option(name: str, form: _Sampling) -> inspect.Parameter:
    flag = f"--{name.replace('_', '-')}"
    option = typer.Option(flag, help=form.help, show_envvar=False)
    return _option(name, form.default, form.kind, option)


def _setting_option(setting: Any, serves: bool) -> inspect.Parameter:
    form = option_of(setting)
    kind = setting.type if form.parse is None else form.parse
    name = setting.name.replace("_", "-")
    flag = f"--{name}/--no-{name}" if kind == bool | None else f"--{name}"
    option = typer.Option(
        form.flag or flag,
        help=f"{form.help[0].upper()}{form.help[1:]}.",
        hidden=form.hidden and not serves,
        envvar=form.env,
        show_envvar=False,
    )
    is_repeatable = isinstance(setting.default, tuple)
    return _option(
        setting.name, list(setting.default) if is_repeatable else setting.default, kind, option
    )


def _sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    chosen = {name: values[name] for name in _SAMPLING}
    return SamplingParams(**chosen, structured_outputs=_form(values))


def _form(values: Mapping[str, Any]) -> StructuredOutputs | None:
    """The structured output that the options ask for, read from a file if it is in one."""
    chosen = {name: values[name] for name in _FORMS if values[name]}
    if len(chosen) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in chosen)
        raise InvalidRequestError(f"{flags} exclude each other: give one of them")
    if len(chosen.get("choice", ())) == 1:  # `--choice red blue` makes a prompt of `blue`
        (text,) = chosen["choice"]
        raise InvalidRequestError(
            f"--choice {text} is the only choice. Repeat the option for each: --choice "
            f"{shlex.quote(text)} --choice ...; other texts are prompts"
        )
    for name, value in chosen.items():
        content = _text_of(value) if isinstance(value, Path) else value
        field: dict[str, Any] = {"json" if name == "json_schema" else name: content}
        return StructuredOutputs(**field)
    return None


def _text_of(path: Path) -> str:
    """The text of a file, up to the limit of its length."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FORMAT_BYTES + 1).decode()
    except OSError as error:
        raise InvalidRequestError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not UTF-8 text: {error.reason}") from error


def _settings(kind: Any, values: Mapping[str, Any]) -> Any:
    """Create settings from the values of the command line."""
    chosen = {}
    for setting in fields(kind):
        convert, value = option_of(setting).convert, values[setting.name]
        chosen[setting.name] = value if convert is None else convert(value)
    return kind(**chosen)
