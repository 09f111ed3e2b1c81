"""Steps on their way through the device: forward pass and sampling, one step after the other."""

from dataclasses import dataclass

import torch

from pyengine.core.errors import ConfigurationError
from pyengine.engine.batch import Batch
from pyengine.runner import DeviceQueue, InlineQueue, Runner, StepLogits, Work
from pyengine.sampling import PendingSample, Sampled, Sampler
from pyengine.scheduler import ScheduledStep


@dataclass(frozen=True, slots=True)
class Flight:
    """A step in the device's queue: logits and tokens will come of it."""

    step: ScheduledStep
    batch: Batch
    work: Work[tuple[StepLogits, PendingSample]]

    def result(self) -> tuple[StepLogits, Sampled]:
        """Wait for the tokens. Raises what the step raised."""
        logits, pending = self.work.result()
        return logits, pending.result()


class Pipeline:
    """A runner, a sampler, and the queue in which both run.

    `depth` is how many steps may be in it at a time. With 2 a step decodes the tokens of the one
    before while those are still on the device; they are fed forward there.
    """

    def __init__(self, runner: Runner, queue: DeviceQueue | None = None, *, depth: int = 1) -> None:
        if depth not in (1, 2):
            raise ConfigurationError(
                f"depth={depth}: one step runs at a time (1), or a second one waits behind it (2)"
            )
        self.runner = runner
        self.depth = depth
        self._queue = queue or InlineQueue()
        self._sampler = Sampler()

    def launch(self, step: ScheduledStep, batch: Batch, before: Flight | None) -> Flight:
        """Put a step into the queue, behind `before` if that is still in it.

        The plan and the batch are read now; nothing is waited for. What goes wrong on the device
        is raised by `Flight.result`.
        """
        forward = self.runner.prepare(step.plan, extra_rows=batch.prompt_rows())

        def work() -> tuple[StepLogits, PendingSample]:
            known: torch.Tensor | None = None
            if before is not None:
                _, sampled = before.work.result()  # it was queued first: it has been run
                known = sampled.token_ids
            logits = forward(known)
            rows = batch.rows_of(logits.sampling)
            return logits, self._sampler.launch(rows, batch.sampling, batch.positions)

        return Flight(step, batch, self._queue.submit(work))
