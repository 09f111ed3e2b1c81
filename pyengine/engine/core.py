"""The engine: `step` schedules, submits, commits and emits, as in the picture of the docs."""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count, islice
from time import monotonic
from typing import Any, Protocol

from pyengine.engine.explain import explain_request
from pyengine.engine.input_processor import InputProcessor, ModelLimits, refuse_taken
from pyengine.engine.offloading import KVOffloader
from pyengine.engine.prompt_logprobs import PromptLogprobCache
from pyengine.engine.recovery import FaultFinder, LimitRecovery, is_out_of_memory
from pyengine.engine.request import Request, SequenceState
from pyengine.engine.stats import EngineView, view_of
from pyengine.engine.verification import HitVerifier
from pyengine.errors import (
    BrokenLogitsError,
    DeviceMemoryError,
    EngineDeadError,
    PinQuotaError,
    PyEngineError,
    RequestFailedError,
    StructuredOutputError,
    WorkerError,
)
from pyengine.executor.executor import Executor, InputBatch, SubmittedStep
from pyengine.kv_cache import BlockManager, Pin, PoolUsage
from pyengine.scheduler.batch import ScheduledStep
from pyengine.scheduler.scheduler import Scheduler, StalledError
from pyengine.speculation.drafters import Drafter
from pyengine.speculation.drafting import Drafting
from pyengine.speculation.policy import DraftPolicy
from pyengine.utils.openmp import loaded_torch

_log = logging.getLogger(__name__)

_STEPS_AHEAD = 4
"""Largest steps for whose blocks memory is allocated while no step runs."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: new tokens, their sequences, and the requests that it ended."""

    num_new_tokens: int = 0
    finished: list[Request] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens whose KV it computed, of prompts and decodes."""
    rows: Sequence[SequenceState] = ()
    """Sequences that got a token; the same object in steps that decode the same ones. Includes
    sequences that were aborted or ended in the step before, which got none."""
    begun: list[Request] = field(default_factory=list)
    """Requests whose prompt it completed: they have their first token, if they want any."""
    ended: list[SequenceState] = field(default_factory=list)
    """Samples that it ended, also of unfinished requests."""
    num_drafted: int = 0
    """New tokens that were accepted drafts: those beyond one for each sequence."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Statistics of the engine. `counters` only grow: the block manager's, and reuse by forks."""

    usage: PoolUsage
    counters: dict[str, int]
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_new_tokens: int
    """Tokens generated so far."""
    num_drafts: int = 0
    """Decodes with drafts so far. With the counters `draft_tokens` and `accepted_draft_tokens`, the
    acceptance rate is `accepted_draft_tokens / draft_tokens`, and such a decode gives
    `1 + accepted_draft_tokens / num_drafts` tokens."""
    store: Mapping[str, float] = field(default_factory=dict)
    """Counters of what was restored and stored, and of the store; empty without one."""
    verification: Mapping[str, int] = field(default_factory=dict)
    """Counters of verified cache hits; empty without `verify_cache_hits`."""


class EngineObserver(Protocol):
    """An observer, for metrics. Called in the engine thread."""

    def on_arrival(self, request: Request) -> None:
        """A request was queued."""

    def on_step(self, result: StepResult) -> None:
        """A step was run."""

    def on_finish(self, request: Request) -> None:
        """A request has ended, for any reason; its times are those of `RequestMetrics`."""


