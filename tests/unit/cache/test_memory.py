"""What is left of the machine's memory, read from files of known content."""

import pytest

from pyengine.cache import memory

GIB = 1 << 30

torch = pytest.importorskip("torch")


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
    assert memory.available_memory(torch.device("cpu")) == 8 * GIB
    folder = cgroup(tmp_path, limit=str(2 * GIB), current=GIB, inactive_file=0)
    monkeypatch.setattr(memory, "_CGROUP", folder)
    assert memory.available_memory(torch.device("cpu")) == GIB
