"""The engine's settings, each written once: default, help text, form on the command line.

`LLM(...)` and every command read them here. A new setting is one field with its help text.
Imports the standard library only; what needs torch or the block manager is checked by the builder.
"""

import dataclasses
import difflib
import inspect
import math
import reprlib
import textwrap
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, get_args

from pyengine.core.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingOption:
    """How a setting is explained and checked, and what it looks like on the command line.

    `flag` is the option's name, None: the field's; `parse` the type that the command line reads
    and `convert` what makes the setting of it. `hidden` options work without being listed.
    """

    help: str
    flag: str | None = None
    panel: str = "Engine"
    parse: Any = None
    convert: Callable[[Any], Any] | None = None
    hidden: bool = False
    least: int | None = None
    choices: tuple[str, ...] = ()


def _setting(default: Any, help: str, *, repr: bool = True, **form: Any) -> Any:
    return field(default=default, repr=repr, metadata={"option": SettingOption(help=help, **form)})


def option_of(setting: "dataclasses.Field[Any]") -> SettingOption:
    """The help text and the command line's form of a field of `EngineSettings`."""
    option: SettingOption = setting.metadata["option"]
    return option


def _bytes_of_gib(gib: float | None) -> int | None:
    if gib is None:
        return None
    if not math.isfinite(gib) or not 1 <= gib * _GIB < 2**63:
        raise ConfigurationError(f"kv_cache_gib={gib}: it must be a number of GiB above 0")
    return int(gib * _GIB)


def _int_or_text(text: str | None) -> int | str | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is asked for. Bad values are refused at once: `ConfigurationError`."""

    model: str | Path | None = _setting(
        None,
        "hub id, local folder or GGUF file; without it the embedded default model",
        parse=str | None,
    )
    _: KW_ONLY
    revision: str | None = _setting(
        None, "branch, tag or commit of a model of the hub; without it the newest"
    )
    token: str | None = _setting(
        None,
        "access token for gated models of the hub; without it HF_TOKEN of the environment",
        repr=False,
    )
    device: "str | torch.device" = _setting(
        "auto", "device to run on: auto (CUDA where there is one), cpu, cuda or cuda:1", parse=str
    )
    dtype: "str | torch.dtype" = _setting(
        "auto",
        "type of the weights: auto (float32 on the CPU, else as saved), float32, bfloat16, float16",
        parse=str,
    )
    attention_backend: str = _setting("auto", "backend of attention by name; auto chooses one")
    compile: bool = _setting(
        False,
        "let torch compile the forward pass of decodes: a minute or two and a C++ compiler at "
        "first, faster then",
    )
    enforce_eager: bool = _setting(False, "no CUDA graphs for decode steps")
    async_scheduling: bool | None = _setting(
        None, "plan the next step while one runs, with the same tokens; without it, on CUDA"
    )
    tensor_parallel_size: int = _setting(
        1, "processes that the model is divided over; sizes of the pool are those of each", least=1
    )
    block_size: int | Literal["auto"] | None = _setting(
        None,
        "tokens per KV block; without it (or with auto), what the attention backend likes best",
        parse=str | None,
        convert=_int_or_text,
        least=1,
    )
    num_blocks: int | None = _setting(None, "blocks in the KV pool; without it, by memory", least=1)
    kv_cache_memory: int | None = _setting(
        None,
        "memory for the KV pool, on the command line in GiB, else in bytes",
        flag="--kv-cache-gib",
        parse=float | None,
        convert=_bytes_of_gib,
        least=1,
    )
    gpu_memory_utilization: float = _setting(
        0.9,
        "share of a GPU's memory for the KV pool, of what weights and the largest step leave, "
        "where no other size is given",
    )
    kv_cache_dtype: str = _setting(
        "auto", "type of the KV cache: auto (the model's), or fp8 (fp8_e4m3), where the backend can"
    )
    layer_groups: bool = _setting(
        True,
        "layers with sliding windows give back the KV blocks behind them",
        flag="--layer-groups/--no-layer-groups",
    )
    enable_prefix_caching: bool = _setting(
        True, "reuse the KV blocks of equal prefixes", flag="--prefix-caching/--no-prefix-caching"
    )
    in_flight_sharing: bool = _setting(
        True,
        "compute equal prefixes of one step once; without it they are merged after the step",
        flag="--in-flight-sharing/--no-in-flight-sharing",
    )
    eviction: str = _setting(
        "lru",
        "which idle block goes first: by lru, or by 2q, where what comes back outlives what "
        "does not",
    )
    max_num_seqs: int = _setting(256, "sequences in one step at most", least=1)
    max_num_batched_tokens: int = _setting(2048, "tokens in one step at most", least=1)
    max_model_len: int | None = _setting(
        None,
        "prompt and answer together at most; without it the model's positions, or the pool where "
        "that is smaller",
        least=2,
    )
    max_num_waiting: int | None = _setting(
        None,
        "requests that may wait for a seat; more are refused; without it any number",
        hidden=True,
        least=1,
    )
    generation_config: str = _setting(
        "auto",
        "where requests without sampling parameters have theirs from: auto (the model's "
        "generation_config), none or vllm (the defaults of SamplingParams)",
        choices=("auto", "none", "vllm"),
    )
    seed: int = _setting(
        0,
        "seed of the draws of requests without one, in the order of submission",
        panel="Sampling",
    )

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            object.__setattr__(self, one.name, _checked(one, getattr(self, one.name)))
        self._check_combinations()

    def _check_combinations(self) -> None:
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigurationError(
                f"gpu_memory_utilization={self.gpu_memory_utilization}: "
                "it must be above 0 and at most 1"
            )
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigurationError(
                f"num_blocks={self.num_blocks} and kv_cache_memory={self.kv_cache_memory} "
                "both set the size of the KV pool: give one of them"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_num_seqs={self.max_num_seqs}: every running sequence needs a token per step"
            )
        if self.tensor_parallel_size != 1 and (self.async_scheduling or self.compile):
            other = "async_scheduling" if self.async_scheduling else "compile"
            raise ConfigurationError(
                f"{other}=True does not go together with tensor_parallel_size="
                f"{self.tensor_parallel_size} yet: leave one of them out"
            )

    @property
    def asked_block_size(self) -> int | None:
        """Tokens per block; None: as the attention backend likes it."""
        return None if self.block_size == "auto" else self.block_size

    @property
    def takes_model_sampling(self) -> bool:
        """Whether a request without sampling parameters has those of the model."""
        return self.generation_config == "auto"


_KINDS: dict[Any, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    str: (str, "a text"),
    Path: (Path, "a path"),
    NoneType: (NoneType, "None"),
}


def _checked(setting: "dataclasses.Field[Any]", value: Any) -> Any:
    """`value` as a plain Python object, or `ConfigurationError` where the field can't take it."""
    option, declared = option_of(setting), setting.type
    if isinstance(declared, str):  # of torch, and checked where torch is
        return value
    alternatives = [one for kind in get_args(declared) or (declared,) for one in _flat(kind)]
    for kind in alternatives:
        if kind not in _KINDS:
            if value == kind and isinstance(value, str):
                return value
        elif isinstance(value, _KINDS[kind][0]) and (kind is bool or not isinstance(value, bool)):
            plain = kind(value) if kind in (int, float) else value
            _check_range(setting.name, plain, option)
            return plain
    allowed = " or ".join(
        _KINDS[kind][1] if kind in _KINDS else repr(kind) for kind in alternatives
    )
    raise ConfigurationError(f"{setting.name}={reprlib.repr(value)}: it must be {allowed}")


