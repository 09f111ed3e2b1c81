"""A step on the device: the queue, the forward pass and the sampling. It knows no request."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from pyengine.cpu.threads import CallerThreads
from pyengine.executor.model_runner import ModelRunner, Runner
from pyengine.executor.mtp import DraftRow, MTPStep
from pyengine.executor.states import StateSlots
from pyengine.kv_cache import StepPlan
from pyengine.models.adapters import StepAdapters
from pyengine.sampling.logprobs import PendingLogprobs
from pyengine.sampling.sampler import Sampled, SamplingBatch, sample
from pyengine.sampling.state import SamplingState
from pyengine.sampling.token_masks import MaskFiller, TokenMasks
from pyengine.utils.device_arrays import device_of
from pyengine.utils.devices import CPU, Device, on_device
from pyengine.utils.host_copy import float32_copy, upload

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of prompts with log-probabilities, among a step's tokens; all arrays are int64 `[E]`."""

    rows: npt.NDArray[np.int64]
    following: npt.NDArray[np.int64]
    """The tokens after these positions, whose log-probabilities are wanted."""
    num_top: int
    """The number of most probable tokens to find, at least one."""


class InputBatch:
    """The rows of logits of a step, and how each of its tokens is chosen."""

    def __init__(
        self,
        states: Sequence[SamplingState],
        counts: Sequence[int],
        prompts: Sequence[PromptRows] = (),
        hidden_rows: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """`states` has one entry for each token, `counts` one for each row of logits: its tokens.

        Several sequences of one prompt draw from the same row. `hidden_rows` are the step's tokens
        whose hidden states are wanted.
        """
        self.sampling = SamplingBatch(states)
        is_repeated = len(counts) != len(states)
        self.repeats = np.array(counts, dtype=np.int64) if is_repeated else None
        """The number of tokens of each row of logits; None: one."""
        self.prompts = prompts
        self.hidden_rows = hidden_rows

    def repeated(self, logits: Any) -> Any:
        """The logits that each token is drawn from, if there are `repeats`."""
        assert self.repeats is not None
        rows = np.arange(len(self.repeats)).repeat(self.repeats)
        return logits[upload(rows, device_of(logits))]

    def own_tokens(self, token_ids: Any) -> Any:
        """The first token of each row of logits: int64, on their device."""
        if self.repeats is None:
            return token_ids
        return token_ids[upload(self.repeats.cumsum() - self.repeats, device_of(token_ids))]


def _prompt_logprobs(prompts: Sequence[PromptRows], logits: Any) -> PendingLogprobs:
    """Log-probabilities of the tokens after these rows, by their logits `[E, V]`."""
    following = np.concatenate([part.following for part in prompts])
    top = [part.num_top for part in prompts for _ in part.rows]
    return PendingLogprobs(logits, upload(following, device_of(logits)), top)


@dataclass(slots=True, eq=False)
class ModelStep:
    """A step for the executor; `positions[i]` is the position of the i-th token in its output.

    `mtp` is for a model that has MTP layers, `states` for one that has recurrent layers, and
    `adapters` for one with adapters.
    """

    plan: StepPlan
    batch: InputBatch
    positions: npt.NDArray[np.int64]
    mtp: MTPStep | None = None
    states: StateSlots | None = None
    adapters: StepAdapters | None = None
    work: "Future[Sampled]" = field(init=False)
    """The tokens, once it is submitted; has the error of the step, if it failed."""


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
        runner: Runner,
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

    def submit(self, step: ModelStep, before: ModelStep | None) -> None:
        """Enqueue a step, after `before` if that is still in the queue.

        Reads the plan now and does not wait. Errors of the device are in `ModelStep.work`.
        """
        batch, prompts = step.batch, step.batch.prompts
        extra = np.concatenate([part.rows for part in prompts]) if prompts else None
        prepare = self.runner.prepare
        if step.adapters is not None:
            prepare = partial(cast("ModelRunner", self.runner).prepare, adapters=step.adapters)
        forward = prepare(
            step.plan,
            extra_rows=extra,
            hidden_rows=batch.hidden_rows,
            mtp=step.mtp,
            states=step.states,
        )
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
            of_prompts = _prompt_logprobs(prompts, logits.extra) if prompts else None
            hidden = None if logits.hidden is None else float32_copy(logits.hidden)
            rows = logits.sampling if batch.repeats is None else batch.repeated(logits.sampling)
            sampled = sample(rows, batch.sampling, step.positions, masks)
            sampled.pending_prompts, sampled.pending_hidden = of_prompts, hidden
            return sampled

        step.work = self._enqueue(work)

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

    def draft(self, plan: StepPlan, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Wait for the drafts of the model's MTP layers after these decodes of a plan."""
        return self.run(cast("ModelRunner", self.runner).prepare_drafts(plan, rows))

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` after the steps in the queue, and wait for its result."""
        return self._enqueue(work).result()
