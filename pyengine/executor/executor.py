"""Steps on their way through the device: forward pass and sampling, in order."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast

import torch

from pyengine.attention.paged import on_device
from pyengine.errors import ConfigurationError
from pyengine.executor.input_batch import Batch
from pyengine.executor.interface import DraftRow, MTPRunner, MTPStep, Runner
from pyengine.kv_cache import StepPlan
from pyengine.sampling.logprobs import PendingPromptLogprobs, TokenLogprobs
from pyengine.sampling.sampler import PendingSample, Sampled, Sampler
from pyengine.sampling.token_masks import MaskFiller
from pyengine.scheduler.batch import ScheduledStep

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Work(Protocol[T_co]):
    """Something that was submitted, and what has come of it."""

    def result(self) -> T_co:
        """Wait; return what the work returned or raise what it raised."""
        ...

    def wait(self) -> None:
        """Wait until it is over, however it ended."""
        ...


class DoneWork(Generic[T]):
    """Work that is over."""

    __slots__ = ("_error", "_result")

    def __init__(self, work: Callable[[], T]) -> None:
        """Do the work."""
        self._error: BaseException | None = None
        try:
            self._result = work()
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        """See `Work.result`."""
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self) -> None:
        """See `Work.wait`."""


class ThreadWork(Generic[T]):
    """Work that a thread does."""

    __slots__ = ("_future",)

    def __init__(self, future: "Future[T]") -> None:
        self._future = future

    def result(self) -> T:
        """See `Work.result`."""
        return self._future.result()

    def wait(self) -> None:
        """See `Work.wait`."""
        self._future.exception()


class DeviceQueue(Protocol):
    """A device as the engine sees it."""

    def submit(self, work: Callable[[], T]) -> Work[T]:
        """Run `work` after everything that was submitted before. What it raises is kept."""
        ...


class InlineQueue:
    """Runs work at once, in the caller's thread.

    For the CPU without overlap, and for CUDA, where to run it is to put it into the stream of
    `device`: that is the current one of the thread meanwhile, whichever thread it is.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")

    def submit(self, work: Callable[[], T]) -> Work[T]:
        """See `DeviceQueue.submit`."""
        with on_device(self._device):
            return DoneWork(work)


class ThreadQueue:
    """Runs work in a thread of its own: the CPU computes while the caller plans the next step."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="pyengine-device")

    def submit(self, work: Callable[[], T]) -> Work[T]:
        """See `DeviceQueue.submit`."""
        return ThreadWork(self._executor.submit(work))


_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StepResults:
    """What came of a step: tokens, and what prompts' positions say about the tokens after them."""

    sampled: Sampled
    prompt_logprobs: list[list[TokenLogprobs]]


@dataclass(frozen=True, slots=True)
class SubmittedStep:
    """A step in the device's queue."""

    step: ScheduledStep
    batch: Batch
    work: Work[tuple[PendingSample, PendingPromptLogprobs]]

    def result(self) -> StepResults:
        """Wait for the tokens. Raises what the step raised."""
        pending, prompt_logprobs = self.work.result()
        return StepResults(pending.result(), prompt_logprobs.result())


class Executor:
    """A runner, a sampler, and the queue in which both run.

    `depth` is how many steps may be in it at a time. With 2 a step decodes the tokens of the one
    before while those are still on the device; they are fed forward there. `device` is where the
    runner's logits are.
    """

    def __init__(
        self,
        runner: Runner,
        queue: DeviceQueue | None = None,
        *,
        depth: int = 1,
        device: torch.device = _CPU,
    ) -> None:
        if depth not in (1, 2):
            raise ConfigurationError(
                f"depth={depth}: one step runs at a time (1), or a second one waits behind it (2)"
            )
        self.runner = runner
        self.depth = depth
        self._device = device
        self._queue = queue or InlineQueue()
        self._sampler = Sampler()
        self._masks = MaskFiller()

    def submit(
        self,
        step: ScheduledStep,
        batch: Batch,
        before: SubmittedStep | None,
        mtp: MTPStep | None = None,
    ) -> SubmittedStep:
        """Put a step into the queue, behind `before` if that is still in it.

        The plan and the batch are read now; nothing is waited for. What goes wrong on the device
        is raised by `SubmittedStep.result`. `mtp` is for a model that has some.
        """
        extra = batch.prompt_rows()
        if mtp is None:
            forward = self.runner.prepare(step.plan, extra_rows=extra)
        else:
            runner = cast(MTPRunner, self.runner)
            forward = runner.prepare(step.plan, extra_rows=extra, mtp=mtp)
        masks = self._masks.masks(batch.sampling.matchers, batch.sampling.vocab_size)
        if masks is not None and (batch.sampling.draws is not None or self._device.type != "cpu"):
            masks.begin()  # else `TokenMasks.largest` needs few of them

        def work() -> tuple[PendingSample, PendingPromptLogprobs]:
            known: torch.Tensor | None = None
            if before is not None:
                sampled, _ = before.work.result()  # it was queued first: it has been run
                known = (
                    before.batch.own_tokens(sampled.token_ids) if len(sampled.token_ids) else None
                )
            logits = forward(known)
            asked = batch.prompt_logprobs(logits.extra)  # at once: the logits are large
            rows = batch.rows_of(logits.sampling)
            return self._sampler.launch(rows, batch.sampling, batch.positions, masks), asked

        return SubmittedStep(step, batch, self._queue.submit(work))

    def draft(self, plan: StepPlan, asked: Sequence[DraftRow]) -> list[list[int]]:
        """What the model's MTP layers say comes next in these decodes of a plan. Waits for it."""
        return self.run(cast(MTPRunner, self.runner).prepare_drafts(plan, asked))

    def run(self, work: Callable[[], T]) -> T:
        """Do something behind the steps that are in the queue, and wait for it."""
        return self._queue.submit(work).result()
