"""What the runner needs of a plan, and what the engine needs of a runner."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pyengine.cache import SharedPrefixes, StepBuffers


class Plan(Protocol):
    """The part of `StepPlan` that the runner needs."""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute in this step."""
        ...

    @property
    def num_sequences(self) -> int:
        """Sequences that these tokens belong to."""
        ...

    @property
    def num_samples(self) -> int:
        """Rows whose logits are asked for."""
        ...

    def copies(self) -> list[tuple[int, int]]:
        """Blocks to copy before the step, (source, destination)."""
        ...

    def fill(self, buffers: StepBuffers, /, *, shared: SharedPrefixes | None = None) -> None:
        """Write the step's inputs into the arrays that `buffers` was made over.

        What its sequences share goes into those of `shared`.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepLogits:
    """Logits in the model's dtype, on its device.

    `sampling` is `[S, vocab]`, one row per sample of the plan, in its order. `extra` is
    `[E, vocab]`, the further rows that were asked for, in the order asked. Where the runner
    replays a graph they are its memory: valid until the next step is run.
    """

    sampling: torch.Tensor
    extra: torch.Tensor


Forward: TypeAlias = Callable[[torch.Tensor | None], StepLogits]
"""Run a prepared step. The argument: int64 `[S]` on the device, what the step before sampled, of
which this one computes some; None, or none at all, if it computes known tokens only."""


class Runner(Protocol):
    """A model over its KV pool."""

    def prepare(self, plan: Plan, *, extra_rows: npt.NDArray[np.int64] | None = None) -> Forward:
        """Read everything from `plan`; the result computes its tokens.

        `extra_rows` are further rows among the plan's tokens, in `0 .. num_tokens`, whose
        logits are wanted (for the log-probabilities of a prompt).

        Two steps may be prepared at a time. They are run in order, each once or never.
        """
        ...
