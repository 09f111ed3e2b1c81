"""Every setting of an engine and of a server at its extremes: taken, or refused in a sentence."""

import dataclasses
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine.config import EngineSettings
from pyengine.errors import ConfigurationError
from pyengine.server.settings import ServerSettings

NUMBERS: list[Any] = [
    0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 10**30, -(10**5000), 1e-300, 1e300, math.nan, math.inf,
    -math.inf, 0.5, True, False, None, Fraction(1, 3), 1j, np.int8(1), np.uint64(2**64 - 1),
    np.float32("nan"), np.bool_(True),
]  # fmt: skip
TEXTS: list[Any] = [
    "", "1", "\ud800", "\0", "a" * 10**6, b"a", "\x1b[31m", "../..", "/", Path(), Path("/dev/zero"),
    (), [], {}, set(), [1], ["a"], [""], [None], ["\ud800"], object(), int, lambda: 5,
]  # fmt: skip


class Odd:
    """Fails at whatever is asked of it."""

    def __repr__(self) -> str:
        raise RuntimeError("no name")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equal")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (kind, field.name)
        for kind in (EngineSettings, ServerSettings)
        for field in dataclasses.fields(kind)
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_setting_of_any_value_is_taken_or_refused(settings: Any, name: str) -> None:
    for value in (*NUMBERS, *TEXTS, Odd()):
        try:
            made = settings(**{name: value})
        except ConfigurationError as error:
            said = str(error)
            assert len(said) < 1000, "a wall of text is no sentence"
            assert name in said, said
        else:
            assert isinstance(made, settings)
