"""The device that checks and figures run on."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """A torch device and a folder for files."""

    device: str
    folder: str

    @property
    def on_cuda(self) -> bool:
        """True on CUDA; elsewhere sizes are tiny, to show that everything runs."""
        return self.device.startswith("cuda")

    def either(self, full: Any, tiny: Any) -> Any:
        """`full` on CUDA, else `tiny`."""
        return full if self.on_cuda else tiny


class NotHere(Exception):
    """A check that cannot run on this machine; the message says why."""