class Engine:
    """Accepts requests, runs steps, emits outputs. Not thread-safe: one thread runs it."""

    def __init__(
        self,
        manager: BlockManager,
        scheduler: Scheduler,
        executor: Executor,
        model_limits: ModelLimits,
        *,
        tokenizer: Any = None,
        seed: int = 0,
    ) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._executor = executor
        self.pins = scheduler.pins
        """The prefixes that callers asked to keep. For the thread that runs the steps."""
        kept = PromptLogprobCache(manager.num_blocks, manager.block_size)
        self.input_processor = InputProcessor(model_limits, kept, tokenizer=tokenizer, seed=seed)
        self._requests: dict[str, Request] = {}
        """Unfinished requests, by id."""
        self._deadlines: list[tuple[float, int, Request]] = []
        self._numbers = count()
        self._drafting: Drafting | None = None
        self.offloader: KVOffloader | None = None
        self.verifier: HitVerifier | None = None
        """Recomputes a sample of cache hits, if that was asked for."""
        self._waits_for_blocks = False
        """True if no step could be planned, and blocks come free without one."""
        self._unread: InputBatch | None = None
        """The batch with buffered tokens of the last steps."""
        self._queue: deque[SubmittedStep] = deque()
        """Running steps: at most two, the older one first."""
        self.faults = FaultFinder()
        self._memory = LimitRecovery(scheduler.limits)
        self._is_recovering = False
        """True from a failed step until its requests are cleared and the limits are what they
        were."""
        self._observers: list[EngineObserver] = []
        self.populate: Callable[[int], bool] | None = None
        """Allocates memory of the first blocks, some at a time; False once it is there."""
        self.explains = False
        """True if outputs say why tokens were not cached."""
        self.num_new_tokens = 0
        """Tokens generated so far, by all requests."""
        self._is_stepping = False
        self.death = ""
        """The reason why no step can run any more; empty if they can."""

    @property
    def has_work(self) -> bool:
        """True if any request is unfinished."""
        return bool(self._requests)

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

    def speculate(self, drafter: Drafter, policy: DraftPolicy, *, most: int) -> None:
        """Compute up to `most` drafts with a decode from now on: it may give several tokens."""
        vocab_size = self.input_processor.limits.vocab_size
        self._drafting = Drafting(
            self._scheduler, drafter, policy, most=most, vocab_size=vocab_size
        )

    def offload(self, offloader: KVOffloader) -> None:
        """Restore KV of waiting requests, and store KV of others, from now on."""
        self.offloader, self._scheduler.look_up = offloader, offloader.look_up

    def use_idle_time(self) -> bool:
        """Allocate some memory of the blocks that come next, for a few ms; False if it is there.

        Blocks that were never used are allocated in the order of their numbers.
        """
        if self.populate is None:
            return False
        used = self._manager.stats().allocated_blocks
        ahead = _STEPS_AHEAD * self._scheduler.limits.max_num_batched_tokens
        return self.populate(used + ahead // self._manager.block_size)

    def add(self, request: Request) -> None:
        """Queue a request. Raises `InvalidRequestError` for an id that is in use."""
        if self._requests.get(request.request_id) is request:  # Ctrl-C came after it was queued
            return
        if request.request_id in self._requests:
            refuse_taken([request], self._requests)
        try:
            self._requests[request.request_id] = request
            params, sink = request.params, request.sink
            for sequence in request.sequences:
                sequence.speculates = self._drafting is not None and params.speculate
                sequence.is_streamed = bool(
                    (sink is not None and sink.streams)
                    or params.stop
                    or params.logprobs is not None
                    or sequence.waits_for_tokens
                    or sequence.speculates
                )
            self._scheduler.add(request.sequences[0])
            if request.deadline is not None:
                heappush(self._deadlines, (request.deadline, next(self._numbers), request))
        except BaseException:  # Ctrl-C, too: all or nothing
            self._scheduler.finish(request.sequences)
            self._requests.pop(request.request_id, None)
            raise
        for observer in self._observers:
            observer.on_arrival(request)

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
        self._is_stepping = True
        try:
            self._waits_for_blocks = False
            while len(self._queue) < self._executor.depth and self._submit(self._schedule()):
                pass
            result = self._emit(self._commit()) if self._queue else StepResult()
        finally:
            self._is_stepping = False
            if not self._requests:
                self._end_idle()
        for observer in self._observers:
            observer.on_step(result)
        return result

    def _schedule(self) -> ScheduledStep | None:
        """Plan the next step. None: no request can run, or it needs tokens of the one before."""
        if self._deadlines:
            self._end_overdue()
        if self.pins.ends:
            self.pins.expire()
        before = self._queue[-1] if self._queue else None
        held: Collection[SequenceState] = ()
        if self.faults.suspects:
            if before is not None:  # one step at a time during the search
                return None
            held = self.faults.held(self._requests.values())
        if before is not None and self._drafting is not None:
            self._drafting.expect(before.step)
        offloader = self.offloader
        if offloader is not None:
            offloader.restore(self._scheduler.waiting, self._scheduler.num_running)
            num_pins = offloader.num_pins
        try:
            step = self._scheduler.schedule(ahead=before is not None, without=held)
        except StalledError as error:
            if offloader is None or not (offloader.is_busy or offloader.num_pins != num_pins):
                self._fail(error.sequence.request, error)
                return None
            step = None
        if offloader is not None:
            self._waits_for_blocks = step is None and offloader.is_busy
            offloader.are_steps_running = step is not None or before is not None
        if step is None and self.faults.suspects:
            self.faults.release()
        return step

    def _submit(self, step: ScheduledStep | None) -> bool:
        """Put a step into the device's queue; True if that succeeded."""
        if step is None:
            return False
        before = self._queue[-1] if self._queue else None
        mtp = None
        try:
            if self._drafting is not None:
                if not self.faults.suspects:
                    self._drafting.extend(step)
                mtp = self._drafting.mtp_step(step)
            self._queue.append(self._executor.submit(step, before, mtp))
        except BaseException as error:
            if self._queue and self._queue[-1].step is step:  # Ctrl-C came after that
                self._queue.pop().work.exception()
            num_tokens, sequences = step.plan.num_tokens, step.sequences
            self._executor.forget_batches()
            self._scheduler.rollback(step)
            self._failed(sequences, num_tokens, error)
            return False
        return True

    def _commit(self) -> SubmittedStep | None:
        """Wait for the oldest step and commit it. None: it failed and was rolled back."""
        submitted = self._queue.popleft()
        step, batch = submitted.step, submitted.batch
        try:
            submitted.sampled = submitted.work.result().wait()
            token_ids = submitted.sampled.token_ids
            if self._drafting is None or not step.drafts:
                if batch.repeats is not None:
                    token_ids = batch.own_tokens(token_ids)
                self._scheduler.commit(step, token_ids)
            else:
                accepted = batch.accept(token_ids.tolist())
                self._scheduler.commit(step, accepted.tokens, accepted.counts)
                self._drafting.num_drafts += len(step.drafts)
                submitted.rejected = accepted.rejected
        except BaseException as error:
            # Ctrl-C may have come after the commit.
            num_tokens = step.plan.num_tokens if step.plan.is_open else 0
            self._roll_back(submitted)
            if isinstance(error, BrokenLogitsError):
                self._fail_broken(batch, error)
            else:
                self._failed(step.sequences, num_tokens, error)
            return None
        if self._is_recovering or self.faults.logged:
            self._recover(step)
        if self.offloader is not None:
            self.offloader.observe_step(submitted.num_tokens, monotonic() - step.planned_time)
        return submitted

    def _roll_back(self, *oldest: SubmittedStep) -> None:
        """Undo every step, the newest first, after the device has finished it."""
        for submitted in [*reversed(self._queue), *oldest]:
            submitted.work.exception()
            if submitted in self._queue:
                self._queue.remove(submitted)
            self._executor.forget_batches()
            if submitted.step.plan.is_open:
                self._scheduler.rollback(submitted.step)

    def _recover(self, step: ScheduledStep) -> None:
        """After a good step, clear its requests of suspicion, and raise reduced limits again."""
        limits = self._scheduler.limits = self._memory.after_a_step(self._scheduler.limits)
        self.faults.succeeded(step.sequences)
        if not self.faults.suspects:
            self._is_recovering = limits != self._memory.asked

    def _fail_broken(self, batch: InputBatch, error: BrokenLogitsError) -> None:
        """End the requests without a token to choose; after a draft, only disable drafts."""
        sequences = dict.fromkeys([batch.sequences[row] for row in error.rows])
        broken = [batch.sequences[row] for row in error.rows if row not in batch.ahead]
        for request in dict.fromkeys([sequence.request for sequence in broken]):
            has_grammar = request.params.structured_outputs is not None
            self._fail(request, StructuredOutputError(str(error)) if has_grammar else error)
        for sequence in sequences:
            if self._drafting is not None and sequence.finish_reason is None:
                self._drafting.disable(sequence, error)

    def _failed(
        self, sequences: list[SequenceState], num_tokens: int, error: BaseException
    ) -> None:
        """Recover from a failed step, which was rolled back; raise if that is not possible."""
        self._is_recovering = True
        if is_out_of_memory(error):
            self._shrink(num_tokens, error)
            return
        torch = loaded_torch()
        if torch and isinstance(error, torch.AcceleratorError):
            self.death = (
                f"the device failed: {error}; no request was lost, but nothing can run on it "
                "any more: make a new LLM in a new process"
            )
            raise EngineDeadError(self.death) from error
        is_ours = isinstance(error, PyEngineError) and not isinstance(error, WorkerError)
        if is_ours or not isinstance(error, Exception):
            if isinstance(error, EngineDeadError):
                self.death = str(error)
            raise error
        verdict = self.faults.failed(sequences)
        if verdict.is_hopeless:
            raise error
        if verdict.culprit is not None:
            self._fail(verdict.culprit, error)
        else:
            traceback = self.faults.unlogged(error)
            _log.warning(
                "a step failed and is tried again with others: %r", error, exc_info=traceback
            )

    def _shrink(self, num_tokens: int, error: BaseException) -> None:
        """Use smaller steps after one of `num_tokens` tokens that did not fit."""
        limits = self._memory.smaller(num_tokens)
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

    def _end_idle(self) -> None:
        """Without requests, roll back running steps and drop their results."""
        self._executor.forget_batches()
        self._unread = None
        if self.offloader is not None:
            self.offloader.are_steps_running = False
        if self._queue:
            self._roll_back()

    def _emit(self, submitted: SubmittedStep | None) -> StepResult:
        """Append tokens to sequences, fork new samples, end finished ones, emit deltas."""
        if submitted is None:
            return StepResult()
        batch = submitted.batch
        of_prompts = iter(submitted.sampled.prompt_logprobs)
        for part in batch.prompt_parts:
            logprobs = list(islice(of_prompts, part.length))
            part.request.append_prompt_logprobs(part.entry.start + 1, logprobs)
        tokens = submitted.sampled.token_ids
        if self._unread is not batch:
            self._flush()
            self._unread = batch
        ending = batch.buffer(tokens, submitted.positions)
        if batch.sampling.matchers:
            self._fail_lost(batch)
        ended = [
            sequence
            for sequence, token in ending
            if sequence.finish_reason is None and sequence.append(token)
        ]
        num_drafted = self._append_streamed(submitted, ended) if batch.streamed else 0
        begun = [  # not those that were aborted
            request
            for request in batch.beginners
            if not request.is_finished or request.sequences[0] in ended
        ]
        for request in begun:
            if self.explains:
                explain_request(request, self._manager.block_size)
            self._begin_output(request)
        finished = self._finish(ended) if ended else []
        for request in dict.fromkeys([batch.sequences[row].request for row in batch.streamed]):
            if request.sink is not None and request.sink.streams:
                delta = request.take_delta()
                if delta is not None:
                    request.sink.put(delta)
        without_output = [
            len(request.sequences)
            for request in batch.beginners
            if not request.sequences[0].max_output
        ]
        num_new_tokens = len(tokens) - len(batch.ahead) - sum(without_output) + num_drafted
        self.num_new_tokens += num_new_tokens
        return StepResult(
            num_new_tokens=num_new_tokens,
            finished=finished,
            num_tokens=submitted.num_tokens,
            rows=batch.sequences,
            begun=begun,
            ended=ended,
            num_drafted=num_drafted,
        )

    def _begin_output(self, request: Request) -> None:
        """Pin, verify and store a prompt that was computed, and fork its further samples."""
        if request.cache_hints.pins:
            self._pin_prompt(request)
        if self.verifier is not None:
            self._verify(request, self.verifier)
        if not request.sequences[0].max_output:  # it wants its prompt alone
            return
        request.first_token_time = monotonic()
        if self.offloader is not None:
            self.offloader.store(request.sequences[0])
        if len(request.sequences) > 1:
            self._fork(request)

    def _pin_prompt(self, request: Request) -> None:
        """Pin the prefixes of a computed prompt that its hints name, within the quota."""
        tokens, hints = request.prompt_token_ids, request.cache_hints
        try:
            request.pins = self.pins.pin(tokens, request.namespace, hints)
        except PinQuotaError as error:
            _log.info("request %r is not pinned: %s", request.request_id, error)
            request.pin_error = error

    def _verify(self, request: Request, verifier: HitVerifier) -> None:
        """Judge a verification, or queue one for a request with a cache hit."""
        if request.verifies is not None:
            verifier.judge(request)
        elif (verification := verifier.request_for(request)) is not None:
            self.add(verification)

    def _append_streamed(self, submitted: SubmittedStep, ended: list[SequenceState]) -> int:
        """Append the tokens of streamed rows; extends `ended`; returns the number of drafts."""
        batch, num_drafted = submitted.batch, 0
        tokens, logprobs = submitted.sampled.token_ids.tolist(), submitted.sampled.logprobs
        for row in batch.streamed:
            if row in submitted.rejected:
                continue
            sequence = batch.sequences[row]
            if sequence.finish_reason is None:  # else it was aborted or has ended in this step
                num_drafted += row in batch.ahead
                if sequence.append(tokens[row], logprobs[row]):
                    ended.append(sequence)
        return num_drafted

    def _flush(self) -> None:
        """Append the tokens that the last batch has buffered."""
        if self._unread is not None:
            self._unread.flush()

    def _fail_lost(self, batch: InputBatch) -> None:
        """End the requests whose grammars have failed."""
        lost = {
            batch.sequences[row].request: matcher.error
            for row, matcher in batch.sampling.matchers.items()
            if matcher.error
            and row not in batch.ahead
            and batch.sequences[row].finish_reason is None
        }
        for request, error in lost.items():
            self._fail(request, StructuredOutputError(error))

    def _fork(self, request: Request) -> None:
        """Start the further sequences that did not end with their first token."""
        self._flush()
        others = [sequence for sequence in request.unfinished if sequence.index > 0]
        first = request.sequences[0]
        self._scheduler.fork(first, [(other, other.token_ids[-1]) for other in others])
        if self._drafting is not None:
            self._drafting.fork(first, others)

    def _finish(self, ended: list[SequenceState]) -> list[Request]:
        """Remove ended sequences; return the finished requests."""
        self._finish_sequences(ended)
        finished = [
            request
            for request in dict.fromkeys([sequence.request for sequence in ended])
            if request.is_finished
        ]
        for request in finished:
            self._remove(request)
        return finished

    def _finish_sequences(self, sequences: list[SequenceState]) -> None:
        """Remove sequences from the scheduler, and have their computed blocks stored."""
        if self.offloader is not None:
            for sequence in sequences:
                if sequence.request.verifies is None:
                    self.offloader.store(sequence)
        for sequence in sequences:
            if sequence.params.cache_priority and sequence.is_running:
                request = sequence.request
                priority, hints = request.params.cache_priority, request.cache_hints
                self.pins.keep(self._pin_of(sequence), priority, hints)
        self._scheduler.finish(sequences)

    def _pin_of(self, sequence: SequenceState) -> Pin:
        """A pin on the blocks of a sequence that stay cached."""
        if sequence.num_kept is None:
            return sequence.kv.pin()
        tokens = sequence.kv.tokens()[: sequence.num_kept]
        return self._manager.match_prefix(tokens, namespace=sequence.request.namespace)

    def _remove(self, request: Request) -> None:
        """Remove a finished request, and emit its last output."""
        request.finished_time = monotonic()
        self._requests.pop(request.request_id, None)
        if request.scores is not None:
            request.scores.withdraw()
        if self._drafting is not None:
            self._drafting.forget(request.sequences)
        sink = request.sink
        if sink is not None:
            output = request.take_delta() if sink.streams else request.output()
            if output is not None:
                sink.put(output)
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
            self._flush()
        for request in live:
            self._finish_sequences(request.sequences)
            request.finish("abort", stop_reason)
            self._remove(request)
        self.faults.forget(live)
        if not self._requests and not self._is_stepping:
            self._end_idle()
        return live

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request that cannot be served, because of `error`.

        A request that has ended since the step was planned is ignored.
        """
        if self._requests.get(request.request_id) is not request:
            return
        _log.warning("request %r failed: %r", request.request_id, error)
        self._flush()
        self._scheduler.finish(request.sequences)
        request.error = f"{type(error).__name__}: {error}"
        request.finish("error")
        self.faults.forget([request])
        sink, request.sink = request.sink, None
        self._remove(request)
        if sink is not None:
            message = f"request {request.request_id!r} failed: {request.error}"
            is_of_grammar = isinstance(error, StructuredOutputError)
            kind = StructuredOutputError if is_of_grammar else RequestFailedError
            failure = kind(message, [request.output()])
            failure.__cause__ = error
            sink.fail(failure)

    def _end_overdue(self) -> None:
        """End requests whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= monotonic():
            *_, request = heappop(self._deadlines)
            self.abort([request], stop_reason="deadline")
        if len(self._deadlines) > 2 * len(self._requests) + 64:  # most have ended in time
            live = [deadline for deadline in self._deadlines if deadline[2].finished_time is None]
            heapify(live)
            self._deadlines = live

    def view(self, most_requests: int) -> EngineView:
        """The pool, and up to `most_requests` requests, running ones first."""
        unfinished = self._requests.values()
        return view_of(self.stats(), self._manager, self._scheduler, unfinished, most_requests)

    def num_of(self, tenant: bytes) -> tuple[int, int]:
        """The numbers of a tenant's sequences that run, and of its requests that wait."""
        return self._scheduler.num_of(tenant)

    def stats(self) -> EngineStats:
        """The current usage and counters."""
        counters = self._manager.stats().as_dict()
        for name, number in self._scheduler.reuse.items():
            counters[name] = counters.get(name, 0) + number
        return EngineStats(
            usage=self._manager.usage(),
            counters=counters,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=self._scheduler.num_preemptions,
            num_new_tokens=self.num_new_tokens,
            num_drafts=0 if self._drafting is None else self._drafting.num_drafts,
            store={} if self.offloader is None else self.offloader.stats(),
            verification={} if self.verifier is None else dict(self.verifier.counters),
        )
