"""A request as the engine sees it: its completions, their text, and when they end."""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from pyengine.core.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from pyengine.core.request import Request
from pyengine.core.sampling_params import SamplingParams
from pyengine.engine.detokenizer import IncrementalDetokenizer
from pyengine.sampling import SamplingState, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class EndConditions:
    """What ends a completion: token ids, and its length."""

    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    max_output: int


class Completion:
    """One continuation of a prompt, token by token. Each has a request of its own to run."""

    def __init__(
        self,
        index: int,
        request: Request,
        params: SamplingParams,
        sampling: SamplingState,
        ends: EndConditions,
        tokenizer: Any,
    ) -> None:
        self.index = index
        self.request = request
        self.sampling = sampling
        self.finish_reason: FinishReason | None = None
        self._params = params
        self._decode_one = token_decoder(tokenizer)
        self._stop_reason: int | str | None = None
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative = 0.0
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                prompt_token_ids=request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        self._stop_ids, self._eos_ids = ends.stop_ids, ends.eos_ids
        self._max_output = ends.max_output
        self._is_plain = self._detokenizer is None and params.logprobs is None

    @property
    def token_ids(self) -> list[int]:
        """The tokens so far."""
        return self.sampling.token_ids

    def append(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Take the next token; returns whether it ends the completion."""
        num_output = self.sampling.append(token)
        if self._is_plain and num_output < self._max_output and token not in self._stop_ids:
            return False
        self._examine(token, logprobs)
        return self.finish_reason is not None

    def _examine(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Note the log-probabilities and the text of the newest token, and see if it is the end."""
        if logprobs is not None:
            self._cumulative += logprobs.logprob
            self._logprobs.append(logprobs.as_dict(self._decode_one))
        is_stop = token in self._stop_ids and len(self.token_ids) > self._params.min_tokens
        match = None
        is_text = not is_stop or self._params.include_stop_str_in_output
        if self._detokenizer is not None and is_text:
            match = self._detokenizer.append(token)
        if is_stop:
            self.finish("stop", None if token in self._eos_ids else token)
        elif match is not None:
            self.finish("stop", match.stop)
        elif len(self.token_ids) >= self._max_output:
            self.finish("length", None)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the completion."""
        self.finish_reason, self._stop_reason = reason, stop_reason
        if self._detokenizer is not None:
            self._detokenizer.finish()

    def output(self) -> CompletionOutput:
        """The completion as callers see it."""
        wants_logprobs = self._params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text="" if self._detokenizer is None else self._detokenizer.stable_text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self._cumulative if wants_logprobs else None,
            logprobs=list(self._logprobs) if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )


class RequestState:
    """A prompt and its completions: `params.n` of them, the first one under the request's id.

    Until the prompt is computed only the first one runs; then the others are forked from it.
    """

    def __init__(
        self,
        completions: list[Completion],
        params: SamplingParams,
        *,
        prompt: str | None,
        tokenizer: Any,
    ) -> None:
        self.completions = completions
        self.params = params
        self._prompt = prompt
        self._decode_one = token_decoder(tokenizer)
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [None]
        self._arrival = monotonic()
        self._first_token: float | None = None
        self._finished: float | None = None

    @property
    def request(self) -> Request:
        """The request that computes the prompt."""
        return self.completions[0].request

    @property
    def is_finished(self) -> bool:
        """Whether every completion has ended."""
        return all(one.finish_reason is not None for one in self.completions)

    @property
    def unfinished(self) -> list[Completion]:
        """Completions that have not ended."""
        return [one for one in self.completions if one.finish_reason is None]

    def begin(self) -> None:
        """Take note of when the first tokens came."""
        self._first_token = monotonic()

    def end(self) -> None:
        """Take note of when it ended."""
        self._finished = monotonic()

    def append_prompt_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        """Take what the next positions of the prompt said about the tokens after them."""
        self._prompt_logprobs += [entry.as_dict(self._decode_one) for entry in logprobs]

    @property
    def num_prompt_logprobs(self) -> int:
        """Prompt positions that have their entry, the first one included."""
        return len(self._prompt_logprobs)

    def output(self) -> RequestOutput:
        """The state as callers see it; a snapshot until the request has finished."""
        wants_prompt = self.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            prompt_logprobs=list(self._prompt_logprobs) if wants_prompt else None,
            outputs=[one.output() for one in self.completions],
            finished=self.is_finished,
            num_cached_tokens=self.request.num_cached_tokens,
            metrics=RequestMetrics(
                arrival_time=self._arrival,
                first_token_time=self._first_token,
                finished_time=self._finished,
                num_preemptions=sum(one.request.num_preemptions for one in self.completions),
            ),
        )


def token_decoder(tokenizer: Any) -> Callable[[int], str] | None:
    """The text of a single token, for log-probabilities; None without a tokenizer."""
    return None if tokenizer is None else lambda token: str(tokenizer.decode([token]))
