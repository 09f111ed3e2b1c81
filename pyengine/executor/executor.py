"""A step on the device: the rows of its logits, the queue, the forward pass and the sampling."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from pyengine.cpu.threads import CallerThreads
from pyengine.kv_cache import StepPlan
from pyengine.sampling.logprobs import PendingLogprobs
from pyengine.sampling.sampler import Sampled, SamplingBatch, sample
from pyengine.sampling.state import SamplingState
from pyengine.sampling.token_masks import MaskFiller, TokenMasks
from pyengine.scheduler.batch import Entry, ScheduledStep
from pyengine.utils.device_arrays import device_of
from pyengine.utils.devices import CPU, Device, on_device
from pyengine.utils.host_copy import upload

if TYPE_CHECKING:
    from pyengine.engine.request import Request, SequenceState
    from pyengine.executor.model_runner import ModelRunner, Runner
    from pyengine.executor.mtp import DraftRow, MTPStep

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A chunk of a prompt with log-probabilities; its rows begin at `first_row`."""

    request: "Request"
    entry: Entry
    first_row: int

    @property
    def length(self) -> int:
        """The number of its positions that precede a token of the prompt."""
        last = min(self.entry.start + self.entry.num_tokens, len(self.request.prompt_token_ids) - 1)
        return max(0, last - self.entry.start)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The rows of these positions among the step's tokens."""
        return np.arange(self.first_row, self.first_row + self.length, dtype=np.int64)

    def num_logprobs(self, vocab_size: int) -> int:
        """The number of most probable tokens to find, at least one."""
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

    `counts[i]` is the number for the i-th one; `rejected` are the rows to ignore.
    """

    tokens: list[int]
    counts: list[int]
    rejected: set[int]


class InputBatch:
    """The sequences that a step samples for, row by row; reused while the same ones decode.

    A new prompt has a row for each of its sequences; `repeats` is the number of rows of each row of
    logits (None: one). `beginners` are the requests that get their first token. `decodes` are the
    sequences that this batch may serve again (None: no further step). A sequence that drafts has a
    row for its token and one after each draft; the latter are `ahead`. `streamed` rows are read
    token by token; tokens of others are buffered per step and flushed on demand.
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
        self._deferred = [row for row, each in enumerate(self.sequences) if not each.is_streamed]
        self._buffered: list[npt.NDArray[np.int64]] = []
        ends = {sequence.stop_ids for sequence in self.sequences if not sequence.is_streamed}
        self._stop_ids = sorted(frozenset().union(*ends))
        self._max_output = np.array(
            [sequence.max_output for sequence in self.sequences], dtype=np.int64
        )
        self._min_tokens = np.array([sequence.params.min_tokens for sequence in self.sequences])
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
        matcher = self.sampling.matchers.get(row)
        return drawn[row - 1] == draft and not (matcher is not None and matcher.error)

    def buffer(
        self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> "list[tuple[SequenceState, int]]":
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
            if is_last[row] and (
                token in sequence.stop_ids or positions[row] + 1 >= sequence.max_output
            ):
                ended.append((sequence, token))
            elif sequence.finish_reason is None:  # else it was aborted meanwhile
                sequence.token_ids.append(token)
        return ended

    def flush(self) -> None:
        """Append the buffered tokens to their sequences."""
        if self._buffered:
            tokens = np.stack(self._buffered, axis=1)
            self._buffered = []  # in this order an interrupt loses only tokens of aborted requests
            for row, several in zip(self._deferred, tokens[self._deferred].tolist(), strict=True):
                if self.sequences[row].finish_reason is None:  # else it was aborted meanwhile
                    self.sequences[row].token_ids += several

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
        return positions if self.repeats is None else positions.repeat(self.repeats)

    def repeated(self, logits: Any) -> Any:
        """The logits that each row draws from, if there are `repeats`."""
        assert self.repeats is not None
        rows = np.arange(len(self.repeats)).repeat(self.repeats)
        return logits[upload(rows, device_of(logits))]

    def own_tokens(self, token_ids: Any) -> Any:
        """The token of the first sequence of each row of logits: int64, on their device."""
        if self.repeats is None:
            return token_ids
        return token_ids[upload(self.repeats.cumsum() - self.repeats, device_of(token_ids))]


def _prompt_parts(step: ScheduledStep) -> list[PromptPart]:
    parts = []
    first_row = step.num_decoded
    for entry in step.chunks:
        request = entry.sequence.request
        if request.params.prompt_logprobs is not None:
            parts.append(PromptPart(request, entry, first_row))
        first_row += entry.num_tokens
    return parts


def _prompt_logprobs(parts: Sequence[PromptPart], logits: Any) -> PendingLogprobs:
    """Log-probabilities of the tokens after `parts`, by their logits `[E, V]`."""
    following = upload(np.concatenate([part.following for part in parts]), device_of(logits))
    top = [part.num_logprobs(logits.shape[1]) for part in parts for _ in range(part.length)]
    return PendingLogprobs(logits, following, top)


@dataclass(slots=True, eq=False)
class SubmittedStep:
    """A step in the device's queue, and its result.

    `positions[i]` is the position of the i-th row's token in its output.
    """

    step: ScheduledStep
    batch: InputBatch
    positions: npt.NDArray[np.int64]
    num_tokens: int
    """Tokens that it computes."""
    work: "Future[Sampled]"
    """Has the error of the step, if it failed."""
    sampled: Sampled = field(init=False)
    """The tokens, once they are on the host."""
    rejected: Collection[int] = ()
    """Rows after wrong drafts, once it is committed: they are ignored."""


def _compute(threads: CallerThreads, work: Callable[[], T]) -> T:
    """The result of `work`, with the threads of its caller."""
    threads.use()
    return work()


class Executor:
    """Runs the forward pass and the sampling of steps, in order.

    `depth` is the number of steps in the device's queue at a time, 1 or 2. With 2, a step decodes
    the tokens of the one before on the device. `device` is that of the runner's logits. Without a
    `thread`, steps run in the caller's thread, which on CUDA enqueues them. With one, the CPU
    computes a step while the caller plans the next.
    """

    def __init__(
        self,
        runner: "Runner",
        thread: ThreadPoolExecutor | None = None,
        *,
        depth: int = 1,
        device: Device = CPU,
    ) -> None:
        self.runner = runner
        self.depth = depth
        self._device = device
        self._on_device = on_device(device)
        self._thread = thread
        self._masks = MaskFiller()
        self._recent: list[InputBatch] = []
        """With overlap, sequences that wait for their tokens decode in every other step: two."""
        self._last: tuple[InputBatch, npt.NDArray[np.int64]] | None = None

    def submit(
        self, step: ScheduledStep, before: SubmittedStep | None, mtp: "MTPStep | None" = None
    ) -> SubmittedStep:
        """Enqueue a step, after `before` if that is still in the queue.

        Reads the plan now and does not wait. Errors of the device are in `SubmittedStep.work`.
        `mtp` is for a model that has MTP layers.
        """
        batch, positions = self._batch(step)
        parts = batch.prompt_parts
        extra = np.concatenate([part.rows for part in parts]) if parts else None
        forward = self.runner.prepare(step.plan, extra_rows=extra, mtp=mtp)
        masks: TokenMasks | None = None
        if batch.sampling.matchers:
            masks = TokenMasks(batch.sampling.matchers, batch.sampling.vocab_size, self._masks)
            if batch.sampling.draws is not None or self._device.type != "cpu":
                masks.begin()  # else `TokenMasks.largest` needs few of them

        def work() -> Sampled:
            known: Any = None
            if before is not None:
                token_ids = before.work.result().token_ids  # it was queued first: it has run
                known = before.batch.own_tokens(token_ids) if len(token_ids) else None
            logits = forward(known)
            # At once: the logits are large.
            of_prompts = _prompt_logprobs(parts, logits.extra) if parts else None
            rows = logits.sampling if batch.repeats is None else batch.repeated(logits.sampling)
            sampled = sample(rows, batch.sampling, positions, masks)
            sampled.pending_prompts = of_prompts
            return sampled

        return SubmittedStep(step, batch, positions, step.plan.num_tokens, self._enqueue(work))

    def _enqueue(self, work: Callable[[], T]) -> "Future[T]":
        """Run `work` after everything that was enqueued before. Its error is kept."""
        if self._thread is not None:
            return self._thread.submit(partial(_compute, CallerThreads.now(), work))
        future: Future[T] = Future()
        try:
            with self._on_device:
                result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        return future

    def _batch(self, step: ScheduledStep) -> tuple[InputBatch, npt.NDArray[np.int64]]:
        """The rows of a step's logits, and their positions: the same batch if the same decode.

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
            positions = batch.positions(step)
        self._last = batch, positions
        return self._last

    def forget_batches(self) -> None:
        """Drop the batches of the last steps: their sequences have ended."""
        self._recent, self._last = [], None

    def draft(self, plan: StepPlan, asked: "Sequence[DraftRow]") -> list[list[int]]:
        """Wait for the drafts of the model's MTP layers after these decodes of a plan."""
        return self.run(cast("ModelRunner", self.runner).prepare_drafts(plan, asked))

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` after the steps in the queue, and wait for its result."""
        return self._enqueue(work).result()
