"""The executor: runs the forward pass and the sampling of steps on the device, in order."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from pyengine.errors import ConfigurationError
from pyengine.executor.input_batch import InputBatch, prompt_logprobs
from pyengine.kv_cache import StepPlan
from pyengine.sampling.logprobs import PendingPromptLogprobs, TokenLogprobs
from pyengine.sampling.sampler import Sampled, Sampler
from pyengine.sampling.token_masks import MaskFiller, TokenMasks
from pyengine.scheduler.batch import ScheduledStep

if TYPE_CHECKING:
    from pyengine.executor.model_runner import DraftRow, MTPRunner, MTPStep, Runner

T = TypeVar("T")

_CPU = torch.device("cpu")


class DeviceQueue(Protocol):
    """The queue of a device."""

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Run `work` after everything that was submitted before. Its error is kept."""
        ...


class InlineQueue:
    """Runs work at once, in the caller's thread.

    For the CPU without overlap, and for CUDA, where running it enqueues it in the stream of
    `device`, which is made the current device of the thread.
    """

    def __init__(self, device: torch.device = _CPU) -> None:
        self._is_cuda = device.type == "cuda"
        self._device = device

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """See `DeviceQueue.submit`."""
        future: Future[T] = Future()
        try:
            if self._is_cuda:
                with torch.cuda.device(self._device):
                    result = work()
            else:
                result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        return future


class ThreadQueue:
    """Runs work in a separate thread: the CPU computes while the caller plans the next step."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="pyengine-device")

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """See `DeviceQueue.submit`."""
        return self._executor.submit(work)


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
    work: "Future[tuple[Sampled, PendingPromptLogprobs | None]]"
    sampled: Sampled = field(init=False)
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    """One list for each of the batch's `prompt_parts`."""
    rejected: Collection[int] = ()
    """Rows after wrong drafts, once it is committed: they are ignored."""

    def wait(self) -> None:
        """Wait for the tokens. Raises the error of the step."""
        self.sampled, of_prompts = self.work.result()
        self.sampled.wait()
        if of_prompts is not None:
            self.prompt_logprobs = of_prompts.result()


class Executor:
    """A runner, a sampler, and the queue in which both run.

    `depth` is the number of steps in it at a time. With 2, a step decodes the tokens of the one
    before while those are still on the device; they are fed forward there. `device` is that of the
    runner's logits.
    """

    def __init__(
        self,
        runner: "Runner",
        queue: DeviceQueue | None = None,
        *,
        depth: int = 1,
        device: torch.device = _CPU,
    ) -> None:
        if depth not in (1, 2):
            raise ConfigurationError(
                f"depth={depth}: one step runs at a time (1), or a second one waits after it (2)"
            )
        self.runner = runner
        self.depth = depth
        self._device = device
        self._queue = queue or InlineQueue()
        self._sampler = Sampler()
        self._masks = MaskFiller()
        self._recent: list[InputBatch] = []
        """With overlap, sequences that wait for their tokens decode in every other step: two."""
        self._last: tuple[InputBatch, npt.NDArray[np.int64]] | None = None

    def submit(
        self, step: ScheduledStep, before: SubmittedStep | None, mtp: "MTPStep | None" = None
    ) -> SubmittedStep:
        """Enqueue a step, after `before` if that is still in the queue.

        Reads the plan now and does not wait. `SubmittedStep.wait` raises errors of the device.
        `mtp` is for a model that has MTP layers.
        """
        batch, positions = self._batch(step)
        parts = batch.prompt_parts
        extra = np.concatenate([part.rows for part in parts]) if parts else None
        if mtp is None:
            forward = self.runner.prepare(step.plan, extra_rows=extra)
        else:
            runner = cast("MTPRunner", self.runner)
            forward = runner.prepare(step.plan, extra_rows=extra, mtp=mtp)
        masks: TokenMasks | None = None
        if batch.sampling.matchers:
            masks = TokenMasks(batch.sampling.matchers, batch.sampling.vocab_size, self._masks)
            if batch.sampling.draws is not None or self._device.type != "cpu":
                masks.begin()  # else `TokenMasks.largest` needs few of them

        def work() -> tuple[Sampled, PendingPromptLogprobs | None]:
            known: torch.Tensor | None = None
            if before is not None:
                sampled, _ = before.work.result()  # it was queued first: it has run
                known = (
                    before.batch.own_tokens(sampled.token_ids) if len(sampled.token_ids) else None
                )
            logits = forward(known)
            # At once: the logits are large.
            of_prompts = prompt_logprobs(parts, logits.extra) if parts else None
            rows = logits.sampling if batch.repeats is None else batch.repeated(logits.sampling)
            return self._sampler.launch(rows, batch.sampling, positions, masks), of_prompts

        num_tokens = step.plan.num_tokens
        return SubmittedStep(step, batch, positions, num_tokens, self._queue.submit(work))

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
        return self.run(cast("MTPRunner", self.runner).prepare_drafts(plan, asked))

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` after the steps in the queue, and wait for its result."""
        return self._queue.submit(work).result()
