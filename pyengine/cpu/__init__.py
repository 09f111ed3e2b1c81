"""The CPU's arithmetic: attention and products in Rust, and the threads that compute them.

`CpuAttention` has the threads. It attends over a `CpuCache` (the keys and values of a layer) with
the sequences of a step, `CpuStep`. `PackedWeight` and `QuantizedWeight` are weights that it
multiplies by; `quantise_groups` and `quantise_q8_0` round floats to its formats. `threads` chooses
the number of threads.

This package is the only importer of the Rust module `pyengine._cpu`. Importing it needs NumPy only.
"""

from pyengine._cpu import *  # noqa: F403
