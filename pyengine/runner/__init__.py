"""From a step plan to logits: the input buffers and the forward pass."""

from pyengine.runner.buffers import HostArrays, InputBuffers, RunnerLimits
from pyengine.runner.model_runner import ModelRunner, StepLogits

__all__ = ["HostArrays", "InputBuffers", "ModelRunner", "RunnerLimits", "StepLogits"]
