"""How a request's tokens are chosen and when it ends: validated once, frozen afterwards."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar, Generic, TypeVar

from pyengine.core.errors import InvalidRequestError

_Item = TypeVar("_Item")


def _refuse(name: str, value: object, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}={value!r} is not allowed: it must be {allowed}")


class _TupleField(Generic[_Item]):
    """A dataclass field that takes one item, several or ``None``, and is read as a tuple.

    The standard library calls this a descriptor-typed field: the parameter of ``__init__`` has
    the type that ``__set__`` takes, the attribute the type that ``__get__`` returns.
    """

    def __init__(self, checked: Callable[[Any], _Item]) -> None:
        self._checked = checked

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object | None, owner: type) -> tuple[_Item, ...]:
        items: tuple[_Item, ...] = () if instance is None else instance.__dict__[self._name]
        return items

    def __set__(self, instance: object, value: _Item | Iterable[_Item] | None) -> None:
        several = isinstance(value, Iterable) and not isinstance(value, str)
        items: Any = () if value is None else value if several else (value,)
        instance.__dict__[self._name] = tuple(self._checked(item) for item in items)


def _stop_string(item: Any) -> str:
    if not isinstance(item, str) or not item:
        raise _refuse("stop", item, "made of strings of at least one character")
    return item


def _stop_token_id(item: Any) -> int:
    if not _is_integer(item) or item < 0:
        raise _refuse("stop_token_ids", item, "made of token ids, integers of at least 0")
    return int(item)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class _Rule:
    """What one numeric field may hold."""

    kind: type[int] | type[float]
    holds: Callable[[Any], bool]
    allowed: str
    optional: bool = False

    def checked(self, name: str, value: Any) -> int | float | None:
        """Return ``value`` as a plain Python number, or refuse it."""
        if value is None and self.optional:
            return None
        is_kind = _is_integer if self.kind is int else _is_real
        if not is_kind(value) or not self.holds(value):
            raise _refuse(name, value, self.allowed)
        return self.kind(value)


_RULES: Mapping[str, _Rule] = {
    "n": _Rule(int, lambda x: x >= 1, "an integer of at least 1"),
    "temperature": _Rule(
        float, lambda x: 0 <= x < math.inf, "a finite number, 0 (greedy) or greater"
    ),
    "top_p": _Rule(float, lambda x: 0 < x <= 1, "greater than 0 and at most 1 (1 turns it off)"),
    "top_k": _Rule(int, lambda x: x >= -1, "an integer of at least 1, or 0 or -1 to turn it off"),
    "min_p": _Rule(float, lambda x: 0 <= x <= 1, "between 0 (off) and 1"),
    "repetition_penalty": _Rule(
        float, lambda x: 0 < x < math.inf, "a finite number greater than 0 (1 turns it off)"
    ),
    "presence_penalty": _Rule(float, lambda x: -2 <= x <= 2, "between -2 and 2 (0 turns it off)"),
    "frequency_penalty": _Rule(float, lambda x: -2 <= x <= 2, "between -2 and 2 (0 turns it off)"),
    "seed": _Rule(
        int,
        lambda x: -(2**63) <= x < 2**64,
        "an integer of 64 bits, or None for one that the engine chooses",
        optional=True,
    ),
    "max_tokens": _Rule(
        int,
        lambda x: x >= 1,
        "an integer of at least 1, or None for as many as the model has positions",
        optional=True,
    ),
    "min_tokens": _Rule(int, lambda x: x >= 0, "an integer of at least 0"),
    "logprobs": _Rule(
        int,
        lambda x: x >= 0,
        "an integer of at least 0 (0: only the chosen token), or None for none",
        optional=True,
    ),
    "prompt_logprobs": _Rule(
        int,
        lambda x: x >= 0,
        "an integer of at least 0 (0: only the prompt's own tokens), or None for none",
        optional=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of one request, by vLLM's names and with its defaults.

    Raises :class:`InvalidRequestError` for a value outside its range. ``stop`` takes a string,
    ``stop_token_ids`` an id, or any iterable of them; both are read back as tuples.
    """

    n: int = 1
    """How many completions of the prompt to generate; the prompt is computed once."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy: always the most probable token."""
    top_p: float = 1.0
    """Keep the fewest most probable tokens that together reach this probability."""
    top_k: int = 0
    """Keep this many most probable tokens, and any as probable as the last; 0 or -1: all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as probable as the most probable one."""
    repetition_penalty: float = 1.0
    """Tokens of the prompt and the output: divides logits above 0, multiplies the others."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that was generated before."""
    frequency_penalty: float = 0.0
    """Subtracted once per time the token was generated before."""
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    """Added to the logits of these token ids."""
    seed: int | None = None
    """Makes the draws reproducible, whatever else is in the batch; ``None``: engine's choice."""
    stop: _TupleField[str] = _TupleField(_stop_string)
    """End the text at the first of these strings."""
    stop_token_ids: _TupleField[int] = _TupleField(_stop_token_id)
    """End at the first of these tokens."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the stop string that ended it."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    max_tokens: int | None = 16
    """How many tokens to generate at most; ``None``: up to the model's positions."""
    min_tokens: int = 0
    """How many tokens must be generated before any stop condition is looked at."""
    logprobs: int | None = None
    """Report the chosen token's log-probability and this many of the most probable ones."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    detokenize: bool = True
    """Whether to produce text at all."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    _SWITCHES: ClassVar[tuple[str, ...]] = (
        "include_stop_str_in_output",
        "ignore_eos",
        "detokenize",
        "skip_special_tokens",
    )

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            object.__setattr__(self, name, rule.checked(name, getattr(self, name)))
        for name in self._SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "True or False")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if self.stop and not self.detokenize:
            raise InvalidRequestError(
                f"stop={self.stop!r} needs text to search, but detokenize=False: "
                "set detokenize=True, or use stop_token_ids"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken (``temperature == 0``)."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether choosing a token needs to know which ones came before."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise :class:`InvalidRequestError` for ids or counts that ``vocab_size`` cannot hold."""
        allowed = f"a token id of this model: 0 to {vocab_size - 1}"
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token in ids or ():
                if not 0 <= token < vocab_size:
                    raise _refuse(name, token, allowed)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > vocab_size:
                raise _refuse(name, count, f"at most the vocabulary's size, {vocab_size}")


def _checked_bias(bias: Any) -> dict[int, float]:
    """Return a private copy of ``bias``, so that the caller's later changes don't reach it."""
    if not isinstance(bias, Mapping):
        raise _refuse("logit_bias", bias, "a mapping from token id to a finite number")
    for token, value in bias.items():
        if not _is_integer(token) or token < 0:
            raise _refuse("logit_bias", token, "keyed by token ids, integers of at least 0")
        if not _is_real(value) or not math.isfinite(value):
            raise _refuse(f"logit_bias[{token}]", value, "a finite number")
    return {int(token): float(value) for token, value in bias.items()}
