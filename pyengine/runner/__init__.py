"""From a step plan to logits: the input buffers and the forward pass, in one process or several."""

from pyengine.runner.buffers import HostArrays, InputBuffers, RunnerLimits
from pyengine.runner.distributed import DistributedRunner, Team
from pyengine.runner.interface import Runner
from pyengine.runner.model_runner import ModelRunner, StepLogits
from pyengine.runner.ranks import RunnerSetup

__all__ = [
    "DistributedRunner",
    "HostArrays",
    "InputBuffers",
    "ModelRunner",
    "Runner",
    "RunnerLimits",
    "RunnerSetup",
    "StepLogits",
    "Team",
]
