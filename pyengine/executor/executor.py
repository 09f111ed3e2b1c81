"""The executor: runs the forward pass and the sampling of steps on the device, in order."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from pyengine.attention.paged import on_device
from pyengine.errors import ConfigurationError
from pyengine.executor.input_batch import (
    BatchCache,
    InputBatch,
    PromptPart,
    prompt_logprobs,
    prompt_parts,
    prompt_rows,
)
from pyengine.kv_cache import StepPlan
from pyengine.sampling.logprobs import PendingPromptLogprobs, TokenLogprobs
from pyengine.sampling.sampler import PendingSample, Sampled, Sampler
from pyengine.sampling.token_masks import MaskFiller
from pyengine.scheduler.batch import ScheduledStep

if TYPE_CHECKING:
    from pyengine.executor.model_runner import DraftRow, MTPRunner, MTPStep, Runner

T = TypeVar("T")


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

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """See `DeviceQueue.submit`."""
        future: Future[T] = Future()
        try:
            with on_device(self._device):
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


_CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)
class SubmittedStep:
    """A step in the device's queue, and its result.

    `positions[i]` is the position of the i-th row's token in its output.
    """

    step: ScheduledStep
    batch: InputBatch
    positions: npt.NDArray[np.int64]
    prompt_parts: list[PromptPart]
    work: "Future[tuple[PendingSample, PendingPromptLogprobs]]"
    sampled: Sampled = field(init=False)
    prompt_logprobs: list[list[TokenLogprobs]] = field(init=False)
    rejected: Collection[int] = ()
    """Rows after wrong drafts, once it is committed: they are ignored."""

    def wait(self) -> None:
        """Wait for the tokens. Raises the error of the step."""
        pending, of_prompts = self.work.result()
        self.sampled, self.prompt_logprobs = pending.result(), of_prompts.result()


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
        self.batches = BatchCache()

    def submit(
        self, step: ScheduledStep, before: SubmittedStep | None, mtp: "MTPStep | None" = None
    ) -> SubmittedStep:
        """Enqueue a step, after `before` if that is still in the queue.

        Reads the plan now and does not wait. `SubmittedStep.wait` raises errors of the device.
        `mtp` is for a model that has MTP layers.
        """
        batch, positions = self.batches.batch(step)
        parts = prompt_parts(step) if step.chunks else []
        extra = prompt_rows(parts)
        if mtp is None:
            forward = self.runner.prepare(step.plan, extra_rows=extra)
        else:
            runner = cast("MTPRunner", self.runner)
            forward = runner.prepare(step.plan, extra_rows=extra, mtp=mtp)
        masks = self._masks.masks(batch.sampling.matchers, batch.sampling.vocab_size)
        if masks is not None and (batch.sampling.draws is not None or self._device.type != "cpu"):
            masks.begin()  # else `TokenMasks.largest` needs few of them

        def work() -> tuple[PendingSample, PendingPromptLogprobs]:
            known: torch.Tensor | None = None
            if before is not None:
                sampled, _ = before.work.result()  # it was queued first: it has run
                known = (
                    before.batch.own_tokens(sampled.token_ids) if len(sampled.token_ids) else None
                )
            logits = forward(known)
            of_prompts = prompt_logprobs(parts, logits.extra)  # at once: the logits are large
            rows = batch.rows_of(logits.sampling)
            pending = self._sampler.launch(rows, batch.sampling, positions, masks)
            return pending, of_prompts

        return SubmittedStep(step, batch, positions, parts, self._queue.submit(work))

    def draft(self, plan: StepPlan, asked: "Sequence[DraftRow]") -> list[list[int]]:
        """Wait for the drafts of the model's MTP layers after these decodes of a plan."""
        return self.run(cast("MTPRunner", self.runner).prepare_drafts(plan, asked))

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` after the steps in the queue, and wait for its result."""
        return self._queue.submit(work).result()
