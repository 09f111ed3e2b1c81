"""From a step plan to logits: inputs, forward pass, CUDA graphs, queue."""

from pyengine.runner.buffers import HostArrays, InputBuffers, RunnerLimits
from pyengine.runner.interface import (
    DraftRow,
    Forward,
    HeadRunner,
    HeadState,
    HeadStep,
    Plan,
    Runner,
    StepLogits,
    StepStates,
)
from pyengine.runner.model_runner import ModelRunner
from pyengine.runner.queue import DeviceQueue, InlineQueue, ThreadQueue, Work

__all__ = [
    "DeviceQueue",
    "DraftRow",
    "Forward",
    "HeadRunner",
    "HeadState",
    "HeadStep",
    "HostArrays",
    "InlineQueue",
    "InputBuffers",
    "ModelRunner",
    "Plan",
    "Runner",
    "RunnerLimits",
    "StepLogits",
    "StepStates",
    "ThreadQueue",
    "Work",
]
