"""CPUs that a process may use: affinity and cgroup quotas, of both versions and nested."""

import os
from pathlib import Path

import pytest

from pyengine.utils import cpus
from pyengine.utils.cpus import cgroup_quota, usable_cpus

V2 = "30 23 0:26 {root} {mount} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "33 32 0:29 {root} {mount} rw,relatime - cgroup cgroup rw,{controllers}"


class System:
    """A process's /proc and its control groups."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.mount = folder / "proc", folder / "cgroup"
        self.proc.mkdir()
        self.lines: list[str] = []

    def mounted(self, form: str, name: str = "", *, root: str = "/", controllers: str = "") -> Path:
        mount = self.mount / name
        mount.mkdir(parents=True, exist_ok=True)
        self.lines.append(form.format(root=root, mount=mount, controllers=controllers))
        (self.proc / "mountinfo").write_text("\n".join(self.lines) + "\n")
        return mount

    def is_in(self, *lines: str) -> None:
        (self.proc / "cgroup").write_text("\n".join(lines) + "\n")


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def limit_v2(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(f"{text}\n")


def limit_v1(folder: Path, quota: int, period: int = 100_000) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (folder / "cpu.cfs_period_us").write_text(f"{period}\n")


def test_version_2_takes_the_least_of_nested_groups(system: System) -> None:
    mount = system.mounted(V2)
    limit_v2(mount / "user/pod", "150000 100000")
    limit_v2(mount / "user", "400000 100000")
    limit_v2(mount / "user/pod/inner", "max 100000")
    system.is_in("0::/user/pod/inner")
    assert cgroup_quota(system.proc) == 1.5
    limit_v2(mount / "user", "50000 100000")
    assert cgroup_quota(system.proc) == 0.5


def test_a_container_sees_its_own_group_as_the_root(system: System) -> None:
    limit_v2(system.mounted(V2), "200000 100000")
    system.is_in("0::/")
    assert cgroup_quota(system.proc) == 2
    system.is_in("0::/../../elsewhere")
    assert cgroup_quota(system.proc) == 2


def test_version_1_reads_the_cpu_controller(system: System) -> None:
    system.mounted(V1, "memory", controllers="memory")
    mount = system.mounted(V1, "cpu,cpuacct", controllers="cpu,cpuacct")
    limit_v1(mount, -1)
    limit_v1(mount / "job", 100_000)
    limit_v1(system.mount / "memory/job", 1)  # of another controller: not read
    system.is_in("4:memory:/job", "3:cpu,cpuacct:/job", "0::/")
    assert cgroup_quota(system.proc) == 1
    limit_v1(mount / "job", -1)
    assert cgroup_quota(system.proc) is None


def test_version_1_in_a_container_has_a_path_of_the_host(system: System) -> None:
    mount = system.mounted(V1, "cpu", root="/docker/a1", controllers="cpu")
    limit_v1(mount, 150_000, 50_000)
    system.is_in("3:cpu:/docker/a1")
    assert cgroup_quota(system.proc) == 3
    system.is_in("3:cpu:/docker/another")
    assert cgroup_quota(system.proc) == 3


@pytest.mark.parametrize("text", ["max 100000", "", "100000", "-1 100000", "a b", "100000 0"])
def test_what_is_no_limit_limits_nothing(system: System, text: str) -> None:
    limit_v2(system.mounted(V2), text)
    system.is_in("0::/")
    assert cgroup_quota(system.proc) is None


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cgroup_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "count"), [("100000", 1), ("20000", 1), ("150000", 2), ("240000", 2), ("900000", 4)]
)
def test_threads_are_as_many_as_the_quota_pays_for(
    system: System, monkeypatch: pytest.MonkeyPatch, quota: str, count: int
) -> None:
    monkeypatch.setattr(cpus, "_affinity", lambda: 4)
    limit_v2(system.mounted(V2), f"{quota} 100000")
    system.is_in("0::/")
    usable = usable_cpus(system.proc)
    assert usable.count == count
    assert ("quota" in usable.reason) == (count < 4)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_the_affinity_mask_counts_and_not_the_cores(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cpus(tmp_path).count == 1
    finally:
        os.sched_setaffinity(0, before)
    assert usable_cpus(tmp_path).count == len(before)
