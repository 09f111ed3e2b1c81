"""The interface of the engine's parts: what takes part in a step beside scheduler and executor."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pyengine.engine.step_rows import SubmittedStep
from pyengine.kv_cache import BlockManager
from pyengine.request.request import Request, SequenceState
from pyengine.scheduler.batch import ScheduledStep
from pyengine.scheduler.scheduler import Scheduler

_STEPS_AHEAD = 4
"""Largest steps for whose blocks memory is allocated while no step runs."""


class EnginePart:
    """A part of the engine: offloading, pins, drafts, verification, explanations.

    A part overrides the methods that it needs. The engine calls them in its thread, in this order,
    the parts one after the other as they were given to it.
    """

    reads_each_token = False
    """True if requests with `SamplingParams.speculate` need each token on the host at once."""

    def before_plan(self, scheduler: Scheduler, previous: ScheduledStep | None) -> None:
        """A step is about to be planned; `previous` still runs."""

    def planned(self, step: ScheduledStep) -> None:
        """A step was planned: it may still get drafts. An error fails the step."""

    def frees_blocks(self) -> bool:
        """True if this part holds blocks that come free without a step."""
        return False

    def committed(self, submitted: SubmittedStep) -> None:
        """A step was computed and committed."""

    def prompt_done(self, request: Request) -> Iterable[Request]:
        """The prompt of a request is computed, before its first token is emitted.

        Returns further requests, to be queued.
        """
        return ()

    def without_token(self, sequences: Sequence[SequenceState], error: Exception) -> None:
        """The logits of these sequences gave no token; those that go on had drafts."""

    def finished(self, sequences: Sequence[SequenceState]) -> None:
        """Sequences have ended, for any reason, and are about to release their blocks.

        May be called again for a sequence that has released them.
        """

    def is_ready_for_change(self) -> bool:
        """True if this part moves no KV, so that weights or the pool may change."""
        return True

    def kv_dropped(self) -> None:
        """No KV that was computed before is valid from now on."""

    def idle(self) -> float | None:
        """No request is left. Returns the seconds after which to call this again; None: never."""
        return None

    def engine_stats(self) -> Mapping[str, Any]:
        """The fields of `EngineStats` that this part knows."""
        return {}

    def close(self, timeout: float) -> bool:
        """End threads, and write what is queued; False if `timeout` seconds were too short."""
        return True


class EngineParts:
    """The parts of an engine, in their order."""

    def __init__(self, parts: Sequence[EnginePart]) -> None:
        self.all = tuple(parts)
        self.read_each_token = any(part.reads_each_token for part in parts)
        # A step calls only parts that override a method.
        self.before_plan = self._overriding(EnginePart.before_plan)
        self.planned = self._overriding(EnginePart.planned)
        self.committed = self._overriding(EnginePart.committed)
        self.prompt_done = self._overriding(EnginePart.prompt_done)
        self.finished = self._overriding(EnginePart.finished)
        self.idle = self._overriding(EnginePart.idle)

    def _overriding(self, default: Callable[..., Any]) -> list[EnginePart]:
        name = default.__name__
        return [part for part in self.all if getattr(type(part), name) is not default]

    def free_blocks(self) -> bool:
        """True if any part holds blocks that come free without a step."""
        return any([part.frees_blocks() for part in self.all])


class MemoryAhead(EnginePart):
    """Allocates memory of the blocks that come next while no request is there.

    Blocks that were never used are allocated in the order of their numbers.
    """

    def __init__(
        self, manager: BlockManager, populate: Callable[[int], bool], max_num_batched_tokens: int
    ) -> None:
        """`populate` allocates some of the first blocks, for a few ms; False when done."""
        self._manager = manager
        self._populate = populate
        self._num_ahead = _STEPS_AHEAD * max_num_batched_tokens // manager.block_size

    def idle(self) -> float | None:
        """Allocate some memory."""
        is_needed = self._populate(self._manager.stats().allocated_blocks + self._num_ahead)
        return 0.0 if is_needed else None
