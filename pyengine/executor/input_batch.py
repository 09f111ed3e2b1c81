"""The rows of logits of a step: which sequences draw from them, and which prompts read them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from pyengine.sampling.batch import SamplingBatch
from pyengine.sampling.logprobs import PendingPromptLogprobs, PromptRows
from pyengine.sampling.state import SamplingState
from pyengine.scheduler.batch import Entry, ScheduledStep
from pyengine.utils.host_copy import upload

if TYPE_CHECKING:
    from pyengine.engine.request import Request, SequenceState


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A chunk of a prompt that wants log-probabilities; its rows begin at `first_row`."""

    request: "Request"
    entry: Entry
    first_row: int

    @property
    def length(self) -> int:
        """How many of its positions have a token of the prompt after them."""
        last = min(self.entry.end, len(self.request.prompt_token_ids) - 1)
        return max(0, last - self.entry.start)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The rows of these positions among the step's tokens."""
        return np.arange(self.first_row, self.first_row + self.length, dtype=np.int64)

    def num_logprobs(self, vocab_size: int) -> int:
        """How many of the most probable tokens are looked for: one at least, which is kept."""
        return self.request.params.num_prompt_logprobs(vocab_size) or 1

    @property
    def following(self) -> npt.NDArray[np.int64]:
        """The tokens after these positions."""
        first = self.entry.start + 1
        ids = self.request.prompt_token_ids[first : first + self.length]
        return np.asarray(ids, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The accepted tokens of a step with drafts, one sampling sequence after the other.

    `counts[i]` is how many the i-th one got; `rejected` are the rows that count for nothing.
    """

    tokens: list[int]
    counts: list[int]
    rejected: set[int]


class InputBatch:
    """The sequences that a step samples for, row by row; the same object while the same decode.

    A new prompt's logits serve all of its sequences: it has a row for each of them, and `repeats`
    says how many rows each sequence has (None: one). `beginners` are the requests that get their
    first token. `decodes` are the sequences that this batch may serve again (None: no further
    step). A sequence that drafts has a row for its token and one after each draft; the latter are
    `ahead`.

    `streamed` rows are read token by token. Tokens of other rows are buffered per step and flushed
    on demand.
    """

    def __init__(self, step: ScheduledStep) -> None:
        self.sequences: list[SequenceState] = []
        self.beginners: list[Request] = []
        self.drafts: Mapping[SequenceState, Sequence[int]] = step.drafts
        self.ahead: set[int] = set()
        self._spans: list[tuple[int, Sequence[int]]] = []
        """Of each sequence the first row, and its drafts."""
        states: list[SamplingState] = []
        counts: list[int] = []
        for sequence in step.sampling_sequences:
            drafts = self.drafts.get(sequence, ())
            self._spans.append((len(self.sequences), drafts))
            if drafts:
                first = len(self.sequences) + 1
                self.ahead.update(range(first, first + len(drafts)))
                self.sequences += [sequence] * (1 + len(drafts))
                states += sequence.sampling.ahead(drafts)
                counts += [1] * (1 + len(drafts))
            elif sequence.num_tokens - 1 > len(sequence.request.prompt_token_ids):
                self.sequences.append(sequence)
                states.append(sequence.sampling)
                counts.append(1)
            else:
                self.sequences += sequence.request.sequences
                states += [sequence.sampling for sequence in sequence.request.sequences]
                counts.append(len(sequence.request.sequences))
                self.beginners.append(sequence.request)
        is_repeated = len(counts) != len(self.sequences)
        self.repeats = np.array(counts, dtype=np.int64) if is_repeated else None
        is_once = bool(step.chunks or self.beginners or self.drafts)
        self.decodes = None if is_once else step.decodes
        self.sampling = SamplingBatch(states)
        self.streamed = [row for row, each in enumerate(self.sequences) if each.is_streamed]
        streamed = set(self.streamed)
        self._deferred = [row for row in range(len(self.sequences)) if row not in streamed]
        self._buffered: list[npt.NDArray[np.int64]] = []
        self._stop_ids = _all_stop_ids([self.sequences[row] for row in self._deferred])
        self._max_output = np.array(
            [sequence.max_output for sequence in self.sequences], dtype=np.int64
        )
        self._min_tokens = np.array([sequence.params.min_tokens for sequence in self.sequences])
        self._max_output[self.streamed] = np.iinfo(np.int64).max  # `append` finds their ends

    def accept(self, drawn: Sequence[int]) -> Accepted:
        """Accept drafts for as long as each row drew the draft after it.

        A row after a draft that is right draws what it would have drawn without drafts: it has
        the same tokens before it, and the random number of its position. So what is accepted are
        the same tokens, seed by seed.
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
        """Whether the draft before a row is right, and the row has drawn a token."""
        matcher = self.sampling.matchers.get(row)
        return drawn[row - 1] == draft and not (matcher is not None and matcher.error)

    def buffer(
        self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> list[tuple[int, int]]:
        """Buffer a step's tokens; the deferred rows that they end, each with its token.

        Tokens buffered before are flushed then.
        """
        is_last = positions + 1 >= self._max_output
        if len(self._stop_ids):
            is_stop = reduce(np.logical_or, [tokens == stop for stop in self._stop_ids])
            is_last |= is_stop & (positions >= self._min_tokens)
        if not is_last.any():
            self._buffered.append(tokens)
            return []
        self.flush()
        ended, going = [], []
        for row in self._deferred:
            sequence, token = self.sequences[row], int(tokens[row])
            if is_last[row] and (
                token in sequence.stop_ids or positions[row] + 1 >= sequence.max_output
            ):
                ended.append((row, token))
            else:
                going.append(row)
        for row in going:
            self._extend(row, [int(tokens[row])])
        return ended

    def flush(self) -> None:
        """Append the buffered tokens to their sequences."""
        if self._buffered:
            tokens = np.stack(self._buffered, axis=1)
            self._buffered = []  # in this order an interrupt loses tokens of what is aborted for it
            for row, several in zip(self._deferred, tokens[self._deferred].tolist(), strict=True):
                self._extend(row, several)

    def rows_of(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits that each row draws from."""
        if self.repeats is None:
            return logits
        rows = np.arange(len(self.repeats)).repeat(self.repeats)
        return logits[upload(rows, logits.device)]

    def own_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Of each row of logits the token of the first sequence: int64, where they are."""
        if self.repeats is None:
            return token_ids
        return token_ids[upload(self.repeats.cumsum() - self.repeats, token_ids.device)]

    def _extend(self, row: int, tokens: list[int]) -> None:
        sequence = self.sequences[row]
        if sequence.finish_reason is None:  # else it was aborted meanwhile
            sequence.extend(tokens)


def _all_stop_ids(sequences: "list[SequenceState]") -> list[int]:
    distinct = {id(sequence.stop_ids): sequence.stop_ids for sequence in sequences}
    return sorted(frozenset().union(*distinct.values()))


class BatchCache:
    """The batch of each step: an earlier one where the same sequences decode.

    With overlap, sequences that wait for their tokens decode in every other step: so two are kept.
    """

    def __init__(self) -> None:
        self._recent: list[InputBatch] = []
        self._last: tuple[InputBatch, npt.NDArray[np.int64]] | None = None

    def batch(self, step: ScheduledStep) -> tuple[InputBatch, npt.NDArray[np.int64]]:
        """The rows of a step, and the position in its output of the token that each row draws.

        Sequences that are aborted while the step runs are still part of it.
        """
        batch = None
        if not step.chunks and not step.drafts:
            batch = next((each for each in self._recent if each.decodes is step.decodes), None)
        if batch is None:
            batch = InputBatch(step)
            if batch.decodes is not None:
                self._recent = [batch, *self._recent[:1]]
        if self._last is not None and self._last[0] is batch:  # each row is one token further
            positions = self._last[1] + 1
        else:
            positions = _positions(step, batch)
        self._last = batch, positions
        return self._last

    def clear(self) -> None:
        """Keep nothing: the sequences of the last steps have ended."""
        self._recent, self._last = [], None


def _positions(step: ScheduledStep, batch: InputBatch) -> npt.NDArray[np.int64]:
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
    return positions if batch.repeats is None else positions.repeat(batch.repeats)


def prompt_parts(step: ScheduledStep) -> list[PromptPart]:
    """The chunks of a step's prompts whose log-probabilities are asked for."""
    parts = []
    first_row = step.num_decoded
    for entry in step.chunks:
        if entry.request.params.prompt_logprobs is not None:
            parts.append(PromptPart(entry.request, entry, first_row))
        first_row += entry.num_tokens
    return parts


def prompt_rows(parts: Sequence[PromptPart]) -> npt.NDArray[np.int64] | None:
    """Rows among the step's tokens whose logits prompts have asked for: int64, or None."""
    return np.concatenate([part.rows for part in parts]) if parts else None


def prompt_logprobs(parts: Sequence[PromptPart], logits: torch.Tensor) -> PendingPromptLogprobs:
    """Log-probabilities, by the logits `[E, V]` of `prompt_rows`, of the tokens after them."""
    rows = [PromptRows(part.following, part.num_logprobs(logits.shape[1])) for part in parts]
    return PendingPromptLogprobs(logits, rows)
