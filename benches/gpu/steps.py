"""The building blocks of the parts of the first hour on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Found = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """Where a part runs, the folder that it may leave files in, and how long a step may take."""

    device: str
    folder: str
    seconds: float = 120.0

    @property
    def on_cuda(self) -> bool:
        """Whether this is the real thing."""
        return self.device.startswith("cuda")

    def either(self, full: Any, tiny: Any) -> Any:
        """The size of a step, here."""
        return full if self.on_cuda else tiny


class NotHere(Exception):
    """A step that this machine cannot take, and why: no failure."""


@dataclass(frozen=True)
class Step:
    """Something to try, for so many seconds at most. It returns what is to be written down.

    A value of several lines, for instance a table, is set below the step. Steps of the
    same `beside` run at the same time.
    """

    name: str
    call: Callable[..., Found]
    arguments: tuple[Any, ...] = ()
    seconds: float = 120.0
    beside: str = ""
