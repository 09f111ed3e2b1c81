"""From a step plan to logits: inputs, forward pass, CUDA graphs, queue."""

from pyengine.runner.buffers import HostArrays, InputBuffers, RunnerLimits
from pyengine.runner.interface import Forward, Plan, Runner, StepLogits
from pyengine.runner.model_runner import ModelRunner
from pyengine.runner.queue import DeviceQueue, InlineQueue, ThreadQueue, Work

__all__ = [
    "DeviceQueue",
    "Forward",
    "HostArrays",
    "InlineQueue",
    "InputBuffers",
    "ModelRunner",
    "Plan",
    "Runner",
    "RunnerLimits",
    "StepLogits",
    "ThreadQueue",
    "Work",
]
