"""Devices by their type: torch's own on CUDA, and the CPU without torch."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Device(Protocol):
    """The CPU or a CUDA device, as `torch.device` has it. `str` gives its name: "cuda:0"."""

    @property
    def type(self) -> str:
        """ "cpu" or "cuda"."""

    @property
    def index(self) -> int | None:
        """The number of a CUDA device."""


@dataclass(frozen=True, slots=True)
class _CPU:
    type: str = "cpu"
    index: int | None = None

    def __str__(self) -> str:
        return self.type


CPU: Device = _CPU()
"""The CPU, without torch."""


def for_torch(device: Device) -> "torch.device":
    """The same device for torch, which is imported."""
    import torch

    return torch.device(str(device))


def on_device(device: Device) -> AbstractContextManager[object]:
    """Make a CUDA `device` the current one of this thread, where kernels and events go."""
    if device.type != "cuda":
        return nullcontext()
    import torch

    return torch.cuda.device(for_torch(device))
