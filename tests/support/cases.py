"""Many cases of a check, chosen by Hypothesis: the same ones in every run."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy


def check_cases(check: Callable[..., None], count: int, **arguments: SearchStrategy[Any]) -> None:
    """Call `check` with `count` choices of its arguments."""
    configured = settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    configured(given(**arguments)(check))()
