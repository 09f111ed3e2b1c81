"""This machine, as `pyengine doctor` sees it: processor, memory, GPUs, libraries.

Works in the base install. Only `torch_facts` imports torch.
"""

import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from pyengine.utils.cpus import UsableCpus, usable_cpus
from pyengine.utils.packaging import DISTRIBUTION, installed_version

PROC = Path("/proc")

FEATURES = (
    *("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16"),
    *("amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve"),
)
"""Instructions that matter here, as Linux names them."""

BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16"})
"""Instructions that multiply bfloat16, as far as the engine uses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Properties that limit an engine."""

    system: str
    processor: str
    features: frozenset[str]
    kernels: str | None
    """Instruction level of the Rust kernels; None without the extension."""
    cores: int
    cpus: UsableCpus
    load: float
    """Processes that wanted a CPU, over the last minute."""
    total_memory: int
    free_memory: int
    used_swap: int
    gpus: tuple[str, ...]
    """GPUs that NVIDIA's driver lists."""
    environment: Mapping[str, str]


def this_machine(proc: Path = PROC) -> Machine:
    """Look at this machine."""
    processor, features = _processor(proc)
    memory = _memory(proc)
    return Machine(
        system=f"{platform.system()} {platform.release()} on {platform.machine()}",
        processor=processor,
        features=features,
        kernels=_kernels(),
        cores=os.cpu_count() or 1,
        cpus=usable_cpus(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        total_memory=memory.get("MemTotal", 0),
        free_memory=memory.get("MemAvailable", 0),
        used_swap=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        gpus=_gpus(proc),
        environment=dict(os.environ),
    )


def _processor(proc: Path) -> tuple[str, frozenset[str]]:
    """The processor's name, and those of `FEATURES` that it has."""
    text = _text(proc / "cpuinfo")
    name = re.search(r"^(?:model name|Model)\s*: (.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.+)$", text, re.MULTILINE)
    known = frozenset(flags[1].split()) if flags else frozenset()
    return (
        name[1] if name else platform.processor() or platform.machine(),
        known & frozenset(FEATURES),
    )


def _memory(proc: Path) -> dict[str, int]:
    """Bytes by the names of /proc/meminfo."""
    rows = re.findall(r"^(\w+): +(\d+) kB$", _text(proc / "meminfo"), re.MULTILINE)
    return {name: int(kibibytes) * 1024 for name, kibibytes in rows}


def _gpus(proc: Path) -> tuple[str, ...]:
    folders = sorted((proc / "driver/nvidia/gpus").glob("*/information"))
    names = [re.search(r"^Model:\s*(.+)$", _text(path), re.MULTILINE) for path in folders]
    return tuple(name[1] if name else "NVIDIA GPU" for name in names)


def _kernels() -> str | None:
    try:
        from pyengine.cpu import CpuAttention
    except ImportError:
        return None
    return CpuAttention.isa()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Library:
    """A distribution that an extra requires."""

    name: str
    min_version: str
    """The lowest version; empty if any is enough."""
    installed: str | None

    @property
    def is_enough(self) -> bool:
        """True if it is installed in this version or a later one."""
        return self.installed is not None and _numbers(self.installed) >= _numbers(self.min_version)


def libraries_of(extra: str) -> list[Library]:
    """The libraries of an extra, or with "" those of the base install."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # bare sources
        return []
    libraries = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        of_extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        is_elsewhere = "win32" in marker and sys.platform == "win32"
        parts = re.match(r"([\w.-]+)(?:\[[^]]*\])?[^>]*(?:>=\s*([\d.]+))?", requirement.strip())
        if (of_extra[1] if of_extra else "") == extra and parts and not is_elsewhere:
            libraries.append(Library(parts[1], parts[2] or "", installed_version(parts[1]) or None))
    return libraries


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:3])


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """torch, as far as it decides what is fast."""

    version: str
    cuda: str | None
    """The version of CUDA that it was built with; None for a build for CPUs."""
    capability: str = ""
    """The instructions of its CPU kernels."""
    gpus: tuple[str, ...] = field(default_factory=tuple)


def torch_facts() -> TorchFacts | str | None:
    """Import torch. The reason as text if it cannot be loaded, None if it is not installed."""
    if not installed_version("torch"):
        return None
    try:
        import torch
    except (ImportError, MemoryError, OSError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return TorchFacts(
        torch.__version__,
        torch.version.cuda,
        torch.backends.cpu.get_cpu_capability(),
        tuple(torch.cuda.get_device_name(index) for index in range(count)),
    )
