"""A request and its sequences: tokens, text, and end conditions."""

from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pyengine.engine.detokenizer import IncrementalDetokenizer
from pyengine.engine.prompt_logprobs import PromptLogprobs
from pyengine.engine.prompts import Prompt
from pyengine.engine.token_bytes import TokenTexts, token_texts
from pyengine.errors import PinQuotaError
from pyengine.kv_cache import Pin, StoredPrefix
from pyengine.kv_cache import Sequence as KVSequence
from pyengine.outputs import (
    CONTEXT_FULL,
    CacheExplanation,
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from pyengine.sampling.logprobs import TokenLogprobs
from pyengine.sampling.state import SamplingState
from pyengine.sampling_params import SamplingParams
from pyengine.scheduler.pins import NO_HINTS, CacheHints, KeptPrefix

if TYPE_CHECKING:
    from pyengine.engine.thinking import StrippedThinking
    from pyengine.engine.verification import Verification


class OutputSink(Protocol):
    """The receiver of a request's outputs. Called by the engine thread."""

    streams: bool
    """True for deltas after each step; otherwise it gets the whole output at the end."""

    def put(self, output: RequestOutput) -> None:
        """Accept a delta, or the whole output."""

    def fail(self, error: Exception) -> None:
        """The request has failed: no further output."""


@dataclass(slots=True, eq=False, repr=False)
class SequenceState:
    """One continuation of a prompt, from the queue to its last token.

    The scheduler plans by its counts. They equal those of the block manager after all open steps: a
    token that such a step samples is counted before its value is known.
    """

    request: "Request"
    index: int
    """Position among the sequences of its request; the first computes the prompt for all."""
    sampling: SamplingState
    params: SamplingParams = field(init=False)
    kv: KVSequence = field(init=False)
    """Its blocks in the KV cache; made by the scheduler when it is queued or forked."""
    order: tuple[float, int, int] = field(init=False)
    """Priority, position in the order of submission, and in its request."""
    num_slots: int = field(init=False)
    """Its slots in the batch, including those of sequences to be forked from it."""
    num_tokens: int = field(init=False)
    """Tokens of prompt and output, including those that open steps sample."""
    num_computed: int = 0
    """Tokens whose KV is in the cache, or will be by open steps."""
    is_running: bool = False
    """Admitted: it holds blocks, or will once the open step is planned."""
    is_looked_up: bool = False
    """The stored part of its tokens was restored, is missing, or is faster to compute."""
    is_loading: bool = False
    """Bytes of its prefix are on their way from a store: it is not admitted."""
    num_stored: int = 0
    """Tokens that were queued to be stored."""
    stored_prefix: StoredPrefix | None = None
    """The keys of its blocks in the store, once they were needed."""
    prefix_length: int | None = None
    """Tokens that were cached when it was last matched while it waited; None before."""
    prefix_pin: Pin | None = None
    """Keeps these tokens cached while it waits."""
    num_overtaken: int = 0
    """Admissions of later requests of its priority before its own."""
    waits_for_tokens: bool = field(init=False)
    """Its next token cannot be chosen before the value of its last one is known."""
    wants_drafts: bool = False
    """Drafts for its next tokens wait for the value of its last token."""
    token_ids: list[int] = field(init=False)
    """The output so far."""
    is_drawn: bool = field(init=False)
    """True if its tokens are drawn; otherwise the most probable are taken."""
    stop_ids: frozenset[int] = field(init=False)
    """Tokens that end it after `min_tokens`."""
    max_output: int = field(init=False)
    """The most output tokens."""
    speculates: bool = False
    """True if its next tokens may be drafted."""
    is_streamed: bool = False
    """True if its tokens are appended one by one; those of other sequences are buffered.

    So it is if its sink streams, a stop string may end it, tokens change later logits, and with
    drafts or log-probabilities.
    """
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    _logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    _cumulative: float = 0.0
    _detokenizer: IncrementalDetokenizer | None = None
    _num_taken: int = 0
    _num_decoded: int = 0
    _is_end_emitted: bool = False
    _drops_last: bool = False

    def __post_init__(self) -> None:
        request, sampling = self.request, self.sampling
        self.params = request.params
        self.order = (request.priority, 0, self.index)
        self.num_slots = request.num_sequences if self.index == 0 else 1
        self.num_tokens = len(request.prompt_token_ids)
        self.waits_for_tokens = sampling.depends_on_output
        self.token_ids, self.is_drawn = sampling.token_ids, sampling.is_drawn
        self.stop_ids, self.max_output = request.stop_ids, request.max_output

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
        return self.waits_for_tokens or self.num_slots > 1 or self.wants_drafts

    @property
    def is_known(self) -> bool:
        """True if it has output, and all of its tokens except the one being sampled are known."""
        output = self.num_tokens - 1 - len(self.request.prompt_token_ids)
        return len(self.token_ids) == output > 0

    def append(self, token: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Append the next token; True if it ends the sequence.

        With `max_tokens=0` the token that the last step of the prompt sampled is dropped.
        """
        if not self.max_output:
            self.finish("length")
            return True
        num_output = self.sampling.append(token)
        if logprobs is not None:
            self._cumulative += logprobs.logprob
            self._logprobs.append(logprobs.as_dict(self.request.decoder))
        is_stop = token in self.stop_ids and num_output > self.params.min_tokens
        match = None
        if self.params.stop and (not is_stop or self.params.include_stop_str_in_output):
            match = self._text_to(num_output)
        if is_stop:
            self._drops_last = not self.params.include_stop_str_in_output
            self.finish("stop", None if token in self.request.eos_ids else token)
        elif match is not None:
            self.finish("stop", match)
        elif self.sampling.matcher is not None and self.sampling.matcher.is_finished:
            self.finish("stop")
        elif num_output >= self.max_output:
            self.finish("length", self.request.length_reason)
        return self.finish_reason is not None

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the sequence."""
        self.finish_reason, self.stop_reason = reason, stop_reason

    def _text_to(self, num_tokens: int) -> str | None:
        """Extend the text to `num_tokens` tokens; return the stop string that ended it, if any.

        There is no text without a tokenizer or with `detokenize=False`.
        """
        params, request = self.params, self.request
        if request.tokenizer is None or not params.detokenize:
            return None
        if self._detokenizer is None:
            self._detokenizer = IncrementalDetokenizer(
                request.tokenizer,
                prompt_token_ids=request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        first = self._num_decoded
        if first >= num_tokens:
            return None
        self._num_decoded = num_tokens
        return self._detokenizer.append(self.token_ids[first:num_tokens])

    def _text(self) -> IncrementalDetokenizer | None:
        """The text so far; all of it once the sequence has ended."""
        is_cut = self.finish_reason == "stop" and isinstance(self.stop_reason, str)
        if not is_cut:  # else it ends with the stop string, within a token perhaps
            self._text_to(len(self.token_ids) - self._drops_last)
        if self._detokenizer is not None and self.finish_reason is not None:
            self._detokenizer.finish()
        return self._detokenizer

    def output(self) -> CompletionOutput:
        """The output so far."""
        text = self._text()
        return self._output(0, "" if text is None else text.stable_text)

    def take_delta(self) -> CompletionOutput | None:
        """The output since the last call; None if there is none."""
        first, end = self._num_taken, len(self.token_ids)
        if self._is_end_emitted or (first == end and self.finish_reason is None):
            return None
        self._is_end_emitted = self.finish_reason is not None
        self._num_taken = end
        text = self._text()
        return self._output(first, "" if text is None else text.take_new_text())

    def _output(self, first: int, text: str) -> CompletionOutput:
        """The output from a token on."""
        wants_logprobs = self.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[first:],
            cumulative_logprob=self._cumulative if wants_logprobs else None,
            logprobs=self._logprobs[first:] if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class Request:
    """A prompt and its sequences, from the queue to the last token.

    Tenants take turns. Requests of a `tenant` are served by `priority`, smaller first, then by
    arrival. Until the prompt is computed
    only the first sequence runs; then the others are forked from it. A request is admitted when
    there are slots for all of them. `namespace` separates its blocks from those of other
    namespaces.

    A sequence ends at one of `eos_ids`, and after `max_output` tokens. With `read_cache` off every
    prompt token is computed, cached or not, except those that `scores` allows.
    """

    tenant: bytes = b""
    """Its caller, if there are several: they take turns."""

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        max_output: int,
        eos_ids: frozenset[int] = frozenset(),
        priority: float = 0,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt.text
        self.prompt_token_ids = prompt.token_ids
        self.namespace = prompt.namespace
        self.params = params
        self.priority = priority
        self.max_output = max_output
        self.eos_ids = eos_ids
        self.stop_ids = eos_ids.union(params.stop_token_ids) if params.stop_token_ids else eos_ids
        """Tokens that end a sequence."""
        self.length_reason = None if params.max_tokens == max_output else CONTEXT_FULL
        """The stop reason of a sequence with `max_output` tokens."""
        self.max_tokens = len(prompt.token_ids) + max_output
        """The most tokens of a sequence, the prompt's included."""
        self.max_chunk = inf
        """The most tokens of all prompts with such a bound that a step computes."""
        self.read_cache = params.prompt_logprobs is None  # log-probabilities need the logits
        self.num_sequences = params.n
        self.sequences: list[SequenceState] = []
        self.tokenizer: Any = None
        self.sink: OutputSink | None = None
        self.is_submitted = False
        """True once an engine has accepted it: it is for one call."""
        self.place = 0
        """Position among the prompts of the same call."""
        self.verifies: Verification | None = None
        """The cached prefix that it recomputes; None for requests of callers."""
        self.cache_hints: CacheHints = NO_HINTS
        self.thinking: StrippedThinking | None = None
        """The part of prompt and answer that the next turn of the conversation leaves out."""
        self.pins: list[KeptPrefix] = []
        """Prefixes that its hints have pinned, once its prompt is computed."""
        self.pin_error: PinQuotaError | None = None
        """The refusal of a pin."""
        self.deadline: float | None = None
        """The time at which it is aborted, in seconds of `time.monotonic`."""
        self.error: str | None = None
        self.num_cached_tokens = 0
        """Prompt tokens that were cached when it first ran."""
        self.num_restored_tokens = 0
        """Prompt tokens that were restored from a store for it; they are cached when it runs."""
        self.cache: CacheExplanation | None = None
        """Where its cached tokens came from, and why others were computed."""
        self.last_reused_block: int | None = None
        """The block before its first token that was not reused."""
        self.num_preemptions = 0
        """Preemptions, each followed by recomputation."""
        self.num_failures = 0
        """Failed steps that it may have caused, since its last good step."""
        self.prompt_logprobs: list[dict[int, Logprob] | None] = [None]
        self.scores: PromptLogprobs | None = None
        """The source of the prompt's log-probabilities; None if not requested."""
        self.arrival_time = monotonic()
        self.scheduled_time: float | None = None
        """The time at which its first step was planned."""
        self.first_token_time: float | None = None
        self.finished_time: float | None = None
        self._prompt_ids: list[int] | None = None
        self._metrics: RequestMetrics | None = None

    @property
    def is_finished(self) -> bool:
        """True if every sequence has ended."""
        return all([sequence.finish_reason is not None for sequence in self.sequences])

    @property
    def unfinished(self) -> list[SequenceState]:
        """Sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    def finish(self, reason: FinishReason, stop_reason: str | None = None) -> None:
        """End every sequence that has not ended."""
        for sequence in self.unfinished:
            sequence.finish(reason, stop_reason)

    @property
    def decoder(self) -> TokenTexts | None:
        """The texts of single tokens of answers; None without a tokenizer."""
        skipped = self.params.skip_special_tokens
        tokenizer = self.tokenizer
        return None if tokenizer is None else token_texts(tokenizer, skip_special_tokens=skipped)

    def append_prompt_logprobs(self, first: int, logprobs: list[TokenLogprobs]) -> None:
        """Append log-probabilities of the prompt's tokens from position `first` on."""
        assert self.scores is not None
        tokenizer = self.tokenizer
        decoder = None if tokenizer is None else token_texts(tokenizer, skip_special_tokens=False)
        new = self.scores.extend(first, logprobs)
        self.prompt_logprobs += [entry.as_dict(decoder) for entry in new]

    def take_delta(self) -> RequestOutput | None:
        """The output since the last call; None if there is none."""
        deltas = [sequence.take_delta() for sequence in self.sequences]
        outputs = [output for output in deltas if output is not None]
        return self.output(outputs) if outputs else None

    def output(self, outputs: list[CompletionOutput] | None = None) -> RequestOutput:
        """The output so far of all sequences, or these `outputs` of theirs."""
        if outputs is None:
            outputs = [sequence.output() for sequence in self.sequences]
        if self._prompt_ids is None:
            ids: Any = self.prompt_token_ids
            self._prompt_ids = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        metrics = self._metrics
        if (  # else the same object
            metrics is None
            or self.finished_time is not None
            or metrics.num_preemptions != self.num_preemptions
            or metrics.first_token_time != self.first_token_time
        ):
            metrics = self._metrics = RequestMetrics(
                arrival_time=self.arrival_time,
                scheduled_time=self.scheduled_time,
                first_token_time=self.first_token_time,
                finished_time=self.finished_time,
                num_preemptions=self.num_preemptions,
            )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=None if self.params.prompt_logprobs is None else self.prompt_logprobs,
            outputs=outputs,
            finished=self.is_finished,
            num_cached_tokens=self.num_cached_tokens,
            num_restored_tokens=min(self.num_restored_tokens, self.num_cached_tokens),
            metrics=metrics,
            index=self.place,
            error=self.error,
            cache=self.cache,
            pin_error=None if self.pin_error is None else str(self.pin_error),
        )
