"""The engine: `step` schedules, submits, commits and emits, as in the picture of the docs."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from time import monotonic
from typing import Any

from pyengine.engine.adapters import AdapterSlots
from pyengine.engine.changes import Change, Changes, has_begun
from pyengine.engine.deadlines import Deadlines
from pyengine.engine.input_processor import refuse_taken
from pyengine.engine.output_processor import (
    OutputProcessor,
    failed_processors,
    lost_grammars,
    without_choice,
)
from pyengine.engine.parts import EnginePart, EngineParts
from pyengine.engine.recovery import StepRecovery
from pyengine.engine.stats import EngineObserver, EngineStats, EngineView, StepResult, view_of
from pyengine.engine.step_rows import RecentRows, StepRows, SubmittedStep
from pyengine.errors import (
    BrokenLogitsError,
    EngineAsleepError,
    EngineClosedError,
    EngineDeadError,
    StructuredOutputError,
)
from pyengine.executor.executor import Executor, ModelStep
from pyengine.executor.states import StateSlots
from pyengine.kv_cache import BlockManager
from pyengine.request.request import Request, SequenceState, requests_of
from pyengine.scheduler.batch import ScheduledStep
from pyengine.scheduler.scheduler import Scheduler, StalledError
from pyengine.scheduler.states import RunningStates


class Engine:
    """Accepts requests, runs steps, emits outputs. Not thread-safe: one thread runs it.

    Its `parts` take part in each step, in their order: see `EnginePart`.
    """

    def __init__(
        self,
        manager: BlockManager,
        scheduler: Scheduler,
        executor: Executor,
        parts: Sequence[EnginePart] = (),
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._executor = executor
        self._adapters = adapters
        self._parts = EngineParts(parts)
        self._requests: dict[str, Request] = {}
        """Unfinished requests, by id."""
        self._deadlines = Deadlines()
        self._waits_for_blocks = False
        """True if no step could be planned, and blocks come free without one."""
        self._rows = RecentRows()
        self._output = OutputProcessor(reads_each_token=self._parts.read_each_token)
        self._queue: deque[SubmittedStep] = deque()
        """Running steps: at most two, the older one first."""
        self._changes = Changes()
        self.weights_version = 0
        """The number of changes of the weights so far."""
        self.asleep: frozenset[str] = frozenset()
        """What is not in memory: "weights", "kv_cache"; no step runs then."""
        self.recovery = StepRecovery(scheduler)
        self._observers: list[EngineObserver] = []
        self.num_new_tokens = 0
        """Tokens generated so far, by all requests."""
        self._is_stepping = False
        self.death = ""
        """The reason why no further step can run; empty if one can."""

    @property
    def has_work(self) -> bool:
        """True if a step can run, or a change can be made."""
        return bool(self._changes or (self._requests and not self.asleep))

    @property
    def is_running(self) -> bool:
        """True if a step runs while the caller has the results of the one before."""
        return bool(self._queue)

    @property
    def is_waiting(self) -> bool:
        """True if no step runs, and the next one waits for bytes to be moved."""
        return self._waits_for_blocks and not self._queue

    @property
    def unfinished(self) -> list[Request]:
        """Requests that have not ended, in order of arrival."""
        return list(self._requests.values())

    def observe(self, observer: EngineObserver) -> None:
        """Notify `observer` of every request and step from now on."""
        self._observers.append(observer)

    def add(self, request: Request) -> None:
        """Queue a request. Raises `InvalidRequestError` for an id that is in use."""
        if self._requests.get(request.request_id) is request:  # Ctrl-C came after it was queued
            return
        if request.request_id in self._requests:
            refuse_taken([request], self._requests)
        if self.asleep:
            raise EngineAsleepError(
                f"the engine sleeps, without {' and '.join(sorted(self.asleep))}: wake it up first"
            )
        for sequence in request.sequences:
            sequence.output.weights_versions = ((0, self.weights_version),)
        try:
            self._requests[request.request_id] = request
            self._output.begin(request)
            self._scheduler.add(request.sequences[0])
            if request.deadline is not None:
                self._deadlines.add(request.deadline, request)
        except BaseException:  # Ctrl-C, too: all or nothing
            self._scheduler.finish(request.sequences)
            self._requests.pop(request.request_id, None)
            raise
        for observer in self._observers:
            observer.on_arrival(request)

    def change(self, change: Change) -> None:
        """Make a change before the next step, or, as its mode says, before a later one."""
        self._changes.add(change)
        self._make_changes()

    def _make_changes(self) -> None:
        """Make the changes that wait for no step and no sequence."""
        while self._changes and not self._queue and not self._is_stepping:
            if self._changes.held(self._requests.values()) is not None:
                return
            if not all([part.is_ready_for_change() for part in self._parts.all]):
                return
            change = self._changes.take()
            self._output.flush()
            begun = [request for request in self._requests.values() if has_begun(request)]
            before = self.weights_version
            try:
                self.weights_version = change.apply()
            except Exception as error:  # of the change alone
                change.outcome.put(error)
                continue
            self._rows.forget()
            if change.mode == "abort":
                self.abort(begun, stop_reason="weights_changed")
            elif change.mode == "recompute":
                self.recompute_all()
            if self.weights_version != before:
                for request in self._requests.values():
                    if change.mode == "recompute":
                        request.restart_prompt()
                    self._note_version(request)
            change.outcome.put(self.weights_version)

    def recompute_all(self) -> None:
        """Let all running sequences wait, to compute their KV again. No step is open."""
        self._scheduler.recompute_all()

    def drop_kept(self) -> None:
        """Release what is kept of KV that is of no use any more."""
        self._scheduler.drop_kept()
        for part in self._parts.all:
            part.kv_dropped()

    def _note_version(self, request: Request) -> None:
        """The next tokens of a request are by the current version of the weights."""
        for sequence in request.unfinished:
            output, count = sequence.output, len(sequence.token_ids)
            earlier = output.weights_versions if has_begun(request) else ()
            output.weights_versions = (*earlier, (count, self.weights_version))

    def step(self) -> StepResult:
        """Run one step: schedule and submit, wait and commit, emit.

        With overlap a second step is submitted before the tokens of the first are known; it decodes
        them on the device. A failed step is rolled back, with the one after it, and no request
        changes. Its requests become suspects: one on which the forward pass fails again ends with
        the finish reason "error", and the others go on. A step that is too large for the device's
        memory is planned again, smaller; `DeviceMemoryError` if it cannot be smaller. Once the
        device has failed, this and every later call raises `EngineDeadError`.
        """
        if self.death:
            raise EngineDeadError(self.death)
        self._make_changes()
        self._is_stepping = True
        try:
            self._waits_for_blocks = False
            while len(self._queue) < self._executor.depth and self._submit(self._schedule()):
                pass
            result = self._emit(self._commit()) if self._queue else StepResult()
        except EngineDeadError as error:
            self.death = str(error)
            raise
        finally:
            self._is_stepping = False
            if not self._requests:
                self._end_steps()
        for observer in self._observers:
            observer.on_step(result)
        return result

    def _schedule(self) -> ScheduledStep | None:
        """Plan the next step. None: no request can run, or it needs tokens of the one before."""
        for request in self._deadlines.overdue(len(self._requests)):
            self.abort([request], stop_reason="deadline")
        before = self._queue[-1].step if self._queue else None
        held: Collection[SequenceState] = ()
        if self.asleep:
            return None
        if self._changes:
            waiting = self._changes.held(self._requests.values())
            if waiting is None:
                self._waits_for_blocks = before is None  # else the change would have been made
                return None
            held = waiting
        suspects = self.recovery.faults.suspects
        if suspects:
            if before is not None:  # one step at a time during the search
                return None
            held = [*held, *self.recovery.held(self._requests.values())]
        for part in self._parts.before_plan:
            part.before_plan(self._scheduler, before)
        try:
            step = self._scheduler.schedule(ahead=before is not None, without=held)
        except StalledError as error:
            if not self._parts.free_blocks():
                self._fail(error.sequence.request, error)
                return None
            step = None
        if step is None:
            self._waits_for_blocks = self._parts.free_blocks()
            self.recovery.release()
        else:
            step.may_draft = not suspects
        return step

    def _submit(self, step: ScheduledStep | None) -> bool:
        """Put a step into the device's queue; True if that succeeded."""
        if step is None:
            return False
        before = self._queue[-1].model_step if self._queue else None
        try:
            for part in self._parts.planned:
                part.planned(step)
            rows, positions = self._rows.of(step)
            model_step = ModelStep(step.plan, rows.batch, positions, step.mtp)
            if self._scheduler.states is not None:
                model_step.states = self._slots_of(step, self._scheduler.states)
            if self._adapters is not None:
                model_step.adapters = self._adapters.of(step)
            self._executor.submit(model_step, before)
            self._queue.append(SubmittedStep(step, rows, model_step, step.plan.num_tokens))
        except BaseException as error:
            if self._queue and self._queue[-1].step is step:  # Ctrl-C came after that
                self._queue.pop().model_step.work.exception()
            num_tokens, sequences = step.plan.num_tokens, step.sequences
            self._rows.forget()
            self._scheduler.rollback(step)
            self._recover(sequences, num_tokens, error)
            return False
        return True

    def _slots_of(self, step: ScheduledStep, states: RunningStates) -> StateSlots:
        ids = [sequence.kv.id for sequence in step.sequences]
        return StateSlots(ids, states.slots_of(step), states.take_forks(step))

    def _commit(self) -> SubmittedStep | None:
        """Wait for the oldest step and commit it. None: it failed and was rolled back."""
        submitted = self._queue.popleft()
        step, rows = submitted.step, submitted.rows
        try:
            submitted.sampled = submitted.model_step.work.result().wait()
            token_ids = submitted.sampled.token_ids
            if step.drafts:
                accepted = rows.accept(token_ids.tolist())
                self._scheduler.commit(step, accepted.tokens, accepted.counts)
                submitted.rejected = accepted.rejected
            else:
                if rows.batch.repeats is not None:
                    token_ids = rows.batch.own_tokens(token_ids)
                self._scheduler.commit(step, token_ids)
        except BaseException as error:
            # Ctrl-C may have come after the commit.
            num_tokens = step.plan.num_tokens if step.plan.is_open else 0
            self._roll_back(submitted)
            if isinstance(error, BrokenLogitsError):
                self._fail_broken(rows, error)
            else:
                self._recover(step.sequences, num_tokens, error)
            return None
        if self.recovery.is_active:
            self.recovery.succeeded(step.sequences)
        for part in self._parts.committed:
            part.committed(submitted)
        return submitted

    def _roll_back(self, *oldest: SubmittedStep) -> None:
        """Undo every step, the newest first, after the device has finished it."""
        for submitted in [*reversed(self._queue), *oldest]:
            submitted.model_step.work.exception()
            if submitted in self._queue:
                self._queue.remove(submitted)
            self._rows.forget()
            if submitted.step.plan.is_open:
                self._scheduler.rollback(submitted.step)

    def _recover(
        self, sequences: list[SequenceState], num_tokens: int, error: BaseException
    ) -> None:
        """Go on after a step failed that was rolled back; raise if that is not possible."""
        culprit = self.recovery.failed(sequences, num_tokens, error)
        if culprit is not None:
            assert isinstance(error, Exception)
            self._fail(culprit, error)

    def _fail_broken(self, rows: StepRows, error: BrokenLogitsError) -> None:
        """End the requests without a token to choose; after a draft, only disable drafts."""
        broken = [rows.sequences[row] for row in error.rows if row not in rows.ahead]
        for request in requests_of(broken):
            self._fail(request, without_choice(request, error))
        sequences = dict.fromkeys([rows.sequences[row] for row in error.rows])
        going_on = [sequence for sequence in sequences if sequence.output.finish_reason is None]
        for part in self._parts.all:
            part.without_token(going_on, error)

    def _end_steps(self) -> None:
        """Without requests, roll back running steps and drop their results."""
        self._rows.forget()
        self._output.forget()
        if self._queue:
            self._roll_back()

    def _emit(self, submitted: SubmittedStep | None) -> StepResult:
        """Append tokens to sequences, fork new samples, end finished ones, emit deltas."""
        if submitted is None:
            return StepResult()
        rows = submitted.rows
        if rows.batch.sampling.matchers:
            for request, message in lost_grammars(rows).items():
                self._fail(request, StructuredOutputError(message))
        if rows.batch.sampling.processors:
            for request, error in failed_processors(rows).items():
                self._fail(request, error)
        appended = self._output.append(submitted)
        for request in appended.begun:
            self._begin_output(request)
        finished = self._finish(appended.ended) if appended.ended else []
        for request, error in appended.failed.items():
            self._fail(request, error)
        if rows.streamed:
            self._output.emit(rows)
        self.num_new_tokens += appended.num_new_tokens
        return StepResult(
            num_new_tokens=appended.num_new_tokens,
            finished=finished,
            num_tokens=submitted.num_tokens,
            rows=rows.sequences,
            begun=appended.begun,
            ended=appended.ended,
            num_drafted=appended.num_drafted,
        )

    def _begin_output(self, request: Request) -> None:
        """Call the parts for a prompt that was computed, and fork its further samples."""
        if request.rules.max_output:  # else it wants its prompt alone
            request.result.first_token_time = monotonic()
        for part in self._parts.prompt_done:
            for further in part.prompt_done(request):
                self.add(further)
        if request.rules.max_output and len(request.sequences) > 1:
            self._output.flush()
            others = [sequence for sequence in request.unfinished if sequence.index > 0]
            self._scheduler.fork(
                request.sequences[0], [(other, other.token_ids[-1]) for other in others]
            )

    def _finish(self, ended: list[SequenceState]) -> list[Request]:
        """Remove finished sequences; return the finished requests."""
        self._release(ended)
        finished = [request for request in requests_of(ended) if request.is_finished]
        for request in finished:
            self._remove(request)
        return finished

    def _release(self, sequences: Sequence[SequenceState]) -> None:
        """Call the parts for sequences that have ended, and release their blocks."""
        for part in self._parts.finished:
            part.finished(sequences)
        self._scheduler.finish(sequences)

    def _remove(self, request: Request, error: Exception | None = None) -> None:
        """Remove a finished request; emit its last output, or its error."""
        self._requests.pop(request.request_id, None)
        if request.prompt_entries is not None:
            request.prompt_entries.withdraw()
        self._output.end(request, error)
        for observer in self._observers:
            observer.on_finish(request)

    def abort(
        self, requests: Iterable[Request], *, stop_reason: str | None = None
    ) -> list[Request]:
        """End requests early; returns those that had not ended. May be called while a step runs."""
        live = [
            request for request in requests if self._requests.get(request.request_id) is request
        ]
        if live:
            self._output.flush()
        for request in live:
            request.finish("abort", stop_reason)
            self._release(request.sequences)
            self._remove(request)
        self.recovery.forget(live)
        if not self._requests and not self._is_stepping:
            self._end_steps()
        return live

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request that cannot be served, because of `error`.

        A request that has ended since the step was planned is ignored.
        """
        if self._requests.get(request.request_id) is not request:
            return
        self._output.flush()
        request.finish("error")
        self._release(request.sequences)
        self.recovery.forget([request])
        self._remove(request, error)

    def idle(self) -> float | None:
        """Let the parts use the time without requests.

        Returns the seconds after which to call this again, at most; None: never.
        """
        waits = [part.idle() for part in self._parts.idle]
        return min([seconds for seconds in waits if seconds is not None], default=None)

    def close(self, timeout: float) -> None:
        """End the parts' threads, within `timeout` seconds."""
        self._changes.fail(EngineClosedError("the engine was closed before the change"))
        for part in self._parts.all:
            part.close(timeout)

    def view(self, max_requests: int) -> EngineView:
        """The pool, and up to `max_requests` requests, running ones first."""
        unfinished = self._requests.values()
        return view_of(self.stats(), self._manager, self._scheduler, unfinished, max_requests)

    def num_of(self, tenant: bytes) -> tuple[int, int]:
        """The numbers of a tenant's sequences that run, and of its requests that wait."""
        return self._scheduler.num_of(tenant)

    def stats(self) -> EngineStats:
        """The current usage and counters."""
        counters = self._manager.stats().as_dict()
        for name, number in self._scheduler.reuse.items():
            counters[name] = counters.get(name, 0) + number
        of_parts: dict[str, Any] = {}
        for part in self._parts.all:
            of_parts |= part.engine_stats()
        return EngineStats(
            usage=self._manager.usage(),
            counters=counters,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=self._scheduler.num_preemptions,
            num_new_tokens=self.num_new_tokens,
            **of_parts,
        )
