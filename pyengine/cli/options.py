"""Shared by all commands: options created from the fields of settings, and error handling."""

import inspect
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from pyengine.cli.config_file import ConfigFile
from pyengine.cli.prompts import read_text
from pyengine.cli.sampling import FORMS, SAMPLING, flags_by_name, in_options
from pyengine.cli.status import report
from pyengine.config import EngineSettings
from pyengine.errors import InvalidRequestError
from pyengine.sampling_params import MAX_FORMAT_BYTES, SamplingParams, StructuredOutputs
from pyengine.server.settings import ServerSettings
from pyengine.utils.settings import choices_of, flags_of, option_of


@contextmanager
def guarded() -> Iterator[None]:
    """Print expected errors without a traceback and exit.

    Status 2: invalid input. Status 1: other errors of the engine or the system. Status 130: Ctrl-C.
    Status 141: closed pipe, silently. Unexpected errors keep their traceback.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        raise typer.Exit(report(error, in_options)) from None


PANELS = ("Common", "Sampling", "Memory", "Cache", "Server", "Expert")
"""The headings of a command's help, in their order."""

_PANEL_OF = {
    "Common": "model device dtype quantization max_model_len num_threads config verbose",
    "Sampling": "generation_config seed",
    "Memory": "kv_cache_memory num_blocks block_size kv_cache_dtype max_num_seqs "
    "gpu_memory_utilization max_num_batched_tokens kv_cache_host_memory",
    "Cache": "enable_prefix_caching in_flight_sharing partial_reuse eviction explain_misses "
    "kv_cache_dir kv_cache_disk kv_cache_access max_pinned_share verify_cache_hits",
    "Server": "replicas max_num_waiting max_num_seqs_per_tenant",
}
"""Options by the heading below which help lists them; other settings are for experts."""

_PANEL = {name: panel for panel, names in _PANEL_OF.items() for name in names.split()}
_PANEL |= dict.fromkeys((*SAMPLING, *FORMS), "Sampling")
_PANEL |= dict.fromkeys([field.name for field in fields(ServerSettings)], "Server")

ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="The model, as --model names it.", show_default=False),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        *("--model", "-m", "--hf", "-hf"),
        metavar="MODEL",
        help="Hub id, OWNER/REPO:FILE.gguf of the hub, local folder or GGUF file; default: the "
        "demo model.",
    ),
]


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show counters that are zero, too.")]


def source_of(context: typer.Context, name: str) -> str:
    """Where the value of a parameter is from, such as COMMANDLINE or DEFAULT."""
    source = context.get_parameter_source(name)
    return "DEFAULT" if source is None else source.name


def named_model(context: typer.Context, argument: str | None, option: str | None) -> str | None:
    """The model that a command names, as its argument or with --model."""
    if argument is None or argument == option:
        return option
    if source_of(context, "model") == "COMMANDLINE":
        raise InvalidRequestError(
            f"two models are named, {argument} and --model {option}: give one of them"
        )
    return argument


class Command(TyperCommand):
    """A command whose help lists options below the headings of `PANELS`, without variables."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the parameters; called by `--help`."""
        rows: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", *PANELS)}
        parameters: list[Any] = self.get_params(ctx)
        for parameter in parameters:
            parameter.show_envvar = False  # the root's help names the rule
            is_argument = parameter.param_type_name == "argument"
            panel = getattr(parameter, "rich_help_panel", None) or PANELS[0]
            if record := parameter.get_help_record(ctx):
                rows["Arguments" if is_argument else panel].append(record)
        if not any(rows[panel] for panel in PANELS[1:]):
            rows["Options"] = rows.pop(PANELS[0])
        for panel in filter(rows.get, rows):
            with formatter.section(panel):
                formatter.write_dl(rows[panel])


