"""Copies between host and device that do not wait for queued work."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyengine.utils.devices import CPU, Device, for_torch
from pyengine.utils.dtypes import widened

if TYPE_CHECKING:
    import torch


def upload(array: npt.NDArray[Any], device: "Device") -> Any:
    """`array` for computations on `device`: on the CPU itself, else a tensor of torch.

    For torch's own CPU device it is a tensor over the same memory, if that is contiguous. A copy
    from pageable memory would make the host wait for earlier work of the device.
    """
    if device is CPU:
        return array
    import torch

    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return host
    return host.pin_memory().to(for_torch(device), non_blocking=True)


class OnDevices:
    """An array that does not change, and its tensors: each uploaded at first use."""

    __slots__ = ("_array", "_tensors")

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array
        self._tensors: dict[Device | torch.device, Any] = {}

    def on(self, device: "Device | torch.device") -> Any:
        """The tensor on `device`, or the array; see `upload`."""
        if device not in self._tensors:
            self._tensors[device] = upload(self._array, device)
        return self._tensors[device]


class HostCopy:
    """Tensors that are copied to the host.

    The copies into pinned memory are queued at once, after the work that makes the tensors. `wait`
    waits for them alone: later work goes on. Tensors on the CPU are not copied.
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


def float32_copy(rows: Any) -> Callable[[], npt.NDArray[np.float32]]:
    """A copy of floats of any kind on the host, in float32; the result waits for it.

    An array is copied at once. The copy of a tensor is queued after the work that makes it.
    """
    if isinstance(rows, np.ndarray):
        own = np.array(widened(rows))
        return lambda: own
    copy = HostCopy([rows.float() if rows.device.type == "cuda" else rows.float().clone()])

    def wait() -> npt.NDArray[np.float32]:
        on_host: npt.NDArray[np.float32] = copy.wait()[0].numpy()
        return on_host

    return wait


def _pinned_copy(tensor: "torch.Tensor") -> "torch.Tensor":
    import torch

    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
