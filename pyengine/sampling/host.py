"""From the device to the host without waiting in line behind what is queued next."""

from collections.abc import Sequence

import torch


class HostCopy:
    """Tensors on their way to the host.

    The copies are queued at once, behind the work that makes the tensors, into pinned memory.
    :meth:`wait` then waits for them alone: work that was queued after them goes on. Tensors that
    are on the CPU are taken as they are.
    """

    __slots__ = ("_event", "_tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        on_cuda = any(tensor.device.type == "cuda" for tensor in tensors)
        self._event = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self._tensors = [_pinned_copy(tensor) for tensor in tensors] if on_cuda else list(tensors)
        if self._event is not None:
            self._event.record()

    def wait(self) -> list[torch.Tensor]:
        """The tensors, on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