def command(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command to have an option for every field of its settings.

    The parameters `settings`, `params` and `server` stand for `EngineSettings`, `SamplingParams`
    and `ServerSettings`. Other parameters stay, and replace the option of a setting with the same
    name. The model is also an argument, unless prompts are. `defaults` replace defaults of options.
    `--config` reads options from a file. Errors are handled as by `guarded`.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        own = dict(inspect.signature(body).parameters)
        makers: dict[str, Callable[[dict[str, Any]], Any]] = {}
        options = [_option("model", None, ModelOption), _option("config", None, ConfigFile)]
        if "prompt" not in own:
            options.append(_option("named_model", None, ModelArgument))
        if own.pop("params", None):
            makers["params"] = _sampling_params
            for name, (default, text, kind) in {**SAMPLING, **FORMS}.items():
                short = ["-n"] if name == "max_tokens" else []
                option = typer.Option(*flags_by_name()[name], *short, help=text)
                options.append(_option(name, default, Annotated[kind, option]))
        serves = "server" in own
        for name, kind in (("settings", EngineSettings), ("server", ServerSettings)):
            if own.pop(name, None):
                makers[name] = partial(_settings, kind)
                options += [
                    _setting_option(field, serves)
                    for field in fields(kind)
                    if field.name not in own and field.name != "model"
                ]
        options = [
            option.replace(default=defaults.get(option.name, option.default)) for option in options
        ]

        @wraps(body)
        def run(**values: Any) -> None:
            with guarded():
                named = values.get("named_model")
                values["model"] = named_model(values["context"], named, values["model"])
                settings = {name: make(values) for name, make in makers.items()}
                body(**{name: values[name] for name in own}, **settings)

        for parameter in (*own.values(), *options):
            for option in getattr(parameter.annotation, "__metadata__", ()):
                common = PANELS[0] if parameter.name in own else PANELS[-1]
                option.rich_help_panel = _PANEL.get(parameter.name, common)
        shown: Any = run  # what typer reads
        shown.__signature__ = inspect.Signature([*own.values(), *options])
        shown.__annotations__ = {
            option.name: option.annotation for option in (*own.values(), *options)
        }
        return run

    return decorate


def _option(name: str, default: Any, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _setting_option(setting: Any, serves: bool) -> inspect.Parameter:
    form, choices = option_of(setting), choices_of(setting)
    option = typer.Option(
        "/".join(flags_of(setting)),
        help=in_options(f"{form.help[0].upper()}{form.help[1:]}."),
        hidden=form.hidden and not serves,
        envvar=form.env,
        metavar="|".join(choices) if len(choices) in range(1, 6) else None,
        autocompletion=_completion(choices) if choices else None,
    )
    default = list(setting.default) if isinstance(setting.default, tuple) else setting.default
    kind = form.parse or (str | None if choices else setting.type)
    return _option(setting.name, default, Annotated[kind, option])


def _completion(choices: Sequence[str]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete


def _sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    chosen = {name: values[name] for name in SAMPLING}
    return SamplingParams(**chosen, structured_outputs=_form(values))


def _form(values: Mapping[str, Any]) -> StructuredOutputs | None:
    """The structured output that the options ask for, read from a file if it is in one."""
    chosen = {name: values[name] for name in FORMS if values[name]}
    if len(chosen) > 1:
        flags = " and ".join(flags_by_name()[name][0] for name in chosen)
        raise InvalidRequestError(f"{flags} exclude each other: give one of them")
    if len(chosen.get("choice", ())) == 1:  # `--choice red blue` makes a prompt of `blue`
        (text,) = chosen["choice"]
        raise InvalidRequestError(
            f"--choice {text} is the only choice. Repeat the option for each: --choice "
            f"{shlex.quote(text)} --choice ...; other texts are prompts"
        )
    for name, value in chosen.items():
        content = read_text(value, MAX_FORMAT_BYTES) if isinstance(value, Path) else value
        field: dict[str, Any] = {"json" if name == "json_schema" else name: content}
        return StructuredOutputs(**field)
    return None


def _settings(kind: Any, values: Mapping[str, Any]) -> Any:
    """Create settings from the values of the command line."""
    chosen = {}
    for setting in fields(kind):
        convert, value = option_of(setting).convert, values[setting.name]
        chosen[setting.name] = value if convert is None else convert(value)
    return kind(**chosen)