def _flat(kind: Any) -> tuple[Any, ...]:
    """The values of a `Literal`, else the type itself."""
    return get_args(kind) or (kind,)


def _check_range(name: str, value: Any, option: SettingOption) -> None:
    if option.least is not None and isinstance(value, int):
        if value.bit_length() > 63:  # Python refuses to print the largest
            raise ConfigurationError(
                f"{name} is an integer of {value.bit_length()} bits: no machine has as much"
            )
        if value < option.least:
            raise ConfigurationError(f"{name}={value}: it must be at least {option.least}")
    if option.choices and value not in option.choices:
        raise ConfigurationError(
            f"{name}={value!r} is not known: use one of {', '.join(option.choices)}"
        )


_P = ParamSpec("_P")
_S = TypeVar("_S")


def _takes(
    settings: Callable[_P, EngineSettings],
) -> Callable[[Callable[[_S, EngineSettings], None]], Callable[Concatenate[_S, _P], None]]:
    def decorate(
        init: Callable[[_S, EngineSettings], None],
    ) -> Callable[Concatenate[_S, _P], None]:
        @wraps(init)
        def wrapper(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
            _refuse_unknown(kwargs)
            init(self, settings(*args, **kwargs))

        shown: Any = wrapper
        shown.__signature__ = _signature(init)
        shown.__doc__ = _described()
        return wrapper

    return decorate


def _refuse_unknown(given: dict[str, Any]) -> None:
    known = [one.name for one in dataclasses.fields(EngineSettings)]
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(known)}"
            raise ConfigurationError(f"there is no setting {name!r}: {hint}")


def _signature(init: Callable[..., None]) -> inspect.Signature:
    """`init`'s own first parameter, then every setting."""
    first, *_ = inspect.signature(init).parameters.values()
    settings = inspect.signature(EngineSettings).parameters.values()
    return inspect.Signature([first, *settings], return_annotation=None)


def _described() -> str:
    """A line for every setting: name, default, help."""
    lines = [
        textwrap.fill(
            f"{one.name} (default {one.default!r}): {option_of(one).help}",
            width=96,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for one in dataclasses.fields(EngineSettings)
    ]
    return "\n".join(["Settings, all by name but the model:", "", *lines])


takes_settings = _takes(EngineSettings)
"""Decorates an `__init__(self, settings: EngineSettings)` to take every setting by its name.

Its signature, also for type checkers, and its docstring show the settings. A name that is none is
refused with the nearest that is one: `ConfigurationError`.
"""
