"""The tokens of computed steps on their way into requests, and outputs on their way to sinks."""

import logging
from dataclasses import dataclass
from itertools import islice
from time import monotonic

from pyengine.engine.step_rows import StepRows, SubmittedStep
from pyengine.errors import BrokenLogitsError, HookError, RequestFailedError, StructuredOutputError
from pyengine.request.request import Request, SequenceState, requests_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Appended:
    """The result of appending a step's tokens."""

    ended: list[SequenceState]
    """Sequences that they end."""
    begun: list[Request]
    """Requests that got their first token, if they want any; not those that were aborted."""
    num_new_tokens: int
    num_drafted: int
    """New tokens beyond one for each sequence: accepted drafts."""
    failed: dict[Request, HookError]
    """Requests whose `stop_when` has failed."""


class OutputProcessor:
    """Appends the tokens of steps to sequences, and gives deltas and last outputs to sinks."""

    def __init__(self, *, reads_each_token: bool) -> None:
        """With `reads_each_token` those of requests with `speculate` are never buffered."""
        self._reads_each_token = reads_each_token
        self._unread: StepRows | None = None
        """The rows with buffered tokens of the last steps."""

    def begin(self, request: Request) -> None:
        """Choose whether the tokens of a request are appended one by one."""
        params, sink = request.params, request.sink
        for sequence in request.sequences:
            sequence.output.is_streamed = bool(
                (sink is not None and sink.streams)
                or params.stop
                or params.logprobs is not None
                or params.return_hidden_states is not None
                or sequence.waits_for_tokens
                or (self._reads_each_token and params.may_speculate)
                or params.stop_when is not None
            )

    def append(self, submitted: SubmittedStep) -> Appended:
        """Append the tokens of a committed step, and the results of its prompts."""
        rows, sampled = submitted.rows, submitted.sampled
        of_prompts = iter(sampled.prompt_logprobs)
        for part in rows.prompt_parts:
            logprobs = list(islice(of_prompts, len(part.rows.rows)))
            part.request.append_prompt_logprobs(part.start + 1, logprobs)
        if rows.hidden is not None and sampled.hidden is not None:
            rows.hidden.deliver(sampled.hidden)
        tokens = sampled.token_ids
        if self._unread is not rows:
            self.flush()
            self._unread = rows
        ending = rows.buffer(tokens, submitted.model_step.positions)
        ended = [
            sequence
            for sequence, token in ending
            if sequence.output.finish_reason is None and sequence.output.append(token)
        ]
        failed: dict[Request, HookError] = {}
        num_drafted = self._append_streamed(submitted, ended, failed) if rows.streamed else 0
        begun = [
            request
            for request in rows.beginners
            if not request.is_finished or request.sequences[0] in ended
        ]
        without_output = [
            len(request.sequences) for request in rows.beginners if not request.rules.max_output
        ]
        num_new = len(tokens) - len(rows.ahead) - sum(without_output) + num_drafted
        return Appended(ended, begun, num_new, num_drafted, failed)

    def _append_streamed(
        self,
        submitted: SubmittedStep,
        ended: list[SequenceState],
        failed: dict[Request, HookError],
    ) -> int:
        """Append the tokens of streamed rows; returns the number of drafts.

        Extends `ended`, and `failed`.
        """
        rows, sampled, num_drafted = submitted.rows, submitted.sampled, 0
        tokens, logprobs = sampled.token_ids.tolist(), sampled.logprobs
        for row in rows.streamed:
            if row in submitted.rejected:
                continue
            sequence = rows.sequences[row]
            output = sequence.output
            if output.finish_reason is None:  # else it was aborted or has ended in this step
                num_drafted += row in rows.ahead
                if rows.hidden is not None:
                    output.add_hidden(rows.hidden.of_row(row, sampled.hidden))
                try:
                    if output.append(tokens[row], logprobs[row]):
                        ended.append(sequence)
                except HookError as error:
                    failed[sequence.request] = error
        return num_drafted

    def flush(self) -> None:
        """Append the tokens that the last rows have buffered."""
        if self._unread is not None:
            self._unread.flush()

    def forget(self) -> None:
        """Drop the last rows: no request is left."""
        self._unread = None

    def emit(self, rows: StepRows) -> None:
        """Give the deltas of a step to the sinks of streams."""
        for request in requests_of([rows.sequences[row] for row in rows.streamed]):
            if request.sink is not None and request.sink.streams:
                delta = request.take_delta()
                if delta is not None:
                    request.sink.put(delta)

    def end(self, request: Request, error: Exception | None = None) -> None:
        """Give the last output of a finished request to its sink, or the error that ended it."""
        result, sink = request.result, request.sink
        result.finished_time = monotonic()
        if error is not None:
            result.error = f"{type(error).__name__}: {error}"
            _log.warning("request %r failed: %r", request.request_id, error)
            request.sink = None
            if sink is not None:
                sink.fail(_failure(request, error))
        elif sink is not None:
            output = request.take_delta() if sink.streams else request.output()
            if output is not None:
                sink.put(output)


def _failure(request: Request, error: Exception) -> RequestFailedError:
    """The error for the caller of a request that cannot be served."""
    kind = RequestFailedError
    if isinstance(error, StructuredOutputError | HookError):
        kind = type(error)
    message = f"request {request.request_id!r} failed: {request.result.error}"
    failure = kind(message, [request.output()])
    failure.__cause__ = error
    return failure


def lost_grammars(rows: StepRows) -> dict[Request, str]:
    """The requests of a step whose grammars have failed, and why."""
    return {
        rows.sequences[row].request: matcher.error
        for row, matcher in rows.batch.sampling.matchers.items()
        if matcher.error
        and row not in rows.ahead
        and rows.sequences[row].output.finish_reason is None
    }


def failed_processors(rows: StepRows) -> dict[Request, HookError]:
    """The requests of a step whose logits processors have failed, and why."""
    return {
        rows.sequences[row].request: processors.error
        for row, processors in rows.batch.sampling.processors.items()
        if processors.error is not None and rows.sequences[row].output.finish_reason is None
    }


def without_choice(request: Request, error: BrokenLogitsError) -> Exception:
    """The error for a request without a token to choose."""
    processors = request.sequences[0].output.sampling.processors
    if processors is not None:
        return HookError(f"after the logits processors {processors.names}, {error}")
    has_grammar = request.params.structured_outputs is not None
    return StructuredOutputError(str(error)) if has_grammar else error
