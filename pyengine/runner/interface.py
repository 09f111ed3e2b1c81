"""What the engine asks of a runner, be it one process or several."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyengine.runner.buffers import Plan
from pyengine.runner.model_runner import StepLogits


class Runner(Protocol):
    """Computes steps."""

    def execute(self, plan: Plan, *, extra_rows: npt.NDArray[np.int64] | None = None) -> StepLogits:
        """Compute the tokens of `plan`; see `ModelRunner.execute`."""
        ...
