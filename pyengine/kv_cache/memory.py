"""Available memory, the allocation of its pages, and what the C library keeps of it."""

import ctypes
import mmap
import os
import platform
import sys
from pathlib import Path

from pyengine.utils.devices import Device, for_torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_MADV_POPULATE_WRITE = 23  # Linux 5.14, asm-generic/mman-common.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # numbers of `mallopt` (glibc, malloc.h)
_KEPT = 1 << 30
_LARGEST = 32 << 20


def available_memory(device: Device) -> int:
    """Bytes that can still be allocated on `device`.

    On the CPU this is the kernel's available memory (free, plus reclaimable), or the rest of the
    container's memory limit, whichever is less. On CUDA it is the free memory of the device, plus
    the unused part of torch's cache.
    """
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(for_torch(device))
        cached = torch.cuda.memory_reserved(for_torch(device))
        cached -= torch.cuda.memory_allocated(for_torch(device))
        return free + cached
    limits = [_host_memory(_MEMINFO), _container_memory(_CGROUP)]
    return min(limit for limit in limits if limit is not None)


def populate(address: int, num_bytes: int) -> bool:
    """Allocate the pages of `num_bytes` bytes at `address` now; contents stay.

    Otherwise the system allocates each at its first write. True if all whole pages are allocated;
    False on systems other than Linux, and before 5.14.
    """
    if sys.platform != "linux":
        return False
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = max(0, (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start)
    madvise = ctypes.CDLL(None).madvise  # other threads run meanwhile
    advice = ctypes.c_int(_MADV_POPULATE_WRITE)
    return bool(madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice) == 0)


def give_back(address: int, num_bytes: int) -> None:
    """Give the whole pages of `num_bytes` bytes at `address` back to the system.

    They are zeros then. Only for anonymous private memory. Elsewhere than on Linux nothing is done.
    """
    if sys.platform != "linux":
        return
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_DONTNEED))


def give_back_freed_memory() -> None:
    """Give memory that is free in the C library's heap back to the system."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _host_memory(meminfo: Path) -> int:
    """`MemAvailable` of Linux in bytes; elsewhere the physical memory."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _container_memory(cgroup: Path) -> int | None:
    """Bytes that the cgroup (v2) of this process leaves; None where it sets no limit.

    File pages count as used there although the kernel drops them on demand; they are added
    back, as `MemAvailable` does.
    """
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))


def keep_freed_memory() -> bool:
    """Let glibc keep up to 1 GiB of freed memory for reuse; return True if it will.

    Each operator allocates its result and frees its inputs. By default glibc returns the free end
    of its heap to the system each time, and fresh pages cost a fifth of a prefill. The setting is
    one of the process. What is free before, some 40 MB after a load, goes to the system.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    is_kept = libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
    is_fixed = libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)  # else it is no longer adjusted
    return bool(is_kept and is_fixed)


def in_gib(num_bytes: int) -> str:
    """A size in GiB, for messages."""
    return f"{num_bytes / (1 << 30):.2f} GiB"
