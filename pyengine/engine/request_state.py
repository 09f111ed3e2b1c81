"""A request as the engine sees it: text, log-probabilities, and when it ends."""

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
    """What ends this request: token ids, and the length of prompt and output together."""

    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    max_output: int


class RequestState:
    """Collects what comes out for one request."""

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        sampling: SamplingState,
        ends: EndConditions,
        *,
        prompt: str | None,
        tokenizer: Any,
    ) -> None:
        self.request = request
        self.params = params
        self.sampling = sampling
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._ends = ends
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative = 0.0
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [None]
        self._arrival = monotonic()
        self._first_token: float | None = None
        self._finished: float | None = None
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self._token_ids)

    def append(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Take the next token and see whether it ends the request."""
        if self._first_token is None:
            self._first_token = monotonic()
        self._token_ids.append(token)
        self.sampling.append(token)
        if logprobs is not None:
            self._cumulative += logprobs.logprob
            self._logprobs.append(logprobs.as_dict(self._decode_one()))
        is_stop = token in self._ends.stop_ids and self.num_output_tokens > self.params.min_tokens
        match = None
        is_text = not is_stop or self.params.include_stop_str_in_output
        if self._detokenizer is not None and is_text:
            match = self._detokenizer.append(token)
        if is_stop:
            self.finish("stop", None if token in self._ends.eos_ids else token)
        elif match is not None:
            self.finish("stop", match.stop)
        elif self.num_output_tokens >= self._ends.max_output:
            self.finish("length", None)

    def append_prompt_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        """Take what the next positions of the prompt said about the tokens after them."""
        decode = self._decode_one()
        self._prompt_logprobs += [entry.as_dict(decode) for entry in logprobs]

    @property
    def num_prompt_logprobs(self) -> int:
        """Prompt positions that have their entry, the first one included."""
        return len(self._prompt_logprobs)

    def finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End the request."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        self._finished = monotonic()
        if self._detokenizer is not None:
            self._detokenizer.finish()

    def _decode_one(self) -> Callable[[int], str] | None:
        tokenizer = self._tokenizer
        return None if tokenizer is None else lambda token: str(tokenizer.decode([token]))

    def output(self) -> RequestOutput:
        """The state as callers see it; a snapshot until the request has finished."""
        text = "" if self._detokenizer is None else self._detokenizer.stable_text
        wants_logprobs = self.params.logprobs is not None
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=list(self._token_ids),
            cumulative_logprob=self._cumulative if wants_logprobs else None,
            logprobs=list(self._logprobs) if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        wants_prompt = self.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            prompt_logprobs=list(self._prompt_logprobs) if wants_prompt else None,
            outputs=[completion],
            finished=self.finish_reason is not None,
            num_cached_tokens=self.request.num_cached_tokens,
            metrics=RequestMetrics(
                arrival_time=self._arrival,
                first_token_time=self._first_token,
                finished_time=self._finished,
                num_preemptions=self.request.num_preemptions,
            ),
        )
