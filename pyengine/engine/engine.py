"""The loop. `step` reads like the picture in the docs: schedule, run, sample, commit."""

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from time import monotonic
from typing import Any, Protocol, cast

import torch

from pyengine.cache import BlockManager, PoolUsage
from pyengine.core.errors import (
    BrokenLogitsError,
    DeviceMemoryError,
    EngineDeadError,
    PyEngineError,
    RequestFailedError,
    StructuredOutputError,
    WorkerError,
)
from pyengine.core.outputs import RequestOutput
from pyengine.core.sampling_params import SamplingParams
from pyengine.engine.batch import BatchMaker, Rows
from pyengine.engine.drafting import Drafting
from pyengine.engine.executor import Executor, StepResults, SubmittedStep
from pyengine.engine.heads import HeadDrafter
from pyengine.engine.intake import Intake, ModelFacts, refuse_taken
from pyengine.engine.prompt_logprobs import PromptLogprobCache
from pyengine.engine.prompts import Prompt
from pyengine.engine.recovery import FailureLog, FaultFinder, LimitRecovery, is_out_of_memory
from pyengine.engine.request import OutputSink, RequestState, Sample
from pyengine.engine.view import EngineView, view_of
from pyengine.scheduler import Scheduler, StalledError
from pyengine.speculation import Speculator

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: how many tokens, to whom, and the requests that it ended."""

    num_new_tokens: int = 0
    finished: list[RequestState] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens whose KV it computed, those of prompts and of decodes."""
    rows: Sequence[Sample] = ()
    """Who got a token; the very same object in steps that decode the same samples. One that had
    been aborted or had ended in the step before is in it and got none."""
    begun: list[RequestState] = field(default_factory=list)
    """Requests whose prompt it completed: they have their first token, if they asked for any."""
    ended: list[Sample] = field(default_factory=list)
    """Samples that it ended, also of requests that go on."""
    num_drafted: int = 0
    """Of the new tokens, those that were drafted and right: beyond one for each sample."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A look at the engine. `counters` only grow: the block manager's, and what forks share."""

    usage: PoolUsage
    counters: dict[str, int]
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_new_tokens: int
    """Tokens generated so far."""
    num_drafts: int = 0
    """Decodes with drafts so far. With the counters `draft_tokens` and `accepted_draft_tokens`: a
    draft is right in `accepted_draft_tokens / draft_tokens` of the cases, and such a decode gives
    `1 + accepted_draft_tokens / num_drafts` tokens."""


class EngineObserver(Protocol):
    """Somebody who looks on, for metrics. Called in the thread that runs the steps."""

    def on_arrival(self, request: RequestState) -> None:
        """A request was queued."""
        ...

    def on_step(self, result: StepResult) -> None:
        """A step was run."""
        ...

    def on_finish(self, request: RequestState) -> None:
        """A request has ended, in whatever way; its times are those of `RequestMetrics`."""
        ...


