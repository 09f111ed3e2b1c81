"""A device by name, without torch: what an engine runs on."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Device:
    """The CPU, or a CUDA device by its number. `str` gives torch's name of it: "cuda:0"."""

    type: Literal["cpu", "cuda"]
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def to_torch(self) -> "torch.device":
        """The same device for torch, which is imported."""
        import torch

        return torch.device(str(self))


CPU = Device("cpu")
