"""A request as the engine sees it: its samples, their text, and when they end."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Protocol

import numpy as np

from pyengine.engine.detokenizer import IncrementalDetokenizer, text_of
from pyengine.engine.prompt_logprobs import PromptLogprobs
from pyengine.engine.prompts import Prompt
from pyengine.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from pyengine.sampling.logprobs import TokenLogprobs
from pyengine.sampling.state import SamplingState
from pyengine.sampling_params import SamplingParams
from pyengine.scheduler.batch import Job, Request


class OutputSink(Protocol):
    """Where a request's outputs go. Called by the thread that runs the step."""

    streams: bool
    """Whether it wants what is new after each step; otherwise it gets the whole at the end."""

    def put(self, output: RequestOutput) -> None:
        """Take what is new, or the whole."""
        ...

    def fail(self, error: Exception) -> None:
        """The engine cannot go on with this request: there will be no output any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EndConditions:
    """What ends a sample: token ids, and its length. The same for all samples of a request.

    `length_reason` is the stop reason of a sample that has all `max_output` tokens.
    """

    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    max_output: int
    length_reason: str | None = None


class Sample(Job):
    """One continuation of a prompt: one object from the queue to its last token."""

    __slots__ = (
        "_cumulative",
        "_detokenizer",
        "_drops_last",
        "_ends",
        "_is_end_emitted",
        "_logprobs",
        "_num_decoded",
        "_num_taken",
        "finish_reason",
        "params",
        "sampling",
        "speculates",
        "state",
        "stop_reason",
    )

    def __init__(
        self, state: "RequestState", index: int, sampling: SamplingState, ends: EndConditions
    ) -> None:
        super().__init__(state, index, waits_for_tokens=sampling.depends_on_output)
        self.state = state
        self.params = state.params
        self.sampling = sampling
        self.speculates = False
        """Whether drafts of its next tokens may be tried."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._ends = ends
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative = 0.0
        self._detokenizer: IncrementalDetokenizer | None = None
        self._num_taken = self._num_decoded = 0
        self._is_end_emitted = self._drops_last = False

    @property
    def token_ids(self) -> list[int]:
        """The tokens so far."""
        return self.sampling.token_ids

    @property
    def is_drawn(self) -> bool:
        """Whether its tokens are drawn; otherwise the most probable are taken."""
        return self.sampling.is_drawn

    @property
    def is_known(self) -> bool:
        """Whether it has begun, and all of its tokens but the one being sampled are known."""
        output = self.num_tokens - 1 - len(self.request.prompt_token_ids)
        return len(self.token_ids) == output > 0

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end it, once it has `min_tokens`."""
        return self._ends.stop_ids

    @property
    def max_output(self) -> int:
        """Tokens that it may have."""
        return self._ends.max_output

    @property
    def is_loud(self) -> bool:
        """Whether every single token of it has to be looked at as it comes.

        So it is where somebody waits for it, where text may end it, where tokens count for the
        ones after them, where drafts follow. Those of the others are looked at together, later.
        """
        params = self.params
        return bool(
            self.state.streams
            or params.stop
            or params.logprobs is not None
            or self.waits_for_tokens
            or self.speculates
        )

    def append(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Take the next token; returns whether it ends the sample.

        Where none was asked for, the one that the last step of the prompt drew is left out.
        """
        if not self._ends.max_output:
            self.finish("length")
            return True
        num_output = self.sampling.append(token)
        if logprobs is not None:
            self._cumulative += logprobs.logprob
            self._logprobs.append(logprobs.as_dict(self.state.decoder))
        is_stop = token in self._ends.stop_ids and num_output > self.params.min_tokens
        match = None
        if self.params.stop and (not is_stop or self.params.include_stop_str_in_output):
            match = self._text_to(num_output)
        if is_stop:
            self._drops_last = not self.params.include_stop_str_in_output
            self.finish("stop", None if token in self._ends.eos_ids else token)
        elif match is not None:
            self.finish("stop", match)
        elif self.sampling.matcher is not None and self.sampling.matcher.is_finished:
            self.finish("stop")
        elif num_output >= self._ends.max_output:
            self.finish("length", self._ends.length_reason)
        return self.finish_reason is not None

    def extend(self, tokens: list[int]) -> None:
        """Take tokens of which none ends the sample."""
        self.sampling.extend(tokens)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the sample."""
        self.finish_reason, self.stop_reason = reason, stop_reason

    def _text_to(self, num_tokens: int) -> str | None:
        """Bring the text up to so many tokens; the stop string that ended it, if one did."""
        first, self._num_decoded = self._num_decoded, max(num_tokens, self._num_decoded)
        detokenizer = self._detokenizer_there()
        if detokenizer is None or first >= num_tokens:
            return None
        match = detokenizer.append_many(self.token_ids[first:num_tokens])
        return None if match is None else match.stop

    def _detokenizer_there(self) -> IncrementalDetokenizer | None:
        """What makes its text; None where none is wanted, or none can be had."""
        params, tokenizer = self.params, self.state.tokenizer
        if self._detokenizer is None and tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                prompt_token_ids=self.request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        return self._detokenizer

    def _text(self) -> IncrementalDetokenizer | None:
        """The text as far as it is known; all of it once the sample has ended."""
        detokenizer = self._detokenizer_there()
        is_stopped = self.finish_reason == "stop"
        if detokenizer is not None and not (is_stopped and isinstance(self.stop_reason, str)):
            self._text_to(len(self.token_ids) - self._drops_last)
        if detokenizer is not None and self.finish_reason is not None:
            detokenizer.finish()
        return detokenizer

    def output(self) -> CompletionOutput:
        """All of the sample so far."""
        text, wants_logprobs = self._text(), self.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text="" if text is None else text.stable_text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self._cumulative if wants_logprobs else None,
            logprobs=list(self._logprobs) if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def take_delta(self) -> CompletionOutput | None:
        """What has come since it was last called; None if that is nothing."""
        first, end = self._num_taken, len(self.token_ids)
        if self._is_end_emitted or (first == end and self.finish_reason is None):
            return None
        self._is_end_emitted = self.finish_reason is not None
        self._num_taken = end
        text, wants_logprobs = self._text(), self.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text="" if text is None else text.take_new_text(),
            token_ids=self.token_ids[first:end],
            cumulative_logprob=self._cumulative if wants_logprobs else None,
            logprobs=self._logprobs[first:end] if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class RequestState(Request):
    """A prompt and its samples: one object from the queue to the last token.

    Until the prompt is computed only the first sample runs; then the others are forked from it.
    `place` is its position among the prompts of the same call, `deadline` the time, in seconds of
    `time.monotonic`, at which it is ended if it has not by then.
    """

    __slots__ = (
        "_metrics",
        "_prompt_ids",
        "arrival_time",
        "deadline",
        "error",
        "finished_time",
        "first_token_time",
        "is_submitted",
        "num_failures",
        "params",
        "place",
        "prompt",
        "prompt_logprobs",
        "samples",
        "scores",
        "sink",
        "tokenizer",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        max_tokens: int,
        max_chunk: float,
        priority: float = 0,
    ) -> None:
        super().__init__(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            namespace=prompt.namespace,
            priority=priority,
            read_cache=params.prompt_logprobs is None,  # they follow from the logits
            num_samples=params.n,
            max_tokens=max_tokens,
            max_chunk=max_chunk,
        )
        self.params = params
        self.prompt = prompt.text
        self.samples: list[Sample] = []
        self.tokenizer: Any = None
        self.sink: OutputSink | None = None
        self.is_submitted = False
        """Whether an engine has taken it: it is for one call."""
        self.place = 0
        self.deadline: float | None = None
        self.error: str | None = None
        self.num_failures = 0
        """Failed steps that it may have been the reason of, since it was last in one that did not
        fail."""
        self.prompt_logprobs: list[dict[int, Logprob] | None] = [None]
        self.scores: PromptLogprobs | None = None
        """Where they come from; None where they are not wanted."""
        self.arrival_time = monotonic()
        self.first_token_time: float | None = None
        self.finished_time: float | None = None
        self._prompt_ids: list[int] | None = None
        self._metrics: RequestMetrics | None = None

    @property
    def streams(self) -> bool:
        """Whether somebody waits for what each step gives."""
        return self.sink is not None and self.sink.streams

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return all([sample.finish_reason is not None for sample in self.samples])

    @property
    def unfinished(self) -> list[Sample]:
        """Samples that have not ended."""
        return [sample for sample in self.samples if sample.finish_reason is None]

    def finish(self, reason: FinishReason, stop_reason: str | None = None) -> None:
        """End every sample that has not ended."""
        for sample in self.unfinished:
            sample.finish(reason, stop_reason)

    @property
    def decoder(self) -> Callable[[int], str] | None:
        """The text of a single token, for log-probabilities; None without a tokenizer."""
        tokenizer = self.tokenizer
        return None if tokenizer is None else partial(text_of, tokenizer)

    def readable_tokens(self) -> int:
        """See `Request.readable_tokens`."""
        return 0 if self.scores is None else self.scores.readable_tokens()

    def awaits_prefix(self) -> bool:
        """See `Request.awaits_prefix`."""
        return self.scores is not None and self.scores.awaits_prefix()

    def admitted(self) -> None:
        """See `Request.admitted`."""
        if self.scores is not None:
            self.scores.announce(lambda: self.samples[0].is_running)

    def append_prompt_logprobs(self, first: int, logprobs: list[TokenLogprobs]) -> None:
        """Take what is said of the prompt's tokens from position `first` on."""
        assert self.scores is not None
        decoder = self.decoder
        new = self.scores.extend(first, logprobs)
        self.prompt_logprobs += [entry.as_dict(decoder) for entry in new]

    def output(self) -> RequestOutput:
        """All of it so far; the samples as they are now."""
        return self._with([sample.output() for sample in self.samples])

    def take_delta(self) -> RequestOutput | None:
        """What has come since it was last called; None if that is nothing."""
        deltas = [sample.take_delta() for sample in self.samples]
        outputs = [output for output in deltas if output is not None]
        return self._with(outputs) if outputs else None

    def _with(self, outputs: list[CompletionOutput]) -> RequestOutput:
        if self._prompt_ids is None:
            ids: Any = self.prompt_token_ids
            self._prompt_ids = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=None if self.params.prompt_logprobs is None else self.prompt_logprobs,
            outputs=outputs,
            finished=self.is_finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self._metrics_now(),
            index=self.place,
            error=self.error,
        )

    def _metrics_now(self) -> RequestMetrics:
        """The same object as long as nothing has changed."""
        last = self._metrics
        if (
            last is None
            or self.finished_time is not None
            or last.num_preemptions != self.num_preemptions
            or last.first_token_time != self.first_token_time
        ):
            last = self._metrics = RequestMetrics(
                arrival_time=self.arrival_time,
                scheduled_time=self.scheduled_time,
                first_token_time=self.first_token_time,
                finished_time=self.finished_time,
                num_preemptions=self.num_preemptions,
            )
        return last
