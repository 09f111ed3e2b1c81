"""Triton kernels."""

import importlib.util

from pyengine.utils.devices import Device

ALIGNED = 16
"""Kernels are compiled again for sizes and addresses that are not a multiple of this."""

LARGEST_ROW = 1 << 15
"""Maximum elements of a row that a kernel normalises: a program keeps them in registers."""


def has_kernels(device: Device) -> bool:
    """True if the Triton kernels run on this device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
