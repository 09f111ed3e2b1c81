"""Reads a configuration and keeps account: no key of it is passed over in silence.

Each key is read by a family, known to have no effect (with the reason), or refused by name.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pyengine.errors import ModelLoadError
from pyengine.utils.validation import is_integer, shown

_MISSING: Any = object()


class BeyondTableError(ModelLoadError):
    """A setting that no row of the table says, and that transformers may have: see `fallback`."""


class Settings:
    """The values of a JSON object, by key. Keys that are absent have the value in `defaults`.

    `where` says in messages what is read. Every method that reads a key raises `ModelLoadError`
    for a value of another kind, and for a key that has neither value nor default.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        defaults: Mapping[str, Any] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """`aliases` are other names of keys: the name that a file may have, and the usual one."""
        self._values, self._where = values, where
        self._defaults = defaults or {}
        self._stored_as: dict[str, str] = {}
        for alias, key in (aliases or {}).items():
            if alias in values and key in values and values[key] != values[alias]:
                self.refuse(alias, f"and {key}={shown(values[key])}: delete one of them")
            if alias in values:
                self._stored_as[key] = alias
        self._read: set[str] = set()
        self._sections: dict[str, Settings] = {}

    @property
    def is_empty(self) -> bool:
        """True if the object has no keys."""
        return not self._values

    def has(self, key: str) -> bool:
        """True if the file sets this key to something other than null."""
        return self._values.get(self._name(key)) is not None

    def _name(self, key: str) -> str:
        """The name that this key has in the file."""
        return self._stored_as.get(key, key)

    def has_default(self, key: str) -> bool:
        """True if this key has a default other than null."""
        return self._defaults.get(key) is not None

    def raw(self, key: str) -> Any:
        """The value, unchecked."""
        self._read.update((key, self._name(key)))
        value = self._values.get(self._name(key), _MISSING)
        if value is _MISSING:
            value = self._defaults.get(key, _MISSING)
        if value is _MISSING:
            raise ModelLoadError(f"{self._where} lacks {key}, which the model needs: get it again")
        return value

    def integer(self, key: str, minimum: int = 1) -> int:
        """An integer of at least `minimum`."""
        value = self.raw(key)
        if not is_integer(value) or value < minimum:
            self.refuse(key, f"it must be an integer of at least {minimum}")
        return int(value)

    def optional_integer(self, key: str, minimum: int = 1) -> int | None:
        """An integer of at least `minimum`, or null."""
        return None if self.raw(key) is None else self.integer(key, minimum)

    def number(self, key: str, *, above: float = -math.inf) -> float:
        """A finite number above `above`."""
        raw = self.raw(key)
        if isinstance(raw, bool) or not isinstance(raw, int | float):
            self.refuse(key, "it must be a number")
        try:
            value = float(raw)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value) or value <= above:
            limit = "" if above == -math.inf else f" above {above:g}"
            self.refuse(key, f"it must be a finite number{limit}")
        return value

    def optional_number(self, key: str, *, above: float = -math.inf) -> float | None:
        """A finite number above `above`, or null."""
        return None if self.raw(key) is None else self.number(key, above=above)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self.raw(key)
        if not isinstance(value, bool):
            self.refuse(key, "it must be true or false")
        return value

    def text(self, key: str, known: Sequence[str], *, falls_back: bool = False) -> str:
        """One of the `known` words; with `falls_back`, other words raise `BeyondTableError`."""
        value = self.raw(key)
        if not isinstance(value, str) or value not in known:
            why = f"known are {', '.join(known)}"
            if isinstance(value, str) and falls_back:
                self.leave(key, why)
            self.refuse(key, why)
        return value

    def items(self, key: str, count: int | None) -> list[Any] | None:
        """A list of `count` items (None: of any number), or null."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list) or count not in (None, len(value)):
            self.refuse(
                key, f"it must be a list of {count} items" if count else "it must be a list"
            )
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` numbers above 0."""
        value = self.items(key, count)
        good = [item for item in value or () if type(item) in (int, float) and 0 < item < 1e300]
        if value is None or len(good) != count:
            self.refuse(key, f"it must be a list of {count} numbers above 0")
        return tuple(map(float, good))

    @property
    def names(self) -> Sequence[str]:
        """The keys of the file."""
        return list(self._values)

    def default(self, **values: object) -> None:
        """Set the defaults of these keys, which depend on other keys, where they are absent."""
        self._values = {
            key: value
            for key, value in self._values.items()
            if value is not None or key not in values
        }
        self._defaults = {**self._defaults, **values}

    def section(
        self,
        key: str,
        *,
        is_passed_over: bool = False,
        defaults: Mapping[str, Any] | None = None,
    ) -> "Settings | None":
        """The object under this key, with these `defaults`; None if it is null.

        `finish` looks at its keys too, unless it `is_passed_over`.
        """
        values = self.raw(key)
        if values is None:
            return None
        if not isinstance(values, dict):
            self.refuse(key, "it must be an object or null")
        if key not in self._sections:
            self._sections[key] = Settings(values, f"{self._where}, {key[:80]},", defaults)
        if is_passed_over:
            self._sections[key].pass_over(dict.fromkeys(values, "of a section without effect"))
        return self._sections[key]

    def default_section(self, key: str) -> "Settings | None":
        """The object that is the default of this key."""
        values = self._defaults.get(key)
        if values is None:
            return None
        return self._sections.setdefault(key, Settings(values, f"{self._where}, {key},"))

    def only(self, key: str, *allowed: object, why: str) -> None:
        """Accept this key, if it is set, with one of these values, or null."""
        if self.has(key):
            actual = self.raw(key)
            if not any(actual == value and type(actual) is type(value) for value in allowed):
                known = " or ".join(map(shown, allowed)) or "null"
                self.refuse(key, f"{why}; only {known} is supported")
        self._read.add(key)

    def leave_unless(self, key: str, value: object, why: str) -> None:
        """Accept this key, if it is set, with this value; others are for the fallback."""
        if self.has(key) and type(self.raw(key)) is type(value) and self.raw(key) != value:
            self.leave(key, why)
        self.only(key, value, why=why)

    def pass_over_neutral(self, reasons: Mapping[str, tuple[object, str]]) -> None:
        """Accept these keys if nothing read them and they have this value; reasons follow it."""
        for key, (value, _) in reasons.items():
            actual = self._values.get(key)
            if key not in self._read and type(actual) is type(value) and actual == value:
                self._read.add(key)

    def pass_over(self, reasons: Mapping[str, str]) -> None:
        """Accept these keys with any value: they have no effect, for the reasons given."""
        self._read.update(reasons)

    def leave(self, key: str, why: str) -> NoReturn:
        """Raise `BeyondTableError` for the value of this key."""
        try:
            self.refuse(key, why)
        except ModelLoadError as error:
            raise BeyondTableError(str(error)) from None

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise `ModelLoadError` for the value of this key."""
        name = self._name(key)
        value = self._values.get(name, self._defaults.get(key))
        raise ModelLoadError(f"{self._where} says {_short(name)}={shown(value)}: {why}")

    def finish(self) -> None:
        """Raise `ModelLoadError` if a key, unless it is null, was neither read nor passed over."""
        for section in self._sections.values():
            section.finish()
        unread = sorted(
            key
            for key, value in self._values.items()
            if value is not None and key not in self._read
        )
        if unread:
            first = unread[0]
            further = ", ".join(map(_short, unread[1:4]))
            more = f" (and {further})" if further else ""
            raise ModelLoadError(
                f"{self._where} says {_short(first)}={shown(self._values[first])}{more}, which "
                "pyengine does not know for this model: if it has no effect on the answers, delete "
                "it from the file"
            )


def _short(key: str) -> str:
    return key if len(key) <= 80 else f"{key[:80]}..."
