"""The door to attention on the CPU in Rust (`rust/cpu-attention`): NumPy arrays in and out.

`CpuCache` is the keys and values of a layer, `CpuStep` the sequences of a step, `CpuAttention` the
threads that attend with the one over the other.
"""

from pyengine._kv import CpuAttention, CpuCache, CpuStep

__all__ = ["CpuAttention", "CpuCache", "CpuStep"]
