"""Changes between two steps: of weights, or of what is in memory.

A change waits until no step runs. Its mode says what becomes of the requests that have begun:

- `finish`: they end first; requests that have not begun wait for the change.
- `abort`: they end with the tokens that they have.
- `keep`: they go on over the KV that they have, which no other request reuses.
- `recompute`: their KV is computed again.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Literal, TypeAlias, get_args

from pyengine.errors import InvalidRequestError
from pyengine.request.request import Request, SequenceState
from pyengine.utils.validation import shown

ChangeMode: TypeAlias = Literal["finish", "abort", "keep", "recompute"]

Outcome: TypeAlias = "SimpleQueue[int | Exception]"
"""Gets the version of the weights after a change, or why nothing has changed."""


def checked_mode(mode: object, but: tuple[str, ...] = ()) -> ChangeMode:
    """`mode`, if it is one that is not among `but`; else raises `InvalidRequestError`."""
    modes = [name for name in get_args(ChangeMode) if name not in but]
    if mode not in modes:
        raise InvalidRequestError(f"mode={shown(mode)}: it must be one of {', '.join(modes)}")
    return mode  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Change:
    """A change that waits. `apply` makes it, or raises and changes nothing."""

    apply: Callable[[], int]
    mode: ChangeMode
    outcome: Outcome


class Changes:
    """Those that wait, the oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[Change] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def first(self) -> Change:
        """The oldest."""
        return self._waiting[0]

    def add(self, change: Change) -> None:
        """Add a change."""
        self._waiting.append(change)

    def take(self) -> Change:
        """Remove the oldest."""
        return self._waiting.popleft()

    def held(self, requests: Iterable[Request]) -> list[SequenceState] | None:
        """The sequences that wait for the first change; None: it waits for no sequence."""
        requests = list(requests)
        if self.first.mode != "finish" or not any(map(has_begun, requests)):
            return None
        waiting = [request for request in requests if not has_begun(request)]
        return [sequence for request in waiting for sequence in request.sequences]

    def fail(self, error: Exception) -> None:
        """End all, unmade."""
        while self._waiting:
            self.take().outcome.put(error)


def has_begun(request: Request) -> bool:
    """True if weights have computed tokens of it that it still depends on."""
    return any(
        sequence.num_computed > 0 or len(sequence.token_ids) > 0 for sequence in request.sequences
    )
