"""The operations of a step that arrays on the CPU and tensors on a device share."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pyengine.utils.devices import CPU, Device, for_torch
from pyengine.utils.dtypes import STORED, DType, torch_dtype, widened


def device_of(array: Any) -> Device:
    """`CPU` for an array; a tensor's own device."""
    if isinstance(array, np.ndarray):
        return CPU
    device: Device = array.device
    return device


def zeros(shape: tuple[int, ...], dtype: DType, device: Device) -> Any:
    """Zeros in the memory of `device`: an array on `CPU`, else a tensor."""
    if device is CPU:
        return np.zeros(shape, STORED[dtype])
    import torch

    return torch.zeros(shape, dtype=torch_dtype(dtype), device=for_torch(device))


def concatenated(parts: Sequence[Any], axis: int = 0) -> Any:
    """Arrays, or tensors, one after the other."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis)
    import torch

    return torch.cat([*parts], axis)


def stacked(parts: Sequence[Any], axis: int) -> Any:
    """Arrays, or tensors, along a new axis."""
    if isinstance(parts[0], np.ndarray):
        return np.stack(parts, axis)
    import torch

    return torch.stack([*parts], axis)


def with_known(ids: Any, sampled: Any) -> Any:
    """Token ids, with pending ones (`-1 - row`) replaced by the tokens that were sampled."""
    if isinstance(ids, np.ndarray):
        return np.where(ids < 0, sampled[np.maximum(-1 - ids, 0)], ids)
    import torch

    return torch.where(ids < 0, sampled[(-1 - ids).clamp_(min=0)], ids)


def largest_ids(rows: Any) -> Any:
    """The index of the largest number of each row: int64."""
    return (widened(rows) if isinstance(rows, np.ndarray) else rows).argmax(-1)


def on_host(rows: Any) -> Any:
    """An array of integers with the same numbers; waits for a device."""
    return rows if isinstance(rows, np.ndarray) else rows.cpu().numpy()
