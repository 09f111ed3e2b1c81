"""How settings are declared: default, help text, form on the command line, checks.

`EngineSettings` and `ServerSettings` are frozen dataclasses whose fields are made by `setting`.
Imports the standard library only.
"""

import dataclasses
import inspect
import os
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args

from pyengine.errors import ConfigurationError
from pyengine.utils.validation import nearest, shown, unknown_choice


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingOption:
    """How a setting is explained and checked, and what it looks like on the command line.

    `flag` is the option's name, None: the field's. The command line reads the type `parse`, and
    `convert` makes the setting of it. `env` is a variable that holds the setting, one of several
    texts, where it is not given. `hidden` options are listed only where a server is run.
    """

    help: str
    flag: str | None = None
    parse: Any = None
    convert: Callable[[Any], Any] | None = None
    env: str | None = None
    hidden: bool = False
    minimum: int | None = None
    choices: tuple[str, ...] = ()


def setting(default: Any, help: str, *, repr: bool = True, **form: Any) -> Any:
    """A field of a class of settings; `form` is what `SettingOption` holds beside the help."""
    return dataclasses.field(
        default=default, repr=repr, metadata={"option": SettingOption(help=help, **form)}
    )


def option_of(field: "dataclasses.Field[Any]") -> SettingOption:
    """The help text and the command line's form of a setting."""
    option: SettingOption = field.metadata["option"]
    return option


def flags_of(field: "dataclasses.Field[Any]") -> tuple[str, ...]:
    """The option for a setting on the command line, and the one that turns it off, if any."""
    form, name = option_of(field), field.name.replace("_", "-")
    flag = f"--{name}/--no-{name}" if field.type == bool | None else f"--{name}"
    return tuple((form.flag or flag).split("/"))


def choices_of(field: "dataclasses.Field[Any]") -> tuple[str, ...]:
    """The texts that a setting may be; empty if it may be another value, too."""
    kinds = [item for kind in get_args(field.type) for item in _flat(kind)]
    texts = tuple(kind for kind in kinds if isinstance(kind, str))
    is_closed = texts and set(kinds) <= {*texts, NoneType}
    return texts if is_closed else option_of(field).choices


def check_settings(settings: Any) -> None:
    """Convert every field to a plain Python object; `ConfigurationError` for a wrong value.

    Texts that are not given are read from the variable of the environment that the setting names.
    """
    for setting in dataclasses.fields(settings):
        value = getattr(settings, setting.name)
        env = option_of(setting).env
        if env is not None and isinstance(value, tuple) and value == setting.default:
            value = tuple(os.environ.get(env, "").split())
        object.__setattr__(settings, setting.name, _checked(setting, value))


_KINDS: dict[Any, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    str: (str, "a text"),
    Path: (Path, "a path"),
    NoneType: (NoneType, "None"),
}


def _checked(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """`value` as a plain Python object, or `ConfigurationError` where the field can't take it."""
    option, declared = option_of(field), field.type
    choices = choices_of(field)
    if isinstance(value, str) and choices and value.removeprefix("torch.") not in choices:
        raise ConfigurationError(unknown_choice(field.name, value, choices))
    if isinstance(declared, str):  # of torch, and checked where torch is
        return value
    if declared == tuple[str, ...]:
        return _checked_texts(field.name, value)
    alternatives = [item for kind in get_args(declared) or (declared,) for item in _flat(kind)]
    for kind in alternatives:
        if kind not in _KINDS:
            if isinstance(value, str) and value == kind:
                return value
        elif isinstance(value, _KINDS[kind][0]) and (kind is bool or not isinstance(value, bool)):
            try:
                plain = kind(value) if kind in (int, float) else value
            except OverflowError:
                break
            _check_range(field.name, plain, option)
            return plain
    allowed = " or ".join(
        _KINDS[kind][1] if kind in _KINDS else repr(kind) for kind in alternatives
    )
    raise ConfigurationError(f"{field.name}={shown(value)}: it must be {allowed}")


def _checked_texts(name: str, value: Any) -> tuple[str, ...]:
    texts = tuple(value) if isinstance(value, list | tuple) else (None,)
    if "" in texts:
        raise ConfigurationError(f"{name} is empty: give at least one character")
    if not all(isinstance(text, str) for text in texts):  # not shown: it may be secret
        raise ConfigurationError(f"{name} must be a list of texts of at least one character")
    return texts


def _flat(kind: Any) -> tuple[Any, ...]:
    """The values of a `Literal`, else the type itself."""
    return get_args(kind) or (kind,)


_COUNT_BITS, _SEED_BITS = 63, 4096
"""Maximum bits of a setting with a minimum, and of one without, which only names something."""


def _check_range(name: str, value: Any, option: SettingOption) -> None:
    minimum = option.minimum
    max_bits = _SEED_BITS if minimum is None else _COUNT_BITS
    if isinstance(value, int) and value.bit_length() > max_bits:  # Python can't print the largest
        raise ConfigurationError(
            f"{name} is an integer of {value.bit_length()} bits: the maximum is {max_bits}"
        )
    if minimum is not None and isinstance(value, int | float) and not value >= minimum:
        raise ConfigurationError(f"{name}={value}: it must be at least {minimum}")


_P = ParamSpec("_P")
_S = TypeVar("_S")
_Settings = TypeVar("_Settings")


def takes(
    settings: Callable[_P, _Settings],
) -> Callable[[Callable[[_S, _Settings], None]], Callable[Concatenate[_S, _P], None]]:
    """A decorator for an `__init__(self, settings)` that lets it take every setting by its name.

    Its signature, also for type checkers, and its docstring show the settings. An unknown name is
    refused with the nearest setting: `ConfigurationError`.
    """

    def decorate(init: Callable[[_S, _Settings], None]) -> Callable[Concatenate[_S, _P], None]:
        @wraps(init)
        def wrapper(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
            _refuse_unknown(settings, kwargs)
            init(self, settings(*args, **kwargs))

        shown: Any = wrapper
        shown.__signature__ = _signature(settings, init)
        shown.__doc__ = _described(settings)
        return wrapper

    return decorate


def _refuse_unknown(settings: Any, names: dict[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(settings)]
    for name in names:
        if name not in known:
            raise ConfigurationError(f"there is no setting {name!r}: {nearest(name, known)}")


def _signature(settings: Any, init: Callable[..., None]) -> inspect.Signature:
    """`init`'s own first parameter, then every setting."""
    first, *_ = inspect.signature(init).parameters.values()
    parameters = inspect.signature(settings).parameters.values()
    return inspect.Signature([first, *parameters], return_annotation=None)


def _described(settings: Any) -> str:
    """A line for every setting: name, default, help."""
    lines = [
        textwrap.fill(
            f"{field.name} (default {field.default!r}): {option_of(field).help}",
            width=96,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for field in dataclasses.fields(settings)
    ]
    return "\n".join(["Settings, all by name but the model:", "", *lines])