class Engine:
    """Takes requests, runs steps, gives outputs. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        manager: BlockManager,
        scheduler: Scheduler,
        executor: Executor,
        facts: ModelFacts,
        *,
        tokenizer: Any = None,
        seed: int = 0,
    ) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._executor = executor
        kept = PromptLogprobCache(manager.num_blocks, manager.block_size)
        self.intake = Intake(facts, kept, tokenizer=tokenizer, seed=seed)
        self._requests: dict[str, RequestState] = {}
        """Unfinished ones, by id."""
        self._deadlines: list[tuple[float, int, RequestState]] = []
        self._numbers = count()
        self._batches = BatchMaker()
        self._drafting: Drafting | None = None
        self._unread: Rows | None = None
        """Where the last step's tokens were kept."""
        self._in_flight: SubmittedStep | None = None
        """The step that runs while the caller has the results of the one before."""
        self._faults = FaultFinder()
        self.failures = FailureLog()
        """Of steps: which tracebacks were logged."""
        self._memory = LimitRecovery(scheduler.limits)
        self._observers: list[EngineObserver] = []
        self._num_new_tokens = 0
        self._is_stepping = False
        self._death = ""
        """Why no step can run any more, if so."""

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.has_work

    @property
    def is_running(self) -> bool:
        """Whether a step runs while the caller has the results of the one before."""
        return self._in_flight is not None

    @property
    def num_new_tokens(self) -> int:
        """Tokens generated so far, by all requests."""
        return self._num_new_tokens

    @property
    def unfinished(self) -> list[RequestState]:
        """Requests that have not ended, in the order in which they came."""
        return list(self._requests.values())

    @property
    def death(self) -> str:
        """Why no step can be run any more; empty as long as they can."""
        return self._death

    def observe(self, observer: EngineObserver) -> None:
        """Tell `observer` of every request and step from now on."""
        self._observers.append(observer)

    def speculate(self, speculator: Speculator, heads: HeadDrafter | None = None) -> None:
        """From now on let decodes compute drafts: they may give several tokens in a step.

        `heads` is the drafter, where it is the model's own heads.
        """
        self._drafting = Drafting(speculator, self._scheduler, heads)

    def add(self, state: RequestState) -> None:
        """Queue a request. Raises `InvalidRequestError` for an id that is in use."""
        if self._requests.get(state.request_id) is state:  # an interrupt came after it was queued
            return
        refuse_taken([state], self._requests)
        try:
            self._requests[state.request_id] = state
            for sample in state.samples:
                sample.speculates = self._drafting is not None and state.params.speculate
            self._scheduler.add(state.samples[0])
            if state.deadline is not None:
                heappush(self._deadlines, (state.deadline, next(self._numbers), state))
        except BaseException:  # Ctrl-C, too: all or nothing
            self._scheduler.finish(state.samples)
            self._requests.pop(state.request_id, None)
            raise
        for observer in self._observers:
            observer.on_arrival(state)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: float = 0,
        sink: OutputSink | None = None,
    ) -> RequestState:
        """Make and queue a request; its outputs go to `sink`."""
        state = self.intake.request(request_id, prompt, params, priority=priority)
        state.sink = sink
        self.add(state)
        return state

    def step(self) -> StepResult:
        """Run one step: schedule, run and sample, commit, hand out.

        With overlap the next step is scheduled and started before this one's tokens are waited
        for; it decodes them all the same. If anything fails on the way, the step is rolled back,
        with the one after it, and no request has changed. Who was in it is looked at more closely
        then: a request on which the forward pass fails again ends with the finish reason "error",
        and the others go on. A step that was too large for the device's memory is planned again,
        smaller; `DeviceMemoryError` is raised when it cannot be smaller. Once the device has
        failed, this and every later call raises `EngineDeadError`.
        """
        self._is_stepping = True
        try:
            result = self._step()
        finally:
            self._is_stepping = False
            self._settle()
        for observer in self._observers:
            observer.on_step(result)
        return result

    def _step(self) -> StepResult:
        if self._death:
            raise EngineDeadError(self._death)
        self._end_overdue()
        now = self._in_flight or self._launch(None)
        if now is None:
            return StepResult()
        self._in_flight = now
        is_overlapped = self._executor.depth > 1 and not self._faults.is_searching
        following = self._launch(now) if is_overlapped else None
        self._in_flight = following
        try:
            results = now.result()
            rejected = self._commit(now, results)
        except BaseException as error:
            # Ctrl-C may have come after the commit.
            num_tokens = now.step.plan.num_tokens if now.step.plan.is_open else 0
            self._roll_back(following)
            self._roll_back(now)
            if isinstance(error, BrokenLogitsError):
                self._fail_broken(now.batch.rows, error)
                return StepResult()
            self._failed(cast(list[Sample], now.step.jobs), num_tokens, error)
            return StepResult()
        self._scheduler.limits = self._memory.after_a_step(self._scheduler.limits)
        self._faults.succeeded(cast(list[Sample], now.step.jobs))
        if not self._faults.is_searching:
            self.failures.succeeded()
        return self._collect(now, results, rejected)

    def _commit(self, submitted: SubmittedStep, results: StepResults) -> Collection[int]:
        """Take a step as computed; the rows behind wrong drafts, which count for nothing."""
        step, rows, token_ids = submitted.step, submitted.batch.rows, results.sampled.token_ids
        if self._drafting is None or not step.drafts:
            self._scheduler.commit(step, submitted.batch.own_tokens(token_ids).numpy())
            return ()
        accepted = rows.accept(token_ids.tolist())
        self._scheduler.commit(step, accepted.tokens, accepted.counts)
        self._drafting.num_drafts += len(step.drafts)
        return accepted.rejected

    def _fail_broken(self, rows: Rows, error: BrokenLogitsError) -> None:
        """End the requests that have no token to choose. Behind a draft that need not be so."""
        broken = dict.fromkeys([rows.samples[row] for row in error.rows if row not in rows.ahead])
        for state in dict.fromkeys([one.state for one in broken]):
            self._fail(state, error)
        for sample in dict.fromkeys([rows.samples[row] for row in error.rows]):
            if self._drafting is not None and sample.finish_reason is None:
                self._drafting.give_up(sample, error)

    def _launch(self, before: SubmittedStep | None) -> SubmittedStep | None:
        """Schedule the next step and put it into the device's queue.

        `before` is the step that is there already. None: there is nothing to do, or this has to
        wait until the tokens of `before` are known.
        """
        everybody = self._requests.values()
        held = self._faults.held(everybody) if self._faults.is_searching else frozenset()
        if before is not None and self._drafting is not None:
            self._drafting.expect(before.step)
        try:
            step = self._scheduler.schedule(ahead=before is not None, without=held)
        except StalledError as error:
            self._fail(cast(Sample, error.job).state, error)
            return None
        if step is None:
            self._faults.release()
            return None
        try:
            if self._drafting is not None and not self._faults.is_searching:
                self._drafting.extend(step)
            batch = self._batches.batch(step)
            heads = self._drafting.head_step(step) if self._drafting is not None else None
            return self._executor.submit(step, batch, before, heads)
        except BaseException as error:
            num_tokens = step.plan.num_tokens
            samples = cast(list[Sample], step.jobs)
            self._batches.forget()
            self._scheduler.rollback(step)
            self._failed(samples, num_tokens, error)
            return None

    def _roll_back(self, submitted: SubmittedStep | None) -> None:
        """Undo a step, once the device is through with it."""
        if submitted is None:
            return
        submitted.work.wait()
        self._in_flight = None
        self._batches.forget()
        if submitted.step.plan.is_open:
            self._scheduler.rollback(submitted.step)

    def _failed(self, samples: list[Sample], num_tokens: int, error: BaseException) -> None:
        """See how to go on after a step that failed and was rolled back; raise where that is not
        possible."""
        if is_out_of_memory(error):
            self._shrink(num_tokens, error)
            return
        if isinstance(error, torch.AcceleratorError):
            self._death = (
                f"the device failed: {error}; no request was lost, but nothing can run on it "
                "any more: make a new LLM in a new process"
            )
            raise EngineDeadError(self._death) from error
        is_ours = isinstance(error, PyEngineError) and not isinstance(error, WorkerError)
        if is_ours or not isinstance(error, Exception):
            if isinstance(error, EngineDeadError):
                self._death = str(error)
            raise error
        verdict = self._faults.failed(samples)
        if verdict.is_hopeless:
            raise error
        if verdict.culprit is not None:
            self._fail(verdict.culprit, error)
        else:
            traceback = self.failures.unlogged(error)
            _log.warning(
                "a step failed and is tried again with others: %r", error, exc_info=traceback
            )

    def _shrink(self, num_tokens: int, error: BaseException) -> None:
        """Go on with smaller steps after one of `num_tokens` tokens that did not fit."""
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
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _settle(self) -> None:
        """If nobody is left whom the running step could serve, see that it is over."""
        if not self._requests and not self._is_stepping:
            self._batches.forget()  # they hold what has ended
            self._unread = None
            self._roll_back(self._in_flight)

    def _collect(
        self, submitted: SubmittedStep, results: StepResults, rejected: Collection[int]
    ) -> StepResult:
        """Hand every token to its sample, fork new samples, end what is done, tell who waits."""
        batch, rows = submitted.batch, submitted.batch.rows
        batch.hand_out(results.prompt_logprobs)
        tokens = results.sampled.token_ids.numpy()
        if self._unread is not rows and self._unread is not None:
            self._unread.read()
        self._unread = rows
        kept = rows.keep(tokens, batch.positions)
        self._fail_lost(rows)
        ended = [rows.samples[row] for row, token in kept if self._append(rows, row, token)]
        logprobs = results.sampled.logprobs
        num_drafted = 0
        if rows.loud:
            drawn = tokens.tolist()
            for row in rows.loud:
                if row in rejected:
                    continue
                num_drafted += row in rows.ahead and rows.samples[row].finish_reason is None
                if self._append(rows, row, drawn[row], logprobs[row]):
                    ended.append(rows.samples[row])
        begun = [  # not those that were aborted
            one for one in rows.beginners if not one.is_finished or one.samples[0] in ended
        ]
        for state in begun:
            self._begin(state)
        finished = self._finish(ended) if ended else []
        for state in dict.fromkeys([rows.samples[row].state for row in rows.loud]):
            if state.sink is not None and state.sink.streams:
                news = state.take_news()
                if news is not None:
                    state.sink.put(news)
        unwanted = [len(one.samples) for one in rows.beginners if not one.samples[0].max_output]
        num_new_tokens = len(tokens) - len(rows.ahead) - sum(unwanted) + num_drafted
        self._num_new_tokens += num_new_tokens
        return StepResult(
            num_new_tokens=num_new_tokens,
            finished=finished,
            num_tokens=submitted.step.num_tokens,
            rows=rows.samples,
            begun=begun,
            ended=ended,
            num_drafted=num_drafted,
        )

    def _fail_lost(self, rows: Rows) -> None:
        """End the requests whose grammars cannot say any more which token may come."""
        lost = {
            rows.samples[row].state: matcher.error
            for row, matcher in rows.sampling.matchers.items()
            if matcher.error and row not in rows.ahead and rows.samples[row].finish_reason is None
        }
        for state, error in lost.items():
            self._fail(state, StructuredOutputError(error))

    @staticmethod
    def _append(rows: Rows, row: int, token: int, logprobs: Any = None) -> bool:
        """Give a sample its token; whether that ends it. One that was aborted gets none."""
        sample = rows.samples[row]
        return sample.finish_reason is None and sample.append(token, logprobs)

    def _begin(self, state: RequestState) -> None:
        """Start the samples after the first, those that did not end with their first token."""
        if not state.samples[0].max_output:  # it asked for its prompt alone
            return
        state.first_token_time = monotonic()
        if len(state.samples) > 1:
            assert self._unread is not None
            self._unread.read()
            others = [one for one in state.unfinished if one.index > 0]
            self._scheduler.fork(state.samples[0], [(one, one.token_ids[-1]) for one in others])
            if self._drafting is not None:
                self._drafting.fork(state.samples[0], others)

    def _finish(self, ended: list[Sample]) -> list[RequestState]:
        """Take samples out that have ended; the requests that are through."""
        self._scheduler.finish(ended)
        through = [
            state for state in dict.fromkeys([one.state for one in ended]) if state.is_finished
        ]
        for state in through:
            self._take_out(state)
        return through

    def _take_out(self, state: RequestState) -> None:
        """Forget a request that has ended, and tell whoever waits for it."""
        state.finished_time = monotonic()
        self._requests.pop(state.request_id, None)
        if state.scores is not None:
            state.scores.withdraw()
        if self._drafting is not None:
            self._drafting.forget(state.samples)
        sink = state.sink
        if sink is not None:
            output = state.take_news() if sink.streams else state.output()
            if output is not None:
                sink.put(output)
        for observer in self._observers:
            observer.on_finish(state)

    def output(self, state: RequestState) -> RequestOutput:
        """What a request has given so far."""
        if self._unread is not None:
            self._unread.read()
        return state.output()

    def abort(
        self, states: Iterable[RequestState], *, stop_reason: str | None = None
    ) -> list[RequestState]:
        """End requests early; returns those that had not ended. May be called while a step runs."""
        live = [one for one in states if self._requests.get(one.request_id) is one]
        if live and self._unread is not None:
            self._unread.read()
        for state in live:
            self._scheduler.finish(state.samples)
            state.finish("abort", stop_reason)
            self._take_out(state)
        self._faults.forget(live)
        self._settle()
        return live

    def _fail(self, state: RequestState, error: Exception) -> None:
        """End a request that cannot be served, because of `error`.

        Not one that has ended since the step was planned: its row counts for nothing.
        """
        if self._requests.get(state.request_id) is not state:
            return
        _log.warning("request %r failed: %r", state.request_id, error)
        if self._unread is not None:
            self._unread.read()
        self._scheduler.finish(state.samples)
        state.error = f"{type(error).__name__}: {error}"
        state.finish("error")
        self._faults.forget([state])
        sink, state.sink = state.sink, None
        self._take_out(state)
        if sink is not None:
            message = f"request {state.request_id!r} failed: {state.error}"
            failure = RequestFailedError(message, [state.output()])
            failure.__cause__ = error
            sink.fail(failure)

    def _end_overdue(self) -> None:
        """End requests whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= monotonic():
            *_, state = heappop(self._deadlines)
            self.abort([state], stop_reason="deadline")
        if len(self._deadlines) > 2 * len(self._requests) + 64:  # most have ended in time
            live = [one for one in self._deadlines if one[2].finished_time is None]
            heapify(live)
            self._deadlines = live

    def view(self, most_requests: int) -> EngineView:
        """The pool, who runs, and of those that wait as many as make `most_requests`."""
        unfinished = self._requests.values()
        return view_of(self.stats(), self._manager, self._scheduler, unfinished, most_requests)

    def stats(self) -> EngineStats:
        """The usage and the counters as of now."""
        counters = self._manager.stats().as_dict()
        for name, number in self._scheduler.reuse.as_dict().items():
            counters[name] = counters.get(name, 0) + number
        return EngineStats(
            usage=self._manager.usage(),
            counters=counters,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=self._scheduler.num_preemptions,
            num_new_tokens=self._num_new_tokens,
            num_drafts=0 if self._drafting is None else self._drafting.num_drafts,
        )
