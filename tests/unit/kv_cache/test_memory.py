"""Available memory, from files with known content."""

import mmap
import resource
import sys

import numpy as np
import pytest

from pyengine.kv_cache import memory
from pyengine.utils.devices import CPU

GIB = 1 << 30


def cgroup(folder, *, limit: str, current: int, inactive_file: int):
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")
    return folder


def test_the_host_tells_what_is_available_not_what_is_free(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 900 kB\nMemFree: 100 kB\nMemAvailable:  640 kB\n")
    assert memory._host_memory(meminfo) == 640 * 1024


def test_without_meminfo_the_physical_memory_counts(tmp_path):
    assert memory._host_memory(tmp_path / "missing") > GIB // 8


def test_a_container_leaves_its_limit_less_what_is_used_for_good(tmp_path):
    folder = cgroup(tmp_path, limit=str(4 * GIB), current=3 * GIB, inactive_file=GIB)
    assert memory._container_memory(folder) == 2 * GIB


def test_a_container_beyond_its_limit_leaves_nothing(tmp_path):
    folder = cgroup(tmp_path, limit="100", current=300, inactive_file=0)
    assert memory._container_memory(folder) == 0


def test_no_limit_is_no_limit(tmp_path):
    assert (
        memory._container_memory(cgroup(tmp_path, limit="max", current=1, inactive_file=0)) is None
    )
    assert memory._container_memory(tmp_path / "missing") is None


def test_the_smaller_of_host_and_container_is_available(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 8388608 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "none")
    assert memory.available_memory(CPU) == 8 * GIB
    folder = cgroup(tmp_path, limit=str(2 * GIB), current=GIB, inactive_file=0)
    monkeypatch.setattr(memory, "_CGROUP", folder)
    assert memory.available_memory(CPU) == GIB


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for its pages")
@pytest.mark.parametrize("first", [0, 1, mmap.PAGESIZE - 1])
def test_pages_are_there_before_they_are_written(first):
    with mmap.mmap(-1, 1024 * mmap.PAGESIZE) as memory_map:
        memory_map[5 * mmap.PAGESIZE] = 9
        whole = np.frombuffer(memory_map, np.uint8)
        address = whole.ctypes.data
        if not memory.populate(address + first, len(memory_map) - first):
            pytest.skip("Linux before 5.14")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        whole[mmap.PAGESIZE :: mmap.PAGESIZE] += 1
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100
        assert whole[5 * mmap.PAGESIZE] == 10
        del whole


def test_less_than_a_page_needs_nothing():
    assert memory.populate(mmap.PAGESIZE + 1, mmap.PAGESIZE) is (sys.platform == "linux")


def test_where_the_system_cannot_nothing_is_said_to_be_there(monkeypatch):
    assert not memory.populate(mmap.PAGESIZE, 1 << 20)  # nothing is mapped there
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert not memory.populate(0, 1 << 20)
