"""What a section says: rows, and what it is given."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

Status: TypeAlias = Literal["pass", "fail", "refused", "skip", "info"]
"""`refused`: a backend said that it cannot serve, and why. `info`: a figure, nothing is checked."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report. `numbers` are JSON's kinds of values; `detail` is for people."""

    check: str
    status: Status
    numbers: Mapping[str, Any] = field(default_factory=dict)
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a section is told: JSON's kinds of values, for it runs in a process of its own.

    `folder` is for its files. `facts` are the numbers of the rows of earlier sections, by their
    `check`. `backends` are the names to try, None: all that there are. `options` are the section's.
    """

    device: str
    folder: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    families: tuple[str, ...] | None = None
    backends: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def on_cuda(self) -> bool:
        """Whether this is the real thing; on the CPU everything is smaller."""
        return self.device.startswith("cuda")

    def path(self, name: str) -> Path:
        """A file or folder of that name among the section's."""
        return Path(self.folder) / name


Part: TypeAlias = tuple[str, Callable[[], Iterable[Row]]]
"""A piece of a section that can fail alone: its name, and what gives its rows."""


def checked(check: str, wrong: str, numbers: Mapping[str, Any]) -> Row:
    """A row that passes where there is nothing `wrong`."""
    return Row(check, "fail" if wrong else "pass", numbers, wrong)


def rounded(number: float) -> float | None:
    """Four digits; None for what JSON cannot hold."""
    return float(f"{number:.4g}") if math.isfinite(number) else None
