"""A request: its prompt and parameters, the scheduling of its sequences, and its result."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any, Protocol

import numpy as np

from pyengine.errors import PinQuotaError
from pyengine.kv_cache import Sequence as KVSequence
from pyengine.models.adapters import Adapter
from pyengine.outputs import (
    CacheExplanation,
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from pyengine.pooling_params import Pooling
from pyengine.request.cache_hints import NO_HINTS, CacheHints, KeptPrefix
from pyengine.request.output import OutputRules, SequenceOutput
from pyengine.request.prompt_entries import PromptEntries
from pyengine.request.prompt_logprobs import PromptLogprobs
from pyengine.request.prompt_states import AllStates, PromptStates, States
from pyengine.request.prompts import Prompt
from pyengine.sampling.logprobs import TokenLogprobs
from pyengine.sampling.state import SamplingState


class OutputSink(Protocol):
    """The receiver of a request's outputs. Called by the engine thread."""

    streams: bool
    """True for deltas after each step; otherwise it gets the whole output at the end."""

    def put(self, output: RequestOutput) -> None:
        """Accept a delta, or the whole output."""

    def fail(self, error: Exception) -> None:
        """The request has failed: no further output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How a request is served, beside its prompt and sampling parameters.

    Tenants take turns; requests of a `tenant` are served by `priority`, smaller first, then by
    arrival. A request is aborted at its `deadline`, in seconds of `time.monotonic`.
    """

    priority: float = 0
    tenant: bytes = b""
    deadline: float | None = None
    cache_hints: CacheHints = NO_HINTS
    is_internal: bool = False
    """True for a request of the engine itself: its blocks are not stored."""
    pooling: Pooling | None = None
    """The hidden states of the prompt that are wanted, for a request without output."""
    adapter: Adapter | None = None
    """Changes the model for it."""


@dataclass(slots=True, eq=False)
class Progress:
    """The scheduled part of a request; written by the scheduler and by restores from a store."""

    scheduled_time: float | None = None
    """The time at which its first step was planned."""
    num_cached_tokens: int = 0
    """Prompt tokens that were cached when it first ran."""
    num_restored_tokens: int = 0
    """Prompt tokens that were restored from a store for it; they are cached when it runs."""
    num_preemptions: int = 0
    """Preemptions, each followed by recomputation."""


@dataclass(slots=True, eq=False)
class Result:
    """Results of a request beside tokens; written by the engine and its parts."""

    first_token_time: float | None = None
    finished_time: float | None = None
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    cache: CacheExplanation | None = None
    """Where its cached tokens came from, and why others were computed."""
    last_reused_block: int | None = None
    """The block before its first token that was not reused."""
    pins: list[KeptPrefix] = field(default_factory=list)
    """Prefixes that its hints have pinned, once its prompt is computed."""
    pin_error: PinQuotaError | None = None
    """The refusal of a pin."""


