"""What was freed is used again, without fresh pages."""

import os
import subprocess
import sys

import pytest

from pyengine.engine import allocator

COUNT = """
import resource, sys
import torch
from pyengine.engine.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def faults():
    for _ in range(20):
        parts = [torch.ones(1 << 20) for _ in range(10)]  # 4 MiB each
        del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
print(faults() - before)
"""


@pytest.mark.skipif(allocator.platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_memory_that_was_freed_is_not_returned_to_the_system():
    def faults(how: str) -> int:
        command = [sys.executable, "-c", COUNT, how]
        eager = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}  # what is larger goes at once
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=eager)
        return int(done.stdout)

    assert faults("kept") < 100 < faults("default")


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("musl", "1.2"))
    assert not allocator.keep_freed_memory()
