"""The loop. `step` reads like the picture in the docs: schedule, run, sample, commit."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

from pyengine.cache import BlockManager, Ledger
from pyengine.core.errors import DeviceMemoryError, EngineDeadError, InvalidRequestError
from pyengine.core.outputs import RequestOutput
from pyengine.core.request import Request
from pyengine.core.sampling_params import SamplingParams
from pyengine.engine.batch import Batch, make_batch
from pyengine.engine.pipeline import Flight, Pipeline
from pyengine.engine.request_state import Completion, EndConditions, RequestState
from pyengine.sampling import SamplingState, TokenLogprobs, tokens_of_words
from pyengine.scheduler import ScheduledStep, Scheduler

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What requests are checked against.

    `max_model_len` is the most tokens a sequence may have, prompt and output; `limited_by` says
    in words what set it: the model's positions, the pool, or the caller.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    limited_by: str
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: ids of the requests that got tokens, and outputs of those that ended."""

    progressed: list[str]
    finished: list[RequestOutput]
    num_new_tokens: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A look at the engine. `counters` are the block manager's and only grow."""

    ledger: Ledger
    counters: dict[str, int]
    num_running: int
    num_waiting: int
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt that was checked: its token ids, and its text if it came as text."""

    token_ids: list[int]
    text: str | None = None


class Engine:
    """Takes requests, runs steps, gives outputs. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        manager: BlockManager,
        scheduler: Scheduler,
        pipeline: Pipeline,
        facts: ModelFacts,
        *,
        tokenizer: Any = None,
        seed: int = 0,
    ) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._facts = facts
        self._tokenizer = tokenizer
        self._seeds = Random(seed)
        self._states: dict[str, RequestState] = {}
        self._running: dict[str, tuple[RequestState, Completion]] = {}
        """By the id under which the scheduler knows each sample."""
        self._batch: Batch | None = None
        self._in_flight: Flight | None = None
        """The step that runs while the caller has the results of the one before."""
        self._is_stepping = False
        self._death = ""
        """Why no step can run any more, if so."""

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.has_work

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raise `InvalidRequestError` for a request that cannot be served."""
        facts = self._facts
        ids = params.truncated(prompt.token_ids, facts.max_model_len - 1)
        if not ids:
            raise InvalidRequestError("the prompt is empty: it needs at least one token")
        if len(ids) >= facts.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(ids)} tokens; with one token of output at most "
                f"{facts.max_model_len - 1} fit ({facts.limited_by}); shorten the prompt"
            )
        for position, token in enumerate(ids):
            if not 0 <= token < facts.vocab_size:
                raise InvalidRequestError(
                    f"token id {token} at position {position} of the prompt is outside the "
                    f"vocabulary of {facts.vocab_size} tokens"
                )
        if params.n > facts.max_num_seqs:
            raise InvalidRequestError(
                f"n={params.n} completions of one prompt run at once, and max_num_seqs="
                f"{facts.max_num_seqs}: ask for fewer, or raise max_num_seqs"
            )
        params.check_vocabulary(facts.vocab_size)
        longest = facts.max_model_len - len(ids)
        max_output = longest if params.max_tokens is None else min(params.max_tokens, longest)
        params.check_sizes(len(ids), max_output, facts.vocab_size)
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError(
                f"stop={list(params.stop)} needs a tokenizer, this model has none: "
                "use stop_token_ids"
            )

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> None:
        """Queue a request. Raises `InvalidRequestError` if it cannot be served."""
        self.check(prompt, params)
        kept = params.truncated(prompt.token_ids, self._facts.max_model_len - 1)
        prompt = replace(prompt, token_ids=list(kept))
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        completions = [
            self._completion(index, request_id, prompt, params, seed) for index in range(params.n)
        ]
        state = RequestState(completions, params, prompt=prompt.text, tokenizer=self._tokenizer)
        # In this order an interrupt leaves nothing that `abort` does not find.
        self._states[request_id] = state
        self._running[request_id] = (state, completions[0])
        self._scheduler.add(completions[0].request)

    def _completion(
        self, index: int, request_id: str, prompt: Prompt, params: SamplingParams, seed: int
    ) -> Completion:
        """The `index`-th sample of a request; each draws from a seed of its own."""
        eos_ids = frozenset() if params.ignore_eos else self._facts.eos_token_ids
        longest = self._facts.max_model_len - len(prompt.token_ids)
        sampling = SamplingState(
            params,
            prompt.token_ids,
            seed=(seed + index) % 2**64,
            vocab_size=self._facts.vocab_size,
            stop_ids=self._facts.eos_token_ids,
            bad_words=tokens_of_words(params.bad_words, self._tokenizer),
        )
        ends = EndConditions(
            stop_ids=eos_ids | set(params.stop_token_ids),
            eos_ids=eos_ids,
            max_output=longest if params.max_tokens is None else min(params.max_tokens, longest),
        )
        request = Request(
            request_id=request_id if index == 0 else f"{request_id}#{index}",
            prompt_token_ids=prompt.token_ids,
            read_cache=params.prompt_logprobs is None,  # they need the logits of every position
            num_samples=params.n if index == 0 else 1,
            max_tokens=len(prompt.token_ids) + ends.max_output,
        )
        return Completion(index, request, params, sampling, ends, self._tokenizer)

    def output(self, request_id: str) -> RequestOutput:
        """What an unfinished request has given so far."""
        return self._states[request_id].output()

    def step(self) -> StepResult:
        """Run one step: schedule, run and sample, commit, hand out.

        With overlap the next step is scheduled and started before this one's tokens are waited
        for; it decodes them all the same. If anything fails on the way, the step is rolled back,
        with the one after it, and no request has changed. One that was too large for the device's
        memory is planned again, smaller; `DeviceMemoryError` is raised when it cannot be smaller.
        Once the device has failed, this and every later call raises `EngineDeadError`.
        """
        self._is_stepping = True
        try:
            return self._step()
        finally:
            self._is_stepping = False
            self._settle()

    def _step(self) -> StepResult:
        if self._death:
            raise EngineDeadError(self._death)
        flight = self._in_flight or self._launch(None)
        if flight is None:
            return StepResult([], [], 0)
        self._in_flight = flight
        following = self._launch(flight) if self._pipeline.depth > 1 else None
        self._in_flight = following
        num_tokens = flight.step.plan.num_tokens
        try:
            logits, sampled = flight.result()
            self._scheduler.commit(flight.step, flight.batch.own_tokens(sampled.token_ids))
        except BaseException as error:
            self._roll_back(following)
            self._roll_back(flight)
            if isinstance(error, torch.OutOfMemoryError):
                self._shrink(num_tokens, error)
                return StepResult([], [], 0)
            if isinstance(error, torch.AcceleratorError):
                self._death = (
                    f"the device failed: {error}; no request was lost, but nothing can run on it "
                    "any more: make a new LLM in a new process"
                )
                raise EngineDeadError(self._death) from error
            raise
        flight.batch.collect_prompt_logprobs(logits)
        return self._collect(flight.batch, sampled.token_ids.tolist(), sampled.logprobs)

    def _launch(self, before: Flight | None) -> Flight | None:
        """Schedule the next step and put it into the device's queue.

        `before` is the step that is there already. None: there is nothing to do, or this has to
        wait until the tokens of `before` are known.
        """
        if before is not None and before.batch.is_awaited:
            return None
        step = self._scheduler.schedule(ahead=before is not None)
        if step is None:
            return None
        try:
            return self._pipeline.launch(step, self._batch_of(step), before)
        except BaseException:
            self._batch = None
            self._scheduler.rollback(step)
            raise

    def _roll_back(self, flight: Flight | None) -> None:
        """Undo a step, once the device is through with it."""
        if flight is None:
            return
        flight.work.wait()
        self._batch = self._in_flight = None
        if flight.step.plan.is_open:
            self._scheduler.rollback(flight.step)

    def _shrink(self, num_tokens: int, error: torch.OutOfMemoryError) -> None:
        """Go on with smaller steps after one of `num_tokens` tokens that did not fit."""
        if not self._scheduler.shrink(num_tokens):
            raise DeviceMemoryError(
                f"a step of {num_tokens} token does not fit into the device's memory ({error}); "
                "give the KV pool less: a smaller gpu_memory_utilization, kv_cache_memory or "
                "num_blocks"
            ) from error
        limits = self._scheduler.limits
        _log.warning(
            "a step of %d tokens did not fit into the device's memory (%s); from now on "
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
        if not self._running and not self._is_stepping:
            self._roll_back(self._in_flight)

    def _batch_of(self, step: ScheduledStep) -> Batch:
        """The batch of the step before, if the same jobs decode again and nothing else happens."""
        batch = self._batch
        if batch is None or step.chunks or step.decodes is not batch.decodes:
            self._batch = make_batch(step, self._running)
        else:
            self._batch = batch.following()
        return self._batch

    def _collect(
        self, batch: Batch, tokens: list[int], logprobs: list[TokenLogprobs | None]
    ) -> StepResult:
        """Hand every token to its completion, fork new samples, end what is done."""
        ended = [
            one
            for one, token, logprob in zip(batch.completions, tokens, logprobs, strict=True)
            if one.finish_reason is None  # else it was aborted meanwhile
            and one.append(token, logprob)
        ]
        for state in batch.beginners:
            if self._states.get(state.request.request_id) is state:  # else it was aborted
                self._begin(state)
        progressed = [one for one in batch.request_ids if one in self._states]
        return StepResult(progressed, self._finish(ended) if ended else [], len(tokens))

    def _begin(self, state: RequestState) -> None:
        """Start the samples after the first, those that did not end with their first token."""
        state.begin()
        if len(state.completions) == 1:
            return
        others = [one for one in state.unfinished if one.index > 0]
        samples = [(one.request, one.token_ids[-1]) for one in others]
        self._scheduler.fork(state.request.request_id, samples)
        for one in others:
            self._running[one.request.request_id] = (state, one)

    def _finish(self, ended: list[Completion]) -> list[RequestOutput]:
        """Take completions out that have ended; outputs of the requests that are through."""
        ids = [one.request.request_id for one in ended if one.request.request_id in self._running]
        states = dict.fromkeys(self._running[one][0] for one in ids)
        self._end(ids)
        through = [state for state in states if state.is_finished]
        for state in through:
            state.end()
            del self._states[state.request.request_id]
        return [state.output() for state in through]

    def _end(self, request_ids: list[str]) -> None:
        self._scheduler.finish(request_ids)
        for request_id in request_ids:
            self._running.pop(request_id, None)
        if not self._running:
            self._batch = None  # it holds what has ended
            self._settle()

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests early; ids that are not in flight are passed over."""
        states = [self._states.pop(one) for one in request_ids if one in self._states]
        for state in states:
            self._end([one.request.request_id for one in state.completions])
            for one in state.unfinished:
                one.finish("abort")
            state.end()
        return [state.output() for state in states]

    def stats(self) -> EngineStats:
        """The ledger and the counters as of now."""
        return EngineStats(
            ledger=self._manager.ledger(),
            counters=self._manager.stats().as_dict(),
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=self._scheduler.num_preemptions,
        )
