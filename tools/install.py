"""Install dependencies of the project into this Python's environment, in the versions of uv.lock.

    python tools/install.py engine --uv uv
    python tools/install.py torch --uv uv --torch auto

torch is the build of the lock, on Linux the one for CUDA, or a build for CPUs from PyTorch's own
index. `auto` chooses the latter on machines without a GPU, if that index answers. Bytecode is
compiled, as `[tool.uv]` of pyproject.toml says.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

ROOT = Path(__file__).parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu/torch/"
PATIENCE = 5.0
"""Seconds that the index has to answer."""

_ENGINE = ("--extra", "engine", "--group", "embedded")
_SERVE = (*_ENGINE, "--extra", "serve")
_TORCH = ("--extra", "torch")
_DEV = (*_SERVE, "--extra", "dev")

WANTED = {
    "engine": _ENGINE,
    "torch": (*_ENGINE, *_TORCH),
    "serve": _SERVE,
    "dev": (*_DEV, *_TORCH, "--extra", "references"),
    "dev-light": _DEV,
    "docs": ("--extra", "docs"),
}
"""The options of uv for each target of the Makefile."""


def torch_build(asked: str, driver: Path = Path("/proc/driver/nvidia")) -> str:
    """The build of torch, "cpu" or "lock", for "auto", "cpu" or "cuda"."""
    if asked not in ("auto", "cpu", "cuda"):
        raise SystemExit(f"TORCH={asked}: use auto, cpu or cuda")
    if asked != "auto":
        return "cpu" if asked == "cpu" else "lock"
    is_elsewhere = sys.platform != "linux"  # it has only a build for CPUs
    return "lock" if is_elsewhere or driver.exists() or not _answers() else "cpu"


def _answers() -> bool:
    try:
        with urlopen(CPU_INDEX, timeout=PATIENCE) as answer:
            return bool(answer.status == 200)
    except (OSError, URLError):
        return False


def commands(uv: str, wanted: str, build: str, requirements: Path) -> list[list[str]]:
    """The commands, in order; `requirements` is a file that the first one may write.

    Other installed packages, such as torch, stay.
    """
    options = ["--frozen", "--no-default-groups", *WANTED[wanted]]
    if build == "lock" or not _has_torch(wanted):
        return [[uv, "sync", "--inexact", "--no-install-project", "-q", *options]]
    pinned = ["--no-emit-project", "--no-hashes", "--prune", "torch", "--output-file"]
    target = ["-q", "--python", sys.executable]
    return [
        [uv, "export", "-q", *options, *pinned, str(requirements)],
        [uv, "pip", "install", *target, "-r", str(requirements)],
        [uv, "pip", "install", *target, "--torch-backend", "cpu", f"torch=={_locked('torch')}"],
    ]


def _has_torch(wanted: str) -> bool:
    return "torch" in WANTED[wanted]


def _locked(name: str) -> str:
    """The version of a package in the lock."""
    packages = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    (version,) = {each["version"] for each in packages if each["name"] == name}
    return str(version)


def main(arguments: Sequence[str] | None = None) -> None:
    """Install, after a line about the size of torch if it is wanted."""
    parser = argparse.ArgumentParser(description="Install the versions of uv.lock.")
    parser.add_argument("wanted", choices=WANTED)
    parser.add_argument("--uv", default="uv")
    parser.add_argument("--torch", default="auto", help="auto, cpu or cuda")
    given = parser.parse_args(arguments)
    build = torch_build(given.torch) if _has_torch(given.wanted) else "lock"
    if given.wanted in ("torch", "dev"):
        size = "0.2 GB" if build == "cpu" else "5 GB on Linux, with CUDA"
        print(f"installing torch ({size}), transformers, ...: a few minutes", flush=True)
    environment = os.environ | {"UV_PROJECT_ENVIRONMENT": sys.prefix}
    with tempfile.TemporaryDirectory() as folder:
        for command in commands(given.uv, given.wanted, build, Path(folder) / "requirements.txt"):
            subprocess.run(command, check=True, cwd=ROOT, env=environment)


if __name__ == "__main__":
    main()
