"""Triton kernels."""

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ALIGNED = 16
"""Kernels are compiled again for sizes and places that are not a multiple of this."""


def has_kernels(device: "torch.device") -> bool:
    """True if the Triton kernels run on this device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
