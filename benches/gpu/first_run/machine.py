"""The machine: software, hardware, the two rates that figures are compared with."""

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from time import monotonic
from typing import Any

import torch

from benches.gpu.first_run import modules as flashinfer_modules
from benches.gpu.first_run.context import Context

_PACKAGES = ("torch", "triton", "transformers", "numpy", "flashinfer-python", "apache-tvm-ffi")
_TOOLS = ("nvcc", "ninja", "g++", "compute-sanitizer", "nvidia-smi")
_QUERY = "name,driver_version,clocks.sm,clocks.mem,temperature.gpu,memory.used"


def machine(context: Context) -> None:
    """Versions and tools; the bandwidth of a copy, the throughput of a bfloat16 product."""
    about: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count()}
    about |= {name: _version(name) for name in _PACKAGES}
    about |= {tool: shutil.which(tool) or "missing" for tool in _TOOLS}
    if context.on_cuda:
        about["gpu"] = torch.cuda.get_device_name(context.device)
        about["free_GiB"] = torch.cuda.mem_get_info(context.device)[0] / 2**30
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
            said = subprocess.run(command, capture_output=True, text=True, check=False)
            about["nvidia-smi"] = said.stdout.strip()
    context.record(**about)
    bench = context.bench("tiny")
    count, size = context.either((4 << 30, 8192), (32 << 20, 512))
    source = torch.ones(count, dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=context.device).bfloat16() for _ in range(2))
    context.record(
        work="rates",
        bytes_per_second=2 * count / bench.seconds_of(lambda: target.copy_(source), 10),
        flops_per_second=2 * size**3 / bench.seconds_of(lambda: a @ b, 10),
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def modules(context: Context) -> None:
    """Load flashinfer's modules; those that are not prebuilt are compiled on CUDA."""
    if not context.on_cuda:
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = flashinfer_modules.ARCHITECTURE
    try:
        import flashinfer
    except ImportError as error:
        context.record(piece="flashinfer", skipped=str(error))
        return
    context.record(piece="flashinfer", version=flashinfer.__version__)
    names = flashinfer_modules.PREBUILT
    with ThreadPoolExecutor(len(names)) as threads:
        list(threads.map(partial(_load, context), names))


def _load(context: Context, name: str) -> None:
    context.attempt(name, _loaded, context, name)


def _loaded(context: Context, name: str) -> None:
    spec, begin = flashinfer_modules.spec(name), monotonic()
    is_prebuilt = spec.is_aot
    if not is_prebuilt and not context.on_cuda:
        context.record(piece=name, skipped="it is not prebuilt")
        return
    spec.build_and_load()
    context.record(piece=name, prebuilt=is_prebuilt, seconds=monotonic() - begin)
