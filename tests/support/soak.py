"""Parameters that only soak runs have."""

from collections.abc import Iterable
from typing import Any

import pytest


def soak_only(values: Iterable[Any]) -> list[Any]:
    """`values` for `pytest.mark.parametrize`, each marked `soak`."""
    return [pytest.param(value, marks=pytest.mark.soak) for value in values]
