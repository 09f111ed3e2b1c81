"""From a step plan to logits: inputs, forward pass, queue; in one process or several."""

from pyengine.runner.buffers import HostArrays, InputBuffers, RunnerLimits
from pyengine.runner.distributed import DistributedRunner, Team
from pyengine.runner.interface import Forward, Plan, Runner, StepLogits
from pyengine.runner.model_runner import ModelRunner
from pyengine.runner.queue import DeviceQueue, InlineQueue, ThreadQueue, Work
from pyengine.runner.ranks import RunnerSetup

__all__ = [
    "DeviceQueue",
    "DistributedRunner",
    "Forward",
    "HostArrays",
    "InlineQueue",
    "InputBuffers",
    "ModelRunner",
    "Plan",
    "Runner",
    "RunnerLimits",
    "RunnerSetup",
    "StepLogits",
    "Team",
    "ThreadQueue",
    "Work",
]