@dataclass(slots=True, eq=False, repr=False)
class SequenceState:
    """The scheduling of one continuation of a prompt, from the queue to its last token.

    The scheduler plans by its counts. They equal those of the block manager after all open steps: a
    token that such a step samples is counted before its value is known.
    """

    request: "Request"
    index: int
    """Position among the sequences of its request; the first computes the prompt for all."""
    output: SequenceOutput
    token_ids: Sequence[int] = field(init=False)
    """The output so far, as `output` has it."""
    kv: KVSequence = field(init=False)
    """Its blocks in the KV cache; made by the scheduler when it is queued or forked."""
    order: tuple[float, int, int] = field(init=False)
    """Priority, position in the order of submission, and in its request."""
    num_seqs: int = field(init=False)
    """The sequences that it counts as: itself and those to be forked from it."""
    num_tokens: int = field(init=False)
    """Tokens of prompt and output, including those that open steps sample."""
    num_computed: int = 0
    """Tokens whose KV is in the cache, or will be by open steps."""
    state_slot: int = -1
    """The slot of its running state, for a model with recurrent layers; -1: none."""
    is_running: bool = False
    """Admitted: it holds blocks, or will once the open step is planned."""
    waits_for_tokens: bool = field(init=False)
    """Its next token cannot be chosen before the value of its last one is known."""
    wants_drafts: bool = False
    """Drafts for its next tokens wait for the value of its last token."""

    def __post_init__(self) -> None:
        request = self.request
        self.token_ids = self.output.token_ids
        self.order = (request.priority, 0, self.index)
        self.num_seqs = request.num_sequences if self.index == 0 else 1
        self.num_tokens = len(request.prompt_token_ids)
        self.waits_for_tokens = self.output.sampling.depends_on_output

    @property
    def num_kept(self) -> int | None:
        """The first tokens that stay cached when it ends; None if all do."""
        request = self.request
        if request.thinking is None:
            return None
        return request.thinking.num_kept(len(request.prompt_token_ids), self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return self.num_tokens - self.num_computed

    @property
    def is_complete(self) -> bool:
        """True if the open steps sample its last possible token."""
        return self.num_tokens >= self.request.max_tokens

    @property
    def is_awaited(self) -> bool:
        """True if the next step needs the value of this token on the host.

        So it is for tokens that change later logits, for the token after which sequences are
        forked, and for tokens before drafts.
        """
        return self.waits_for_tokens or self.num_seqs > 1 or self.wants_drafts

    @property
    def is_known(self) -> bool:
        """True if it has output, and all of its tokens except the one being sampled are known."""
        output = self.num_tokens - 1 - len(self.request.prompt_token_ids)
        return len(self.token_ids) == output > 0


@dataclass(frozen=True, slots=True)
class PromptResults:
    """The results that a request wants for its prompt's tokens.

    `scores` is the source of their log-probabilities, `states` receives their hidden states; None
    if not wanted. `max_chunk` are the most tokens of all prompts with such a bound that a step
    computes.
    """

    scores: PromptLogprobs | None = None
    states: PromptStates | None = None
    max_chunk: float = inf

    @property
    def entries(self) -> PromptEntries | None:
        """Results of each token that may be known from earlier requests, if such are wanted."""
        return self.scores or (None if self.states is None else self.states.entries)

    @property
    def read_cache(self) -> bool:
        """False if the logits or the hidden states of all tokens are needed."""
        return self.scores is None and (self.states is None or self.states.reads_cache)


NO_RESULTS = PromptResults()


class Request:
    """A prompt and its sequences, from the queue to the last token.

    The caller's fields are set when the request is created. The rest has one owner each: `progress`
    and the sequences' counts belong to the scheduler, `result` and the sequences' `output` to the
    engine.

    Until the prompt is computed only the first sequence runs; then the others are forked from it.
    A request is admitted when all of them may run. `space` is what its blocks are
    cached under. With `read_cache` off every prompt token is computed, cached or
    not, except those that `prompt_entries` allow.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        rules: OutputRules,
        options: RequestOptions,
        results: PromptResults = NO_RESULTS,
    ) -> None:
        """`results` are what is wanted of the prompt's tokens."""
        self.request_id = request_id
        self.prompt = prompt.text
        self.prompt_token_ids = prompt.token_ids
        self.space = prompt.space
        self.thinking = prompt.thinking
        self.adapter = prompt.adapter
        self.params = rules.params
        self.rules = rules
        self.priority, self.tenant = options.priority, options.tenant
        self.deadline, self.cache_hints = options.deadline, options.cache_hints
        self.is_internal = options.is_internal
        self.max_tokens = len(prompt.token_ids) + rules.max_output
        """The most tokens of a sequence, the prompt's included."""
        self.scores, self.max_chunk = results.scores, results.max_chunk
        self.prompt_states, self.prompt_entries = results.states, results.entries
        self.wants_hidden = bool(results.states or rules.params.return_hidden_states)
        """True if hidden states of some steps are wanted."""
        self.read_cache = results.read_cache
        self.num_sequences = rules.params.n
        self.arrival_time = monotonic()
        self.sequences: list[SequenceState] = []
        self.progress = Progress()
        self.result = Result()
        self.sink: OutputSink | None = None
        self.index = 0
        """Position among the prompts of the same call."""
        self.is_submitted = False
        """True once an engine has accepted it: it is for one call."""
        self._prompt_ids: list[int] | None = None
        self._metrics: RequestMetrics | None = None

    @property
    def namespace(self) -> bytes:
        """The namespace of its blocks."""
        return self.space["namespace"]

    def add_sequence(self, sampling: SamplingState) -> None:
        """Add the next sequence, which draws its tokens by `sampling`."""
        index = len(self.sequences)
        output = SequenceOutput(self.rules, index, sampling)
        self.sequences.append(SequenceState(self, index, output))

    def send_to(self, sink: OutputSink | None, index: int = 0) -> None:
        """Send outputs to `sink`; `index` is the position among the prompts of the same call."""
        self.sink, self.index = sink, index

    @property
    def scheduled_time(self) -> float | None:
        """See `RequestMetrics`, as for the next three."""
        return self.progress.scheduled_time

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far."""
        return self.progress.num_preemptions

    @property
    def first_token_time(self) -> float | None:
        """None before it."""
        return self.result.first_token_time

    @property
    def finished_time(self) -> float | None:
        """None before it."""
        return self.result.finished_time

    @property
    def is_finished(self) -> bool:
        """True if every sequence has ended."""
        return all([sequence.output.finish_reason is not None for sequence in self.sequences])

    @property
    def unfinished(self) -> list[SequenceState]:
        """Sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.output.finish_reason is None]

    def finish(self, reason: FinishReason, stop_reason: str | None = None) -> None:
        """End every sequence that has not ended."""
        for sequence in self.unfinished:
            sequence.output.finish(reason, stop_reason)

    def restart_prompt(self) -> None:
        """Forget what is known of its prompt, unless it has output: other weights compute it."""
        if any([len(sequence.token_ids) for sequence in self.sequences]):
            return
        self.result.prompt_logprobs = [None]
        for results in (self.scores, self.prompt_states):
            if results is not None:
                results.restart()

    def append_prompt_logprobs(self, first: int, logprobs: list[TokenLogprobs]) -> None:
        """Append log-probabilities of the prompt's tokens from position `first` on."""
        assert self.scores is not None
        texts = self.rules.token_texts(skip_special_tokens=False)
        new = self.scores.extend(first, logprobs)
        self.result.prompt_logprobs += [entry.as_dict(texts) for entry in new]

    def take_delta(self) -> RequestOutput | None:
        """The output since the last call; None if there is none."""
        deltas = [sequence.output.take_delta() for sequence in self.sequences]
        outputs = [output for output in deltas if output is not None]
        return self.output(outputs) if outputs else None

    def output(self, outputs: list[CompletionOutput] | None = None) -> RequestOutput:
        """The output so far of all sequences, or these `outputs` of theirs."""
        if outputs is None:
            outputs = [sequence.output.snapshot() for sequence in self.sequences]
        if self._prompt_ids is None:
            ids: Any = self.prompt_token_ids
            self._prompt_ids = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        progress, result, metrics = self.progress, self.result, self._metrics
        if (  # else the same object
            metrics is None
            or result.finished_time is not None
            or metrics.num_preemptions != progress.num_preemptions
            or metrics.first_token_time != result.first_token_time
        ):
            metrics = self._metrics = RequestMetrics(
                arrival_time=self.arrival_time,
                scheduled_time=progress.scheduled_time,
                first_token_time=result.first_token_time,
                finished_time=result.finished_time,
                num_preemptions=progress.num_preemptions,
            )
        wants_prompt = self.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=result.prompt_logprobs if wants_prompt else None,
            outputs=outputs,
            finished=self.is_finished,
            num_cached_tokens=progress.num_cached_tokens,
            num_restored_tokens=min(progress.num_restored_tokens, progress.num_cached_tokens),
            metrics=metrics,
            index=self.index,
            error=result.error,
            cache=result.cache,
            pin_error=None if result.pin_error is None else str(result.pin_error),
            prompt_hidden_states=self._prompt_hidden(),
        )

    def _prompt_hidden(self) -> States | None:
        """The hidden states of all tokens of the prompt, if they are wanted and computed."""
        return self.prompt_states.result if isinstance(self.prompt_states, AllStates) else None


def requests_of(sequences: Iterable[SequenceState]) -> list[Request]:
    """The requests of these sequences, each once, in order."""
    return list(dict.fromkeys([sequence.request for sequence in sequences]))
