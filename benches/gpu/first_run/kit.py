"""Builds what the first run takes along to a machine without a network: `make gpu-first-run-kit`.

    python -m benches.gpu.first_run.kit [MODULE ...]

In target/gpu-first-run, `wheels` holds packages that the target lacks, `prebuilt` the modules of
flashinfer, compiled here by nvcc from PyPI, without a GPU. Both are kept if they are there. Without
MODULE, for instance fa3-128, they are those of `modules.PREBUILT`. The target is x86-64 Linux with
Python 3.12 and CUDA 13.0.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benches.gpu.first_run.driver import ROOT

KIT, TOOLS = Path("target/gpu-first-run"), Path("target/gpu-first-run-cuda")
EXTENSION = Path("pyengine/_kv.abi3.so")
PYTHON = "3.12"
WHEELS = ("flashinfer-python==0.6.18", "apache-tvm-ffi==0.1.15.post2")
GLIBC = (17, 24, 27, 28, 31, 34, 35)
"""Minor versions of glibc 2, up to the target's: pip wants each by name."""
COMPILER = (
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-curand==10.4.0.*",
    "ninja>=1.11",
)
MAX_MIB = 40
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "--no-input")


def download(folder: Path) -> None:
    """The wheels of `WHEELS` for the target."""
    options = ["--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    options += ["--python-version", PYTHON, "--dest", str(folder)]
    options += [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    options += ["--platform=manylinux2014_x86_64"]
    for requirement in WHEELS:
        name, _, version = requirement.partition("==")
        if not list(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")):
            subprocess.run([*_PIP, "download", *options, requirement], check=True)


def compile_modules(folder: Path, tools: Path, names: Sequence[str]) -> None:
    """Modules of flashinfer, by a compiler that is installed into `tools`; ten minutes."""
    home = tools / "nvidia" / "cu13"
    if not (home / "bin" / "nvcc").exists():
        subprocess.run([*_PIP, "install", "--no-deps", "--target", tools, *COMPILER], check=True)
    prepare_linker(home)
    environment = {
        **os.environ,
        "CUDA_HOME": str(home),
        "FLASHINFER_WORKSPACE_BASE": str(tools / "build"),
        "MAX_JOBS": os.environ.get("MAX_JOBS", "1"),
        "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    command = [sys.executable, "-m", "benches.gpu.first_run.modules", str(folder), *names]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def prepare_linker(home: Path) -> None:
    """Add the names that the linker looks for; modules do not call the library of the driver."""
    libraries = home / "lib"
    for link, target in ((home / "lib64", "lib"), (libraries / "libcudart.so", "libcudart.so.13")):
        if not link.exists():
            link.symlink_to(target)
    stub = libraries / "stubs" / "libcuda.a"
    if not stub.exists():
        stub.parent.mkdir(exist_ok=True)
        subprocess.run(["ar", "rcs", stub], check=True)


def mebibytes(paths: Iterable[Path]) -> float:
    """The size of files, and of all files below folders."""
    files = (
        file
        for path in paths
        for file in (path.rglob("*") if path.is_dir() else [path])
        if file.is_file()
    )
    return sum(file.stat().st_size for file in files) / 2**20


def main(*names: str) -> int:
    """Build the kit; print its size and how to use it. 1 if it is too large."""
    kit, extension = ROOT / KIT, ROOT / EXTENSION
    if platform.machine() != "x86_64":
        print("the kit is for x86-64: build it on such a machine", file=sys.stderr)
        return 1
    if not extension.is_file():
        print(f"there is no {EXTENSION}: run `make hello` first", file=sys.stderr)
        return 1
    if shutil.which("g++") is None:
        print("flashinfer's modules need g++", file=sys.stderr)
        return 1
    (kit / "wheels").mkdir(parents=True, exist_ok=True)
    download(kit / "wheels")
    compile_modules(kit / "prebuilt", ROOT / TOOLS, names)
    size, count = mebibytes([kit, extension]), len(list(kit.glob("prebuilt/*")))
    contents = f"{count} modules, {len(WHEELS)} wheels, the extension"
    print(f"{size:.1f} MiB of at most {MAX_MIB}: {contents}")
    if size > MAX_MIB:
        print("the kit is too large", file=sys.stderr)
        return 1
    print(
        f"take along: the checkout, {EXTENSION}, {KIT}\n"
        "run there, from the root of the checkout:\n"
        "  python3 -m benches.gpu.first_run --device cuda --out FOLDER"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
