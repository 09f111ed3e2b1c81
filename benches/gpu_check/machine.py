"""What this machine is, and what its memory and its matrix units give."""

import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any

import torch

from benches.gpu_check.rows import Part, Row, Setup, rounded

BANDWIDTH, MATMUL = "copy bandwidth", "matmul"
_PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "triton": "triton",
    "flashinfer": "flashinfer-python",
    "flash_attn": "flash-attn",
    "numpy": "numpy",
}


def parts(setup: Setup) -> list[Part]:
    """See `Part`."""
    return [
        ("versions", lambda: _versions(setup)),
        (BANDWIDTH, lambda: _bandwidth(setup)),
        (MATMUL, lambda: _matmul(setup)),
    ]


def _versions(setup: Setup) -> Iterator[Row]:
    found: dict[str, Any] = {"python": platform.python_version()}
    for name, package in _PACKAGES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = None
    found["cuda"] = torch.version.cuda
    if setup.on_cuda:
        properties = torch.cuda.get_device_properties(setup.device)
        found |= {
            "gpu": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "memory_gb": rounded(properties.total_memory / 1e9),
            "multiprocessors": properties.multi_processor_count,
        }
    yield Row("machine", "info", found)


def seconds_of(work: Callable[[], object], setup: Setup, repeat: int) -> float:
    """The least time of one call, of three rounds of `repeat` calls after one to warm up."""
    work()
    best = float("inf")
    for _ in range(3):
        synchronize(setup)
        start = perf_counter()
        for _ in range(repeat):
            work()
        synchronize(setup)
        best = min(best, (perf_counter() - start) / repeat)
    return best


def synchronize(setup: Setup) -> None:
    """Wait for the device."""
    if setup.on_cuda:
        torch.cuda.synchronize(setup.device)


def _bandwidth(setup: Setup) -> Iterator[Row]:
    count = (4 << 30) if setup.on_cuda else (32 << 20)
    source = torch.ones(count, dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), setup, 5)
    found = {"bytes_per_second": rounded(2 * count / seconds), "copied": count}
    yield Row(BANDWIDTH, "info", found, "bytes read and written by a copy within the device")


def _matmul(setup: Setup) -> Iterator[Row]:
    size = 8192 if setup.on_cuda else 512
    a, b = (torch.randn(size, size, device=setup.device).bfloat16() for _ in range(2))
    seconds = seconds_of(lambda: a @ b, setup, 10)
    found = {"flops_per_second": rounded(2 * size**3 / seconds), "size": size}
    yield Row(MATMUL, "info", found, "bfloat16, square, random numbers")
