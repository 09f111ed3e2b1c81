"""Recovery from a failed step: find the request at fault, or take smaller steps."""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pyengine.errors import DeviceMemoryError, EngineDeadError, PyEngineError, WorkerError
from pyengine.request.request import Request, SequenceState, requests_of
from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits
from pyengine.utils.openmp import loaded_torch

_log = logging.getLogger(__name__)

_FAILURES = 2  # failed steps as the only suspect after which a request fails; the first may pass
_FAILURES_IN_COMPANY = 4
"""The same if it could never run alone: the requests beside it may be at fault."""
_HOPELESS = 4
"""Requests found at fault with no good step in between: then the requests are not the cause."""
_FIRST_CALM, _LONGEST_CALM = 64, 4096  # steps without a failure before limits are raised again

_OUT_OF_MEMORY = ("can't allocate memory", "cannot allocate memory", "bad_alloc")
"""Messages of torch's allocator for CPUs, the system, and libraries in C++, in lower case."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if a step failed for lack of memory, of the device or of this process.

    torch has an error class for devices only: on CPUs it raises a plain `RuntimeError`.
    """
    torch = loaded_torch()
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return type(error) is RuntimeError and any(words in text for words in _OUT_OF_MEMORY)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a failed step: the request at fault, if that is certain."""

    culprit: Request | None = None
    is_hopeless: bool = False
    """Steps fail with any request in them: the requests are not the cause."""


class FaultFinder:
    """Finds the request on which the forward pass fails, by leaving others out of steps.

    Suspects are the requests in every failed step since the search began and in no good one. New
    requests, without a token yet, are left out first, then halves of the suspects, the last in the
    order of service first. A bad request that has just arrived is found within 2 steps after the
    failed one, any other of n within log2(n) + 2. The last suspect runs alone, and is at fault if
    it fails once more. If no step is possible without the others (they hold the blocks, or
    are all that may run), one runs with all; if that fails, all requests in it become suspects.

    Bad requests that arrive together would be found in a row, as they are first in the order. So
    the third search begins with the middle suspect alone, and the fourth with the last one: if it
    is served, the requests are not the cause.
    """

    def __init__(self) -> None:
        self.suspects: list[Request] = []
        """Not empty from a failed step until a request is found at fault or all are cleared."""
        self._failures: Counter[Request] = Counter()
        """Failed steps that each suspect may have caused, since its last good step."""
        self._held: set[Request] = set()
        self._can_hold = True  # true if the next step may leave requests out
        self._num_failed = 0  # requests found at fault since the last good step
        self.logged: set[tuple[type[BaseException], str]] = set()
        """Failures that were logged with tracebacks: a search repeats the same one in many steps.
        Cleared after a good step outside of a search: later failures are new ones."""

    def held(self, unfinished: Iterable[Request]) -> set[SequenceState]:
        """The sequences of unfinished requests that the next step leaves out.

        New requests do not run during a search.
        """
        if not self._can_hold:
            return set()
        suspects, is_last = set(self.suspects), len(self.suspects) == 1
        held = [
            request
            for request in unfinished
            if request in self._held
            or (request not in suspects and (is_last or request.result.first_token_time is None))
        ]
        return {sequence for request in held for sequence in request.sequences}

    def failed(self, sequences: Iterable[SequenceState]) -> Verdict:
        """Record a failed step with these sequences, which was rolled back."""
        requests = set(requests_of(sequences))
        was_forced, self._can_hold = bool(self.suspects) and not self._can_hold, True
        took_part = {request for request in requests if request.result.finished_time is None}
        suspects = [suspect for suspect in self.suspects if suspect in took_part]
        if not suspects:
            for request in took_part:
                del self._failures[request]
            suspects = self._in_order(took_part)
        if not suspects:  # all of them were aborted meanwhile
            return Verdict()
        self._failures.update(suspects)
        last = suspects[-1]
        if was_forced and self._failures[last] >= _FAILURES_IN_COMPANY:
            return self._at_fault(last)
        self.suspects = self._in_order(took_part) if was_forced else suspects
        if len(self.suspects) > 1:
            self._hold_back()
            return Verdict()
        self._held.clear()
        is_proven = len(requests) == 1 and self._failures[last] >= _FAILURES
        return self._at_fault(last) if is_proven else Verdict()

    def succeeded(self, sequences: Iterable[SequenceState]) -> None:
        """Record a good step with these sequences, during a search or not."""
        self._num_failed = 0
        if not self.suspects:
            self.logged.clear()
            return
        self._can_hold = True
        took_part = set(requests_of(sequences))
        for request in took_part:
            del self._failures[request]
        self.suspects = [suspect for suspect in self.suspects if suspect not in took_part]
        if len(self.suspects) > 1:
            self._hold_back()
        else:
            self._held.clear()
        if not self.suspects:
            self.logged.clear()

    def unlogged(self, error: BaseException) -> BaseException | None:
        """Return `error` as logging's `exc_info`, None if an equal one was logged."""
        key = (type(error), str(error))
        if key in self.logged:
            return None
        self.logged.add(key)
        return error

    def forget(self, requests: Iterable[Request]) -> None:
        """Drop requests that have ended."""
        for request in requests:
            self._held.discard(request)
            del self._failures[request]
            if request in self.suspects:
                self.suspects.remove(request)

    def release(self) -> None:
        """Hold no request out of the next step: the others make no step."""
        self._held.clear()
        self._can_hold = False

    def _at_fault(self, culprit: Request) -> Verdict:
        self.suspects = []
        self._held.clear()
        self._num_failed += 1
        return Verdict(culprit, is_hopeless=self._num_failed >= _HOPELESS)

    @staticmethod
    def _in_order(requests: Iterable[Request]) -> list[Request]:
        """The requests in the order of service."""
        return sorted(requests, key=lambda request: request.sequences[0].order)

    def _hold_back(self) -> None:
        """Leave some of the suspects out of the next step."""
        suspects = self.suspects
        newcomers = {suspect for suspect in suspects if suspect.result.first_token_time is None}
        if 0 < len(newcomers) < len(suspects):
            self._held = newcomers
        elif self._num_failed == _HOPELESS - 2:
            self._held = set(suspects) - {suspects[len(suspects) // 2]}
        elif self._num_failed == _HOPELESS - 1:
            self._held = set(suspects[:-1])
        else:
            self._held = set(suspects[len(suspects) // 2 :])


class LimitRecovery:
    """Step limits after a step exceeded the device's memory: smaller, then larger again.

    Limits are halved when a step does not fit, and doubled after a number of steps that did. That
    number doubles each time that larger steps fail again.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.initial = limits
        self._calm = _FIRST_CALM
        self._since = 0
        self._has_grown = False

    def smaller(self, num_tokens: int) -> SchedulerLimits | None:
        """Limits after a step of `num_tokens` did not fit; None if it cannot be smaller."""
        if num_tokens < 2:
            return None
        if self._has_grown:
            self._calm = min(2 * self._calm, _LONGEST_CALM)
        self._since, self._has_grown = 0, False
        return self._of(num_tokens // 2)

    def after_a_step(self, limits: SchedulerLimits) -> SchedulerLimits:
        """Limits after a step that fitted."""
        if limits == self.initial:
            return limits
        self._since += 1
        if self._since < self._calm:
            return limits
        self._since, self._has_grown = 0, True
        return self._of(min(2 * limits.max_num_batched_tokens, self.initial.max_num_batched_tokens))

    def _of(self, max_num_batched_tokens: int) -> SchedulerLimits:
        return replace(
            self.initial,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=min(self.initial.max_num_seqs, max_num_batched_tokens),
        )


class StepRecovery:
    """The engine's two recoveries from a failed step, and their logs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.faults = FaultFinder()
        self._limits = LimitRecovery(scheduler.limits)
        self.is_active = False
        """True from a failed step until its requests are cleared, the limits are what they were,
        and a good step has followed: good steps have to be recorded."""

    def held(self, unfinished: Iterable[Request]) -> set[SequenceState]:
        """The sequences that the next step leaves out. See `FaultFinder.held`."""
        return self.faults.held(unfinished)

    def release(self) -> None:
        """During a search, leave no request out of the next step: the others make no step."""
        if self.faults.suspects:
            self.faults.release()

    def forget(self, requests: Iterable[Request]) -> None:
        """Drop requests that have ended."""
        self.faults.forget(requests)

    def succeeded(self, sequences: Iterable[SequenceState]) -> None:
        """After a good step, clear its requests of suspicion, and raise reduced limits again."""
        limits = self._scheduler.limits = self._limits.after_a_step(self._scheduler.limits)
        self.faults.succeeded(sequences)
        if not self.faults.suspects:
            self.is_active = limits != self._limits.initial or bool(self.faults.logged)

    def failed(
        self, sequences: list[SequenceState], num_tokens: int, error: BaseException
    ) -> Request | None:
        """Recover from a failed step of `num_tokens` tokens, which was rolled back.

        Returns the request at fault, if that is certain. Raises `error` if it is no fault of a
        request, `DeviceMemoryError`, and `EngineDeadError` if the device has failed.
        """
        self.is_active = True
        if is_out_of_memory(error):
            self._shrink(num_tokens, error)
            return None
        torch = loaded_torch()
        if torch and isinstance(error, torch.AcceleratorError):
            raise EngineDeadError(
                f"the device failed: {error}; no request was lost, but nothing can run on it "
                "any more: make a new LLM in a new process"
            ) from error
        is_ours = isinstance(error, PyEngineError) and not isinstance(error, WorkerError)
        if is_ours or not isinstance(error, Exception):
            raise error
        verdict = self.faults.failed(sequences)
        if verdict.is_hopeless:
            raise error
        if verdict.culprit is None:
            traceback = self.faults.unlogged(error)
            _log.warning(
                "a step failed and is tried again with others: %r", error, exc_info=traceback
            )
        return verdict.culprit

    def _shrink(self, num_tokens: int, error: BaseException) -> None:
        """Use smaller steps after one of `num_tokens` tokens that did not fit."""
        limits = self._limits.smaller(num_tokens)
        if limits is None:
            raise DeviceMemoryError(
                f"a step of {num_tokens} token does not fit into the device's memory ({error}); "
                "give the KV pool less: a smaller gpu_memory_utilization, kv_cache_memory or "
                "num_blocks"
            ) from error
        self._scheduler.limits = limits
        _log.warning(
            "a step of %d tokens did not fit into the device's memory (%s); for now "
            "max_num_batched_tokens=%d and max_num_seqs=%d",
            num_tokens,
            error,
            limits.max_num_batched_tokens,
            limits.max_num_seqs,
        )
        torch = loaded_torch()
        if torch and torch.cuda.is_available():
            torch.cuda.empty_cache()
