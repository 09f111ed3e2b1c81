"""The number of CPUs that this process may use, by affinity and control groups."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class UsableCpus:
    """A number of CPUs, and its limit."""

    count: int
    reason: str


def usable_cpus(proc: Path = _PROC) -> UsableCpus:
    """The CPUs of the affinity mask, or of the quota, whichever are fewer.

    A quota is rounded to the nearest whole number, and is at least 1: threads beyond it are stopped
    in the middle of a step, and the others wait for them.
    """
    available = _affinity()
    quota = cgroup_quota(proc)
    if quota is not None and max(1, int(quota + 0.5)) < available:
        return UsableCpus(max(1, int(quota + 0.5)), f"a cgroup quota of {quota:g} CPUs")
    return UsableCpus(available, "CPUs that this process may run on")


def _affinity() -> int:
    count = getattr(os, "process_cpu_count", None)  # Python 3.13
    if count is not None:
        return count() or 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cgroup_quota(proc: Path = _PROC) -> float | None:
    """The CPU quota of this process's control groups, nested ones included; None: no quota.

    Reads `cpu.max` (version 2) or `cpu.cfs_quota_us` (version 1) of each group from the process's
    own up to the mounted one.
    """
    quotas = [
        quota
        for folder in _cgroup_folders(proc)
        if (quota := _quota_of_v2(folder) or _quota_of_v1(folder)) is not None
    ]
    return min(quotas, default=None)


def _cgroup_folders(proc: Path) -> Iterator[Path]:
    """The process's groups that may have a CPU quota, and their parents."""
    mounts = list(_cgroup_mounts(proc))
    for line in _lines(proc / "cgroup"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        for root, mount, controls_cpu in mounts:
            if controls_cpu != ("cpu" in controllers.split(",")) or (
                not controls_cpu and controllers
            ):
                continue
            group = mount
            if ".." not in path and Path(path).is_relative_to(root):
                group = mount / Path(path).relative_to(root)
            yield group
            yield from (parent for parent in group.parents if parent.is_relative_to(mount))


def _cgroup_mounts(proc: Path) -> Iterator[tuple[str, Path, bool]]:
    """The root and the folder of each mount, and True for version 1 with the cpu controller."""
    for line in _lines(proc / "mountinfo"):
        mounted, _, options = line.partition(" - ")
        kind, _, settings = (*options.split(" ", 2), "", "")[:3]
        fields = mounted.split(" ")
        if len(fields) < 5:
            continue
        mount = Path(fields[4].replace("\\040", " "))
        if kind == "cgroup2":
            yield fields[3], mount, False
        elif kind == "cgroup" and "cpu" in settings.split(","):
            yield fields[3], mount, True


def _quota_of_v2(folder: Path) -> float | None:
    limit, _, period = " ".join(_lines(folder / "cpu.max")).partition(" ")
    return _ratio(limit, period)


def _quota_of_v1(folder: Path) -> float | None:
    limit = "".join(_lines(folder / "cpu.cfs_quota_us"))
    return _ratio(limit, "".join(_lines(folder / "cpu.cfs_period_us")))


def _ratio(limit: str, period: str) -> float | None:
    """The quota; None without a limit: "max", -1, or no such file."""
    if not limit.isdecimal() or not period.isdecimal() or not int(period):
        return None
    return int(limit) / int(period)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
