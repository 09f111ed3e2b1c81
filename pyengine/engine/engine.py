"""The loop. `step` reads like the picture in the docs: schedule, run, sample, commit."""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.cache import BlockManager, Ledger
from pyengine.core.errors import InvalidRequestError
from pyengine.core.outputs import RequestOutput
from pyengine.core.request import Request
from pyengine.core.sampling_params import SamplingParams
from pyengine.engine.request_state import EndConditions, RequestState
from pyengine.runner import ModelRunner, StepLogits
from pyengine.sampling import Sampled, Sampler, SamplingState, prompt_logprobs
from pyengine.scheduler import Entry, ScheduledStep, Scheduler


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
        runner: ModelRunner,
        facts: ModelFacts,
        *,
        tokenizer: Any = None,
        seed: int = 0,
    ) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._runner = runner
        self._facts = facts
        self._tokenizer = tokenizer
        self._seeds = Random(seed)
        self._sampler = Sampler()
        self._states: dict[str, RequestState] = {}

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.has_work

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raise `InvalidRequestError` for a request that cannot be served."""
        ids, facts = prompt.token_ids, self._facts
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
        params.check_vocabulary(facts.vocab_size)
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError(
                f"stop={list(params.stop)} needs a tokenizer, this model has none: "
                "use stop_token_ids"
            )

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> None:
        """Queue a request. Raises `InvalidRequestError` if it cannot be served."""
        self.check(prompt, params)
        eos_ids = frozenset() if params.ignore_eos else self._facts.eos_token_ids
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        sampling = SamplingState(
            params,
            prompt.token_ids,
            seed=seed,
            vocab_size=self._facts.vocab_size,
            stop_ids=self._facts.eos_token_ids,
        )
        longest = self._facts.max_model_len - len(prompt.token_ids)
        ends = EndConditions(
            stop_ids=eos_ids | set(params.stop_token_ids),
            eos_ids=eos_ids,
            max_output=longest if params.max_tokens is None else min(params.max_tokens, longest),
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            read_cache=params.prompt_logprobs is None,  # they need the logits of every position
        )
        state = RequestState(
            request, params, sampling, ends, prompt=prompt.text, tokenizer=self._tokenizer
        )
        self._scheduler.add(request)
        self._states[request_id] = state

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs of the requests that got a token in it.

        If anything fails on the way, the step is rolled back and no request has changed.
        """
        step = self._scheduler.schedule()
        if step is None:
            return []
        try:
            logits = self._runner.execute(step.plan, extra_rows=self._prompt_rows(step))
            sampled = self._sample(step, logits)
            tokens = sampled.token_ids.numpy()
            self._scheduler.commit(step, tokens)
        except BaseException:
            if step.plan.is_open:
                self._scheduler.rollback(step)
            raise
        return self._collect(step, logits, sampled)

    def _sample(self, step: ScheduledStep, logits: StepLogits) -> Sampled:
        states = [self._states[entry.request.request_id].sampling for entry in step.sampling]
        return self._sampler(logits.sampling, states)

    def _collect(
        self, step: ScheduledStep, logits: StepLogits, sampled: Sampled
    ) -> list[RequestOutput]:
        """Hand every token to its request and end those that are done."""
        self._collect_prompt_logprobs(step, logits)
        outputs: list[RequestOutput] = []
        finished: list[str] = []
        tokens = sampled.token_ids.tolist()
        for entry, token, logprobs in zip(step.sampling, tokens, sampled.logprobs, strict=True):
            state = self._states[entry.request.request_id]
            state.append(token, logprobs)
            outputs.append(state.output())
            if state.finish_reason is not None:
                finished.append(entry.request.request_id)
        self._forget(finished)
        return outputs

    def _prompt_entries(self, step: ScheduledStep) -> Iterable[tuple[int, Entry, int]]:
        """(first row, entry, rows) of the prompt positions whose log-probabilities are due."""
        first_row = 0
        for entry in step.entries:
            state = self._states[entry.request.request_id]
            if state.params.prompt_logprobs is not None:
                due = state.num_prompt_logprobs - 1  # the first position without an entry
                last = min(entry.end, len(entry.request.prompt_token_ids) - 1)
                if entry.start <= due < last:
                    yield first_row + due - entry.start, entry, last - due
            first_row += entry.num_tokens

    def _prompt_rows(self, step: ScheduledStep) -> npt.NDArray[np.int64] | None:
        rows = [np.arange(first, first + n) for first, _, n in self._prompt_entries(step)]
        return np.concatenate(rows).astype(np.int64) if rows else None

    def _collect_prompt_logprobs(self, step: ScheduledStep, logits: StepLogits) -> None:
        at = 0
        for _, entry, rows in list(self._prompt_entries(step)):
            state = self._states[entry.request.request_id]
            due = state.num_prompt_logprobs - 1
            following = state.request.prompt_token_ids[due + 1 : due + 1 + rows]
            top = state.params.prompt_logprobs or 0
            state.append_prompt_logprobs(
                prompt_logprobs(logits.extra[at : at + rows], following, top)
            )
            at += rows

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests early; ids that are not in flight are passed over."""
        known = [request_id for request_id in request_ids if request_id in self._states]
        states = [self._states[request_id] for request_id in known]
        for state in states:
            state.finish("abort", None)
        self._forget(known)
        return [state.output() for state in states]

    def _forget(self, request_ids: list[str]) -> None:
        self._scheduler.finish(request_ids)
        for request_id in request_ids:
            del self._states[request_id]

    def stats(self) -> EngineStats:
        """The ledger and the counters as of now."""
        return EngineStats(
            ledger=self._manager.ledger(),
            counters=self._manager.stats().as_dict(),
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=self._scheduler.num_preemptions,
        )
