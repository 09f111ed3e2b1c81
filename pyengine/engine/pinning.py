"""Pins of prompts, and prefixes that are kept by priority after their sequences have ended."""

import logging
from collections.abc import Iterable, Sequence

from pyengine.engine.parts import EnginePart
from pyengine.errors import PinQuotaError
from pyengine.kv_cache import BlockManager, Pin
from pyengine.request.request import Request, SequenceState
from pyengine.scheduler.batch import ScheduledStep
from pyengine.scheduler.pins import PinTable
from pyengine.scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)


class Pinning(EnginePart):
    """Pins the prefixes that requests name in their hints, and ends pins whose time is over."""

    def __init__(self, manager: BlockManager, table: PinTable) -> None:
        self._manager = manager
        self.table = table

    def before_plan(self, scheduler: Scheduler, previous: ScheduledStep | None) -> None:
        """End the pins whose time is over."""
        if self.table.ends:
            self.table.expire()

    def prompt_done(self, request: Request) -> Iterable[Request]:
        """Pin the prefixes of a computed prompt that its hints name, within the quota."""
        tokens, hints = request.prompt_token_ids, request.cache_hints
        if hints.pins:
            try:
                request.result.pins = self.table.pin(tokens, request.space, hints)
            except PinQuotaError as error:
                _log.info("request %r is not pinned: %s", request.request_id, error)
                request.result.pin_error = error
        return ()

    def finished(self, sequences: Sequence[SequenceState]) -> None:
        """Keep the prefixes of requests with a `cache_priority`, unless they have failed."""
        for sequence in sequences:
            request, output = sequence.request, sequence.output
            priority = request.params.cache_priority
            if priority and sequence.is_running and output.finish_reason != "error":
                self.table.keep(self._pin_of(sequence), priority, request.cache_hints)

    def idle(self) -> float | None:
        """End the pins whose time is over; returns the seconds to the next end."""
        return self.table.expire() if self.table.ends else None

    def _pin_of(self, sequence: SequenceState) -> Pin:
        """A pin on the blocks of a sequence that stay cached."""
        if sequence.num_kept is None:
            return sequence.kv.pin()
        tokens = sequence.kv.tokens()[: sequence.num_kept]
        return self._manager.match_prefix(tokens, **sequence.request.space)
