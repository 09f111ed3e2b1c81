"""The cases of the zoo. The tables of docs/explanation/bug-zoo.md have the same."""

from collections.abc import Callable
from typing import TypeVar

Case = TypeVar("Case", bound=Callable[..., None])
BUGS: dict[str, tuple[str, ...]] = {}
"""By name of the test: the threads on https://github.com/ that report the bug."""


def bug(*reports: str) -> Callable[[Case], Case]:
    """Mark a test as the case of a bug that these public threads report."""

    def mark(case: Case) -> Case:
        BUGS[case.__name__] = reports
        return case

    return mark
