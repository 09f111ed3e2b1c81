"""How the C library keeps memory that tensors on the CPU have given back."""

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of `mallopt` (glibc, malloc.h)."""
_KEPT = 1 << 30
_LARGEST = 32 << 20


def keep_freed_memory() -> bool:
    """Have glibc keep up to 1 GiB that was freed, and use it again; whether it will.

    Every operator of a forward pass allocates its result and frees its inputs. By default glibc
    returns what is free at the end of its heap to the system each time, and the next operator pays
    for fresh pages: a fifth of a prefill. This is a setting of the process, as there is one heap;
    other C libraries are left as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    kept = libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
    found = libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)  # else it is no longer adjusted
    return bool(kept and found)
