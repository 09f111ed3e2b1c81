"""Weights that exceed the memory: an error of Python, and the next weight fits."""

import sys

import pytest

from tests.support.processes import run_python

LITTLE = """
import resource
import numpy as np
from pyengine.cpu import CpuAttention, PackedWeight, QuantizedWeight
from pyengine.models.decoder.cpu_products import CpuProduct

rows, threads = np.ones((2, 1024), np.float32), CpuAttention(2)
CpuProduct(threads, PackedWeight(rows), None).multiply(rows)  # threads have their stacks
floats = np.full((20_000, 1024), 0.1, np.float32)
scales = np.ones((80 << 10, 1), np.float32)
blocks = np.zeros(160_000 * 1024 // 32 * 18, np.uint8)
sizes = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")]
most = (sizes[0] << 10) + (48 << 20)  # less than a chunk, or one of these weights
resource.setrlimit(resource.RLIMIT_AS, (most, most))
for make in (
    lambda: PackedWeight(floats),
    lambda: PackedWeight.from_float8(blocks[: 80 << 20].reshape(-1, 1024), scales, 1024),
    lambda: QuantizedWeight("Q4_0", blocks, 160_000, 1024),
):
    try:
        make()
    except MemoryError as error:
        assert "cannot allocate " in str(error), error
    else:
        raise SystemExit("there was memory")
CpuProduct(threads, PackedWeight(floats[:64]), None).multiply(rows)
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_memory_that_is_not_there_is_an_error_and_smaller_weights_have_some() -> None:
    ended = run_python(LITTLE)
    assert ended.stdout == "done\n"
