"""Arrays of NumPy as tensors of torch over the same memory, and back.

bfloat16, which NumPy lacks, is held as its bits in uint16.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


def tensor_of(rows: Any) -> "torch.Tensor":
    """A tensor over the memory of `rows`, or `rows` if it is one."""
    import torch

    if isinstance(rows, torch.Tensor):
        return rows
    tensor = torch.from_numpy(rows)
    return tensor.view(torch.bfloat16) if rows.dtype == np.uint16 else tensor


def array_of(tensor: "torch.Tensor") -> npt.NDArray[Any]:
    """An array over the memory of a tensor on the CPU."""
    import torch

    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    array: npt.NDArray[Any] = bits.numpy()
    return array
