"""All ranks enter the forward pass of a step, or none does.

Inside the pass the ranks meet in one collective operation after the other, and who waits there for
a rank that does not come waits for ever. So they ask each other before the first of them: each
has its inputs, has copied its blocks and has prepared its attention. A rank that failed at that
says so, and all of them leave the step in the same state.
"""

import torch
import torch.distributed as dist

from pyengine.attention.interface import AttentionBackend, AttentionPlan, GraphPlan
from pyengine.attention.metadata import StepInputs
from pyengine.core.errors import ConfigurationError


class StepAbandoned(Exception):
    """Another rank was not ready, and no rank has entered the forward pass."""


class Readiness:
    """What this rank tells the others in the current step, and whether it did."""

    def __init__(self) -> None:
        self._ready = torch.ones(1, dtype=torch.int32)
        self.is_asked = False

    def begin(self) -> None:
        """A new step: every rank answers once, with `confirm` or `refuse`."""
        self.is_asked = True

    def confirm(self) -> None:
        """This rank is ready. Raises `StepAbandoned` if another one is not."""
        if not self._all_ready(1):
            raise StepAbandoned

    def refuse(self) -> None:
        """This rank is not ready."""
        self._all_ready(0)

    def _all_ready(self, ready: int) -> bool:
        self.is_asked = False
        self._ready.fill_(ready)
        dist.all_reduce(self._ready, op=dist.ReduceOp.MIN)
        return bool(self._ready.item())


class AgreedBackend:
    """An attention backend whose plans are made on all ranks or on none.

    A graph would be captured without asking the others, so it makes no plans for graphs.
    """

    supports_graphs = False

    def __init__(self, backend: AttentionBackend, readiness: Readiness) -> None:
        self.name = backend.name
        self._backend = backend
        self._readiness = readiness

    def plan(self, inputs: StepInputs) -> AttentionPlan:
        """Prepare a step, and wait until all ranks have: the last thing before the first layer."""
        plan = self._backend.plan(inputs)
        self._readiness.confirm()
        return plan

    def graph_plan(self, inputs: StepInputs) -> GraphPlan:
        """See `AttentionBackend.graph_plan`."""
        raise ConfigurationError("tensor parallelism runs without CUDA graphs: enforce_eager=True")
