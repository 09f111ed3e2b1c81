"""Who gets a token in a step, row by row, and which prompts want to see logits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from pyengine.sampling.batch import SamplingBatch
from pyengine.sampling.host import upload
from pyengine.sampling.logprobs import PendingPromptLogprobs, PromptRows, TokenLogprobs
from pyengine.sampling.state import SamplingState
from pyengine.scheduler.batch import Entry, ScheduledStep, SequenceState

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
    """What came of a step with drafts: the tokens of each sampling sequence, one sequence after the
    other.

    `counts[i]` is how many the i-th one got; `rejected` are the rows that count for nothing.
    """

    tokens: list[int]
    counts: list[int]
    rejected: set[int]


class Rows:
    """The sequences that a step's rows are for: worked out once for as long as the same ones
    decode.

    A new prompt's logits serve all of its sequences: it has a row for each of them, and `repeats`
    says how many rows each sequence has (None: one). `beginners` are the requests that get their
    first token. `decodes` are the sequences that these rows may serve again (None: no further
    step). A sequence that drafts has a row for its token and one behind each draft; the latter are
    `ahead`.

    Rows of sequences that are looked at token by token are `loud`. The tokens of the others are
    kept here, a column a step, until somebody wants to see them: `read`."""

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
        is_loud = [sequence.is_loud for sequence in self.sequences]
        self.loud = [row for row, loud in enumerate(is_loud) if loud]
        self._quiet = [row for row, loud in enumerate(is_loud) if not loud]
        self._unread: list[npt.NDArray[np.int64]] = []
        self._stop_ids = _all_stop_ids([self.sequences[row] for row in self._quiet])
        self._max_output = np.array(
            [sequence.max_output for sequence in self.sequences], dtype=np.int64
        )
        self._min_tokens = np.array([sequence.params.min_tokens for sequence in self.sequences])
        self._max_output[self.loud] = np.iinfo(np.int64).max  # they look for themselves

    def accept(self, drawn: Sequence[int]) -> Accepted:
        """Compare what each row drew with the draft behind it: as long as they agree, both stand.

        A row behind a draft that is right draws what it would have drawn without drafts: it has
        the same tokens before it, and the random number of its position. So what is accepted are
        the same tokens, seed by seed.
        """
        accepted = Accepted([], [], set())
        for first, drafts in self._spans:
            count = 1
            while count <= len(drafts) and self._stands(drawn, first + count, drafts[count - 1]):
                count += 1
            accepted.tokens.extend(drawn[first : first + count])
            accepted.counts.append(count)
            accepted.rejected.update(range(first + count, first + 1 + len(drafts)))
        return accepted

    def _stands(self, drawn: Sequence[int], row: int, draft: int) -> bool:
        """Whether the draft before a row is right, and the row has drawn a token."""
        matcher = self.sampling.matchers.get(row)
        return drawn[row - 1] == draft and not (matcher is not None and matcher.error)

    def keep(
        self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> list[tuple[int, int]]:
        """Keep a step's tokens; the quiet rows that they end, each with its token.

        All that was kept before has been read then.
        """
        is_last = positions + 1 >= self._max_output
        if len(self._stop_ids):
            is_stop = reduce(np.logical_or, [tokens == stop for stop in self._stop_ids])
            is_last |= is_stop & (positions >= self._min_tokens)
        if not is_last.any():
            self._unread.append(tokens)
            return []
        self.read()
        ended, going = [], []
        for row in self._quiet:
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

    def read(self) -> None:
        """Hand the tokens that were kept to their sequences."""
        if self._unread:
            tokens = np.stack(self._unread, axis=1)
            self._unread = []  # in this order an interrupt loses tokens of what is aborted for it
            for row, several in zip(self._quiet, tokens[self._quiet].tolist(), strict=True):
                self._extend(row, several)

    def _extend(self, row: int, tokens: list[int]) -> None:
        sequence = self.sequences[row]
        if sequence.finish_reason is None:  # else it was aborted meanwhile
            sequence.extend(tokens)


def _all_stop_ids(sequences: "list[SequenceState]") -> list[int]:
    distinct = {id(sequence.stop_ids): sequence.stop_ids for sequence in sequences}
    return sorted(frozenset().union(*distinct.values()))


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step.

    `positions[i]` is the place of the i-th row's token in its output; the tokens before it may
    not be known yet.
    """

    rows: Rows
    positions: npt.NDArray[np.int64]
    prompt_parts: list[PromptPart]

    @property
    def sequences(self) -> "list[SequenceState]":
        """One per sampled row."""
        return self.rows.sequences

    @property
    def sampling(self) -> SamplingBatch:
        """What the sampler needs to know of the rows."""
        return self.rows.sampling

    def rows_of(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits that each sample draws from."""
        repeats = self.rows.repeats
        if repeats is None:
            return logits
        return logits[upload(np.arange(len(repeats)).repeat(repeats), logits.device)]

    def own_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Of each row of logits the token of the first sequence: int64, where they are."""
        repeats = self.rows.repeats
        if repeats is None:
            return token_ids
        return token_ids[upload(repeats.cumsum() - repeats, token_ids.device)]

    def prompt_rows(self) -> npt.NDArray[np.int64] | None:
        """Rows among the step's tokens whose logits prompts have asked for: int64, or None."""
        rows = [part.rows for part in self.prompt_parts]
        return np.concatenate(rows) if rows else None

    def prompt_logprobs(self, logits: torch.Tensor) -> PendingPromptLogprobs:
        """What the logits `[E, V]` of `prompt_rows` say about the tokens after them."""
        parts = [
            PromptRows(part.following, part.num_logprobs(logits.shape[1]))
            for part in self.prompt_parts
        ]
        return PendingPromptLogprobs(logits, parts)

    def hand_out(self, logprobs: list[list[TokenLogprobs]]) -> None:
        """Give what came of `prompt_logprobs` to the requests that asked."""
        for part, found in zip(self.prompt_parts, logprobs, strict=True):
            part.request.append_prompt_logprobs(part.entry.start + 1, found)


class BatchMaker:
    """Makes the batch of each step, of the rows of an earlier one where the same sequences decode.

    With overlap, sequences that wait for their tokens decode in every other step: so two are kept.
    """

    def __init__(self) -> None:
        self._recent: list[Rows] = []
        self._last: Batch | None = None

    def batch(self, step: ScheduledStep) -> Batch:
        """Who is in the step, as of now: what is aborted while it runs is still part of it."""
        rows = None
        if not step.chunks and not step.drafts:
            same = [batch for batch in self._recent if batch.decodes is step.decodes]
            rows = same[0] if same else None
        if rows is None:
            rows = Rows(step)
            if rows.decodes is not None:
                self._recent = [rows, *self._recent[:1]]
        last = self._last
        if last is not None and last.rows is rows:  # everybody is one token further
            positions = last.positions + 1
        else:
            positions = _positions(step, rows)
        self._last = Batch(rows, positions, list(_prompt_parts(step)) if step.chunks else [])
        return self._last

    def forget(self) -> None:
        """Keep nothing: who was in the last steps has ended."""
        self._recent, self._last = [], None


def _positions(step: ScheduledStep, rows: Rows) -> npt.NDArray[np.int64]:
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
    return positions if rows.repeats is None else positions.repeat(rows.repeats)


def _prompt_parts(step: ScheduledStep) -> Iterator[PromptPart]:
    """The chunks of prompts that asked; a token that is decoded is never one of them."""
    first_row = step.num_decoded
    for entry in step.chunks:
        request = entry.request
        if request.params.prompt_logprobs is not None:
            yield PromptPart(request, entry, first_row)
        first_row += entry.num_tokens
