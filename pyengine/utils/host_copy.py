"""Copies between host and device that do not wait for the work queued there."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


def upload(array: npt.NDArray[Any], device: "torch.device") -> "torch.Tensor":
    """`array` on `device`; on the CPU the same memory, if it is contiguous.

    To copy from pageable memory the host would wait until the device has come there.
    """
    import torch

    host = torch.from_numpy(np.ascontiguousarray(array))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Tensors on their way to the host.

    The copies are queued at once, behind the work that makes the tensors, into pinned memory.
    `wait` then waits for them alone: work that was queued after them goes on. Tensors on the CPU
    are taken as they are.
    """

    __slots__ = ("_event", "_tensors")

    def __init__(self, tensors: "Sequence[torch.Tensor]") -> None:
        import torch

        on_cuda = any(tensor.device.type == "cuda" for tensor in tensors)
        self._event = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self._tensors = [_pinned_copy(tensor) for tensor in tensors] if on_cuda else list(tensors)
        if self._event is not None:
            self._event.record()

    def wait(self) -> "list[torch.Tensor]":
        """The tensors, on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _pinned_copy(tensor: "torch.Tensor") -> "torch.Tensor":
    import torch

    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def cpu_array(tensor: "torch.Tensor") -> npt.NDArray[Any]:
    """The same memory for the kernel: bfloat16, which NumPy lacks, as its bits."""
    import torch

    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    return bits.numpy()
