"""The rows of a step's logits, and how their tokens reach their sequences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
import numpy.typing as npt

from pyengine.engine.hidden_rows import HiddenRows
from pyengine.executor.executor import InputBatch, ModelStep, PromptRows
from pyengine.request.request import Request, SequenceState
from pyengine.sampling.sampler import Sampled
from pyengine.sampling.state import SamplingState
from pyengine.scheduler.batch import Entry, ScheduledStep


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A chunk of a prompt with log-probabilities, and its rows among the step's tokens."""

    request: Request
    start: int
    rows: PromptRows


@dataclass(frozen=True, slots=True)
class Accepted:
    """The accepted tokens of a step with drafts, one sampling sequence after the other.

    `counts[i]` is the number for the i-th one; `rejected` are the rows to ignore.
    """

    tokens: list[int]
    counts: list[int]
    rejected: set[int]


class StepRows:
    """The sequences that a step samples for, row by row; reused while the same ones decode.

    A new prompt has a row for each of its sequences. `beginners` are the requests that get their
    first token. `decodes` are the sequences that these rows may serve again (None: no further
    step). A sequence that drafts has a row for its token and one after each draft; the latter are
    `ahead`. `streamed` rows are read token by token; tokens of others are buffered per step and
    flushed on demand.
    """

    def __init__(self, step: ScheduledStep) -> None:
        self.sequences: list[SequenceState] = []
        self.beginners: list[Request] = []
        self.drafts: Mapping[SequenceState, Sequence[int]] = step.drafts
        self.ahead: set[int] = set()
        self.prompt_parts = _prompt_parts(step) if step.num_bounded else []
        """The chunks of prompts with log-probabilities: they have a bound."""
        self._spans: list[tuple[int, Sequence[int]]] = []  # each sequence's first row and drafts
        states: list[SamplingState] = []
        counts: list[int] = []
        for sequence in step.sampling_sequences:
            drafts = self.drafts.get(sequence, ())
            self._spans.append((len(self.sequences), drafts))
            if drafts:
                first = len(self.sequences) + 1
                self.ahead.update(range(first, first + len(drafts)))
                self.sequences += [sequence] * (1 + len(drafts))
                states += sequence.output.sampling.ahead(drafts)
                counts += [1] * (1 + len(drafts))
            elif sequence.num_tokens - 1 > len(sequence.request.prompt_token_ids):
                self.sequences.append(sequence)
                states.append(sequence.output.sampling)
                counts.append(1)
            else:
                siblings = sequence.request.sequences
                self.sequences += siblings
                states += [sibling.output.sampling for sibling in siblings]
                counts.append(len(siblings))
                self.beginners.append(sequence.request)
        self.hidden: HiddenRows | None = None
        """The tokens whose hidden states are wanted; None: none are."""
        if any([sequence.request.wants_hidden for sequence in step.sequences]):
            firsts = [*[first for first, _ in self._spans], len(self.sequences)]
            self.hidden = HiddenRows(step, firsts)
        is_once = bool(step.chunks or self.beginners or self.drafts)
        self.decodes = None if is_once else step.decodes
        prompts = [part.rows for part in self.prompt_parts]
        hidden_rows = None if self.hidden is None else self.hidden.tokens
        self.batch = InputBatch(states, counts, prompts, hidden_rows)
        outputs = [sequence.output for sequence in self.sequences]
        self.streamed = [row for row, output in enumerate(outputs) if output.is_streamed]
        self._deferred = [row for row, output in enumerate(outputs) if not output.is_streamed]
        self._buffered: list[npt.NDArray[np.int64]] = []
        ends = {outputs[row].rules.stop_ids for row in self._deferred}
        self._stop_ids = sorted(frozenset().union(*ends))
        self._max_output = np.array([output.rules.max_output for output in outputs], dtype=np.int64)
        self._min_tokens = np.array([output.rules.params.min_tokens for output in outputs])
        self._max_output[self.streamed] = np.iinfo(np.int64).max  # `append` finds their ends

    def accept(self, drawn: Sequence[int]) -> Accepted:
        """Accept drafts for as long as each row drew the draft after it.

        A row after a correct draft has the tokens before it and the random number of its position,
        as without drafts: the accepted tokens are the same, seed by seed.
        """
        accepted = Accepted([], [], set())
        for first, drafts in self._spans:
            count = 1
            while count <= len(drafts) and self._is_right(drawn, first + count, drafts[count - 1]):
                count += 1
            accepted.tokens.extend(drawn[first : first + count])
            accepted.counts.append(count)
            accepted.rejected.update(range(first + count, first + 1 + len(drafts)))
        return accepted

    def _is_right(self, drawn: Sequence[int], row: int, draft: int) -> bool:
        """True if the draft before a row is correct, and the row has drawn a token."""
        matcher = self.batch.sampling.matchers.get(row)
        return drawn[row - 1] == draft and not (matcher is not None and matcher.error)

    def buffer(
        self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> list[tuple[SequenceState, int]]:
        """Buffer a step's tokens; return the deferred sequences that they end, with their tokens.

        If a sequence ends, earlier tokens are flushed.
        """
        is_last = positions + 1 >= self._max_output
        if len(self._stop_ids):
            is_stop = reduce(np.logical_or, [tokens == stop for stop in self._stop_ids])
            is_last |= is_stop & (positions >= self._min_tokens)
        if not is_last.any():
            self._buffered.append(tokens)
            return []
        self.flush()
        ended = []
        for row in self._deferred:
            sequence, token = self.sequences[row], int(tokens[row])
            output = sequence.output
            if is_last[row] and (
                token in output.rules.stop_ids or positions[row] + 1 >= output.rules.max_output
            ):
                ended.append((sequence, token))
            elif output.finish_reason is None:  # else it was aborted meanwhile
                output.extend([token])
        return ended

    def flush(self) -> None:
        """Append the buffered tokens to their sequences."""
        if self._buffered:
            tokens = np.stack(self._buffered, axis=1)
            self._buffered = []  # in this order an interrupt loses only tokens of aborted requests
            for row, several in zip(self._deferred, tokens[self._deferred].tolist(), strict=True):
                output = self.sequences[row].output
                if output.finish_reason is None:  # else it was aborted meanwhile
                    output.extend(several)

    def positions(self, step: ScheduledStep) -> npt.NDArray[np.int64]:
        """The position of each row's token in its output: int64."""
        firsts = [
            (
                sequence.num_tokens - 1 - len(sequence.request.prompt_token_ids),
                len(step.drafts.get(sequence, ())),
            )
            for sequence in step.sampling_sequences
        ]
        positions = np.array(
            [first + at for first, drafts in firsts for at in range(1 + drafts)], dtype=np.int64
        )
        repeats = self.batch.repeats
        return positions if repeats is None else positions.repeat(repeats)


def _prompt_parts(step: ScheduledStep) -> list[PromptPart]:
    parts = []
    first_row = step.num_decoded
    for entry in step.chunks:
        if entry.sequence.request.params.prompt_logprobs is not None:
            parts.append(_prompt_part(entry, first_row))
        first_row += entry.num_tokens
    return parts


def _prompt_part(entry: Entry, first_row: int) -> PromptPart:
    """The positions of a chunk that precede a token of the prompt."""
    request, start = entry.sequence.request, entry.start
    last = min(start + entry.num_tokens, len(request.prompt_token_ids) - 1)
    num_rows = max(0, last - start)
    following = request.prompt_token_ids[start + 1 : start + 1 + num_rows]
    vocab_size = entry.sequence.output.sampling.vocab_size
    rows = PromptRows(
        np.arange(first_row, first_row + num_rows, dtype=np.int64),
        np.asarray(following, dtype=np.int64),
        request.params.num_prompt_logprobs(vocab_size) or 1,
    )
    return PromptPart(request, start, rows)


@dataclass(slots=True, eq=False)
class SubmittedStep:
    """A step in the device's queue, and its result."""

    step: ScheduledStep
    rows: StepRows
    model_step: ModelStep
    num_tokens: int
    """Tokens that it computes."""
    sampled: Sampled = field(init=False)
    """The tokens, once they are on the host."""
    rejected: frozenset[int] | set[int] = frozenset()
    """Rows after wrong drafts, once it is committed: they are ignored."""


class RecentRows:
    """The rows of the last steps: reused while the same sequences decode."""

    def __init__(self) -> None:
        self._recent: list[StepRows] = []
        """With overlap, sequences that wait for their tokens decode in every other step: two."""
        self._last: tuple[StepRows, npt.NDArray[np.int64]] | None = None

    def of(self, step: ScheduledStep) -> tuple[StepRows, npt.NDArray[np.int64]]:
        """The rows of a step, and the positions of their tokens in the outputs.

        Sequences that are aborted while the step runs are still part of it.
        """
        rows = None
        if not step.chunks and not step.drafts:
            rows = next((recent for recent in self._recent if recent.decodes is step.decodes), None)
        if rows is None:
            rows = StepRows(step)
            if rows.decodes is not None:
                self._recent = [rows, *self._recent[:1]]
        if self._last is not None and self._last[0] is rows:  # each row is one token further
            positions = self._last[1] + 1
        else:
            positions = rows.positions(step)
        self._last = rows, positions
        return self._last

    def forget(self) -> None:
        """Drop the rows: their sequences have ended, or a step was undone."""
        self._recent, self._last = [], None
