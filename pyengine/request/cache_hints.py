"""The prefixes that a request asks to keep cached."""

from dataclasses import dataclass

from pyengine.kv_cache import Pin


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheHints:
    """The prefixes of a request to pin, and whose share of the pinned blocks they count against."""

    pins: tuple[tuple[int, float], ...] = ()
    """Tokens of a prefix, and the seconds for which it is pinned."""
    owner: bytes = b""
    num_owners: int = 1
    """Owners that share `PinTable.limit` in equal parts."""


NO_HINTS = CacheHints()


@dataclass(slots=True, eq=False)
class KeptPrefix:
    """A prefix in a `PinTable`."""

    owner: bytes
    pin: Pin
    blocks: frozenset[int]
    end: float
    """In seconds of `time.monotonic`; infinite if kept by priority."""

    @property
    def num_tokens(self) -> int:
        """Its tokens, in whole blocks."""
        return self.pin.num_tokens
