"""Validation of fields of frozen settings, and its error messages."""

import difflib
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from numbers import Integral, Real
from typing import Any, TypeVar

from pyengine.errors import InvalidRequestError

_Item = TypeVar("_Item")
_Class = TypeVar("_Class", bound=type[Any])

INT64_MAX = 2**63 - 1
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
FLOAT32_TINY = 2.0**-126
"""The smallest float32 of full precision."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def shown(value: object) -> str:
    """``value`` for messages: always short."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        return _short.repr(value)
    except Exception:  # its own __repr__ failed
        return f"<{type(value).__qualname__}>"


def refuse(name: str, value: object, allowed: str) -> InvalidRequestError:
    """Return the error that names the value and the allowed ones."""
    return InvalidRequestError(f"{name}={shown(value)} is not allowed: it must be {allowed}")


def is_integer(value: object) -> bool:
    """True for integers by type, except booleans."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """True for real numbers by type, except booleans."""
    return isinstance(value, Real) and not isinstance(value, bool)


def items_of(name: str, value: Any, checked: Callable[[str, Any], _Item]) -> tuple[_Item, ...]:
    """Return one item or several, each ``checked``, as a tuple; ``None``: no items."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        return (checked(name, value),)
    try:
        return tuple([checked(name, item) for item in value])
    except InvalidRequestError:
        raise
    except Exception as error:
        raise refuse(
            name, value, f"one item or several (reading them failed: {error!r})"
        ) from error


def text_item(name: str, item: Any) -> str:
    """Return ``item`` as a plain string, or refuse it."""
    if not isinstance(item, str) or not item:
        raise refuse(name, item, "made of strings of at least one character")
    if not item.isascii():
        try:
            item.encode()
        except UnicodeEncodeError:
            raise refuse(name, item, "text that UTF-8 can hold, without surrogates") from None
    return str(item)


def token_item(name: str, item: Any) -> int:
    """Return ``item`` as a token id, or refuse it."""
    if not is_integer(item) or not 0 <= item <= INT64_MAX:
        raise refuse(name, item, "made of token ids, integers of at least 0")
    return int(item)


@dataclass(frozen=True, slots=True)
class Rule:
    """The allowed values of one numeric field."""

    kind: type[int] | type[float]
    holds: Callable[[Any], bool]
    allowed: str
    optional: bool = False

    def checked(self, name: str, value: Any) -> int | float | None:
        """Return ``value`` as a plain Python number, or refuse it."""
        if value is None and self.optional:
            return None
        is_kind = is_integer if self.kind is int else is_real
        if not is_kind(value):
            raise refuse(name, value, self.allowed)
        try:
            number = self.kind(value)
        except Exception:  # too large for a float
            raise refuse(name, value, self.allowed) from None
        if not self.holds(number):
            raise refuse(name, value, self.allowed)
        return number


def refuses_unknown(kind: str) -> Callable[[_Class], _Class]:
    """A class decorator for dataclasses: an unknown name is refused with the nearest field.

    `kind` is what the message calls a field. Raises `InvalidRequestError`.
    """

    def decorate(cls: _Class) -> _Class:
        init = cls.__init__

        @wraps(init)
        def checked(self: Any, *args: Any, **keywords: Any) -> None:
            try:
                init(self, *args, **keywords)
            except TypeError:
                known = [field.name for field in fields(cls)]
                unknown = next((name for name in keywords if name not in known), None)
                if unknown is None:
                    raise
                message = f"there is no {kind} {unknown!r}: {nearest(unknown, known)}"
                raise InvalidRequestError(message) from None

        cls.__init__ = checked
        return cls

    return decorate


def nearest(name: str, known: Sequence[str], *, cutoff: float = 0.6) -> str:
    """A hint at the field that an unknown name means."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"


def unknown_choice(name: str, value: str, choices: Sequence[str]) -> str:
    """The message for a value that is none of the choices, with the nearest if one is near."""
    hint = nearest(value, choices, cutoff=0.5)  # fp16 means float16
    hint = f"{hint} Use" if hint.endswith("?") else "use"
    return f"{name}={shown(value)} is not known: {hint} one of {', '.join(choices)}"
