"""What a drafter is, what it sees and what it gives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pyengine.scheduler.request import Request


class Context(Protocol):
    """A sample as drafters see it: the same object from its first draft until it is forgotten."""

    @property
    def request(self) -> "Request":
        """Its prompt, and the namespace that it belongs to."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """What was generated so far; it only grows, by what was accepted."""
        ...

    @property
    def is_drawn(self) -> bool:
        """Whether its tokens are drawn; otherwise the most probable are taken."""
        ...


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next, in order, and how well they are founded.

    `support` is how many tokens before them the drafter has seen in front of the same ones: those
    of the same support are right about equally often.
    """

    tokens: Sequence[int] = ()
    support: int = 0


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Guesses what comes next. Called by the thread that runs the steps."""

    def propose(self, contexts: Sequence[Context], most: Sequence[int]) -> Sequence[Draft]:
        """A draft for each context, of at most so many tokens; an empty one where it has no guess.

        What was accepted of earlier ones is part of the contexts by now.
        """
        ...

    def forget(self, context: Context) -> None:
        """The sample has ended. It may never have been seen."""
        ...


@runtime_checkable
class ComputingDrafter(Drafter, Protocol):
    """A drafter that computes texts itself, within the token budget of the engine's steps."""

    def begin_step(self, budget: int) -> None:
        """Until the next call, compute at most so many tokens of texts, drafts aside."""
        ...
