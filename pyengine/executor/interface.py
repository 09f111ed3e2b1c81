"""The interface of a plan to the runner, and of a runner to the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pyengine.kv_cache import SharedPrefixes, StepBuffers


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


@dataclass(slots=True, eq=False)
class StepStates:
    """Hidden states of some rows of a step, `[K, heads, hidden]`, once it has run."""

    tensor: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class HiddenState:
    """The states of one token, one for each head to go on from: a row of a step's."""

    step: StepStates
    row: int


@dataclass(frozen=True, slots=True)
class MTPStep:
    """A step as the MTP layers of a model see it (see `executor/mtp.py`).

    `before` are the states of the token before each sequence's first one; None where they are not
    known, or there is none. `rows`, int64 `[K]`, are those among the step's tokens whose states
    go into `after`.
    """

    before: Sequence[HiddenState | None]
    rows: npt.NDArray[np.int64]
    after: StepStates


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A sequence to draft for: its place among the plan's, its last token, the states before that.

    At most `count` tokens are wanted: no more than its last block has slots, from that token on.
    """

    row: int
    token_id: int
    before: HiddenState
    count: int


class MTPRunner(Runner, Protocol):
    """A model with MTP layers that predict further tokens."""

    def prepare(
        self,
        plan: Plan,
        *,
        extra_rows: npt.NDArray[np.int64] | None = None,
        mtp: MTPStep | None = None,
    ) -> Forward:
        """See `Runner.prepare`. The MTP layers compute the same tokens, from and to states of
        `mtp`; without it nothing is known before the step, and nothing kept."""
        ...

    def prepare_drafts(
        self, plan: Plan, asked: Sequence[DraftRow]
    ) -> Callable[[], list[list[int]]]:
        """Read everything from `plan`, which decodes these sequences; the result drafts for them.

        To be run on the device behind the steps that were prepared before.
        """
        ...
