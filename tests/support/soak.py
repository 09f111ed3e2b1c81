"""Parameters that only soak runs have."""

from collections.abc import Iterable
from typing import Any

import pytest


def soak_only(values: Iterable[Any]) -> list[Any]:
    """Values of one parameter for `pytest.mark.parametrize`, each marked `soak`."""
    return soak_cases((value,) for value in values)


def soak_cases(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Values of several parameters for `pytest.mark.parametrize`, each case marked `soak`."""
    return [pytest.param(*case, marks=pytest.mark.soak) for case in cases]
