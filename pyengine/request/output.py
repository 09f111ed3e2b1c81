"""The output of a sequence: its tokens, its text, and how it ends."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.errors import HookError
from pyengine.outputs import CONTEXT_FULL, CompletionOutput, FinishReason, Logprob
from pyengine.request.detokenizer import IncrementalDetokenizer
from pyengine.request.token_bytes import TokenTexts, token_texts
from pyengine.sampling.logprobs import TokenLogprobs
from pyengine.sampling.state import SamplingState
from pyengine.sampling_params import SamplingParams, StopCondition
from pyengine.utils.callables import name_of
from pyengine.utils.validation import shown


class OutputRules:
    """The stop conditions of a request's sequences, and their detokenizer."""

    __slots__ = (
        *("eos_ids", "length_reason", "max_output", "params"),
        *("prompt_token_ids", "stop_ids", "tokenizer"),
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        max_output: int,
        eos_ids: frozenset[int] = frozenset(),
        tokenizer: Any = None,
    ) -> None:
        """`max_output` are the most output tokens of a sequence, which ends at `eos_ids`, too."""
        self.params, self.tokenizer = params, tokenizer
        self.prompt_token_ids = prompt_token_ids
        self.max_output, self.eos_ids = max_output, eos_ids
        self.stop_ids = eos_ids.union(params.stop_token_ids) if params.stop_token_ids else eos_ids
        """Tokens that end a sequence after `min_tokens`."""
        self.length_reason = None if params.max_tokens == max_output else CONTEXT_FULL
        """The stop reason of a sequence with `max_output` tokens."""

    def token_texts(self, *, skip_special_tokens: bool) -> TokenTexts | None:
        """The texts of single tokens; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return token_texts(self.tokenizer, skip_special_tokens=skip_special_tokens)


class SequenceOutput:
    """The output of one sequence. Tokens enter it by `append` and `extend` alone."""

    __slots__ = (
        *("_cumulative", "_detokenizer", "_drops_last", "_hidden", "_index", "_is_end_emitted"),
        *("_logprobs", "_num_decoded", "_num_taken", "finish_reason", "is_streamed", "rules"),
        *("sampling", "stop_reason", "token_ids", "weights_versions"),
    )

    def __init__(self, rules: OutputRules, index: int, sampling: SamplingState) -> None:
        """`index` is the position of the sequence among those of its request."""
        self.rules = rules
        self._index = index
        self.sampling = sampling
        self.token_ids: Sequence[int] = sampling.token_ids
        self.is_streamed = False
        """True if its tokens are appended one by one; those of other sequences are buffered.

        So it is if its sink streams, a stop string or `stop_when` may end it, tokens change later
        logits, and with drafts, log-probabilities or hidden states.
        """
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.weights_versions: tuple[tuple[int, int], ...] = ((0, 0),)
        """See `CompletionOutput`."""
        self._logprobs: list[dict[int, Logprob]] = []
        self._hidden: list[npt.NDArray[np.float32]] = []
        self._cumulative = 0.0
        self._detokenizer: IncrementalDetokenizer | None = None
        self._num_taken = self._num_decoded = 0
        self._is_end_emitted = self._drops_last = False

    def append(self, token: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Append the next token; True if it ends the sequence.

        With `max_tokens=0` the token that the last step of the prompt sampled is dropped. Raises
        `HookError` if `stop_when` fails; the token is appended then.
        """
        rules, params = self.rules, self.rules.params
        if not rules.max_output:
            self.finish("length")
            return True
        num_output = self.sampling.append(token)
        if logprobs is not None:
            self._cumulative += logprobs.logprob
            texts = rules.token_texts(skip_special_tokens=params.skip_special_tokens)
            self._logprobs.append(logprobs.as_dict(texts))
        is_stop = token in rules.stop_ids and num_output > params.min_tokens
        match = None
        if params.stop and (not is_stop or params.include_stop_str_in_output):
            match = self._text_to(num_output)
        if is_stop:
            self._drops_last = not params.include_stop_str_in_output
            self.finish("stop", None if token in rules.eos_ids else token)
        elif match is not None:
            self.finish("stop", match)
        elif (
            params.stop_when is not None
            and num_output > params.min_tokens
            and (reason := self._reason_to_stop(params.stop_when)) is not None
        ):
            self.finish("stop", reason)
        elif self.sampling.matcher is not None and self.sampling.matcher.is_finished:
            self.finish("stop")
        elif num_output >= rules.max_output:
            self.finish("length", rules.length_reason)
        return self.finish_reason is not None

    def add_hidden(self, state: npt.NDArray[np.float32] | None) -> None:
        """Add the hidden state `[hidden]` before the next token, if it is wanted."""
        if state is not None and self.rules.max_output:
            self._hidden.append(state)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens that neither end the sequence nor change later logits."""
        self.sampling.token_ids.extend(tokens)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the sequence."""
        self.finish_reason, self.stop_reason = reason, stop_reason

    def _reason_to_stop(self, stop_when: StopCondition) -> str | None:
        """Why `stop_when` ends the sequence after its last token; None if it goes on."""
        name = name_of(stop_when)
        self._text_to(len(self.token_ids))
        text = "" if self._detokenizer is None else self._detokenizer.stable_text
        try:
            answer = stop_when(list(self.token_ids), text)
            if answer is not None and not isinstance(answer, bool | str):
                raise TypeError(f"it returned {shown(answer)}: it must be True, False or a text")
        except Exception as error:
            raise HookError(
                f"stop_when={name} failed after {len(self.token_ids)} tokens: {error!r}"
            ) from error
        if not answer:
            return None
        return name if answer is True else answer

    def _text_to(self, num_tokens: int) -> str | None:
        """Extend the text to `num_tokens` tokens; return the stop string that ended it, if any.

        There is no text without a tokenizer or with `detokenize=False`.
        """
        rules, params = self.rules, self.rules.params
        if rules.tokenizer is None or not params.detokenize:
            return None
        if self._detokenizer is None:
            self._detokenizer = IncrementalDetokenizer(
                rules.tokenizer,
                prompt_token_ids=rules.prompt_token_ids,
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

    def snapshot(self) -> CompletionOutput:
        """The output so far."""
        text = self._text()
        return self._from(0, "" if text is None else text.stable_text)

    def take_delta(self) -> CompletionOutput | None:
        """The output since the last call; None if there is none."""
        first, end = self._num_taken, len(self.token_ids)
        if self._is_end_emitted or (first == end and self.finish_reason is None):
            return None
        self._is_end_emitted = self.finish_reason is not None
        self._num_taken = end
        text = self._text()
        return self._from(first, "" if text is None else text.take_new_text())

    def _from(self, first: int, text: str) -> CompletionOutput:
        """The output from a token on."""
        wants_logprobs = self.rules.params.logprobs is not None
        hidden = self._hidden[first:]
        return CompletionOutput(
            index=self._index,
            text=text,
            token_ids=self.sampling.token_ids[first:],
            cumulative_logprob=self._cumulative if wants_logprobs else None,
            logprobs=self._logprobs[first:] if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            weights_versions=self.weights_versions,
            hidden_states=np.stack(hidden) if hidden else None,
        )
