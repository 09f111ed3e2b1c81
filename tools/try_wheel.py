"""Check the contents of a wheel and use it in an empty environment.

    python tools/try_wheel.py dist/pyengine_kv-*.whl            # in another Python than this one
    python tools/try_wheel.py --every dist/pyengine_kv-*.whl    # in every Python that is found
    python tools/try_wheel.py --python 'wine python.exe' dist/pyengine_kv-*.whl

`--python` is a command that runs a Python of another platform; this Python's pip installs packages
for it. Fails if the wheel holds anything but the package, its metadata and the licence, if it is
not an abi3 wheel, or if `BlockManager` and `CpuAttention` do not work with NumPy alone.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

NAMES = ("python3.14", "python3.13", "python3.12", "python3.11")

TRIAL = """
import sys
import pyengine
manager = pyengine.BlockManager(num_blocks=8, block_size=4)
sequence = manager.sequence([1, 2, 3, 4, 5])
plan = manager.begin_step(16)
outcome = plan.prefill(sequence, 16)
assert isinstance(outcome, pyengine.Prefilled), outcome
plan.commit([6])
assert manager.usage().active == 2, manager.usage()
sequence.free()
manager.check()
assert manager.usage().available == 8, manager.usage()
from pyengine.kv_cache import KVStore
KVStore.in_memory(max_bytes=1 << 26).close(5)
assert "pyengine._cpu" not in sys.modules
import numpy
from pyengine.cpu import CpuAttention
row = numpy.ones((1, 4), numpy.float32)
CpuAttention(1).rms_norm(3 * row, row[0], out := 0 * row, 0.0)
assert (out == row).all(), out
try:
    pyengine.LLM
except ImportError as error:
    refusal = str(error)
word = "Windows" if sys.platform == "win32" else "[engine]"
assert word in refusal, refusal
assert "torch" not in sys.modules
import platform
version, machine = sys.version.split()[0], f"{platform.system()} {platform.machine()}"
works = f"pyengine {pyengine.__version__}, BlockManager and CpuAttention work"
print(f"Python {version}, {machine}: {works}")
"""


def check_contents(wheel: Path) -> None:
    """Refuse names that do not belong in the wheel, and missing ones."""
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names}
    info = next(folder for folder in folders if folder.endswith(".dist-info"))
    strangers = sorted(folders - {"pyengine", info})
    suffixes = {".html", ".py", ".pyd", ".pyi", ".so", ".typed"}
    strangers += [n for n in names if n.startswith("pyengine/") and Path(n).suffix not in suffixes]
    if strangers:
        raise SystemExit(f"{wheel.name} holds what does not belong there: {strangers}")
    wanted = ["pyengine/__init__.py", "pyengine/py.typed"]
    wanted += ["pyengine/_cpu.py", "pyengine/_cpu.pyi", "pyengine/_kv.pyi"]
    wanted += ["pyengine/server/dashboard/kv.html"]
    missing = [name for name in wanted if name not in names]
    missing += ["a licence file"] * (not any("LICENSE" in n for n in names if n.startswith(info)))
    extension = "pyengine/_kv.pyd" if "-win_" in wheel.name else "pyengine/_kv.abi3.so"
    missing += ["the extension"] * (extension not in names)
    if missing or "-abi3-" not in wheel.name:
        raise SystemExit(f"{wheel.name} lacks {missing or 'the abi3 tag'}")
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1024:.0f} KiB", flush=True)


def candidates() -> list[str]:
    """Pythons on the path, then those of pyenv, newest first."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    kept = [root.glob(f"versions/{name.removeprefix('python')}.*/bin/python") for name in NAMES]
    return [*NAMES, *(str(path) for paths in kept for path in paths)]


def interpreters() -> dict[str, str]:
    """For each version that is found, a Python that starts and has venv."""
    probe = "import venv, sys; print('%d.%d' % sys.version_info[:2])"
    found: dict[str, str] = {}
    for name in [*filter(shutil.which, candidates()), sys.executable]:
        run = subprocess.run([name, "-c", probe], capture_output=True, text=True, check=False)
        if run.returncode == 0:
            found.setdefault(run.stdout.strip(), name)
    return found


def another_interpreter() -> str:
    """A Python of another version, or this one."""
    own = "{}.{}".format(*sys.version_info)
    for version, name in interpreters().items():
        if version != own:
            return name
    print(f"no other Python found, trying with {sys.executable}")
    return sys.executable


def try_in_environment(wheel: Path, interpreter: str) -> None:
    """Install and use the wheel in a temporary environment of this Python."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
        python = str(Path(folder) / ("Scripts" if os.name == "nt" else "bin") / "python")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        subprocess.run([*pip, str(wheel.resolve())], check=True)
        subprocess.run([python, "-c", TRIAL], check=True, cwd=folder)


def try_with(wheel: Path, command: Sequence[str]) -> None:
    """Use the wheel with a Python of another platform, started by `command`."""
    ask = [*command, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    version = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    tags = wheel.stem.split("-")[-1].split(".")
    if tags[0].startswith("manylinux"):  # NumPy's are newer ones
        machine = tags[0].split("_", 1)[1] if "2014" in tags[0] else tags[0].split("_", 3)[3]
        tags += [f"manylinux_2_{minor}_{machine}" for minor in (27, 28)]
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        platforms = [option for tag in tags for option in ("--platform", tag)]
        where = ["--target", folder, "--only-binary", ":all:", "--python-version", version]
        subprocess.run([*pip, *where, *platforms, str(wheel.resolve())], check=True)
        trial = Path(folder) / "trial.py"
        trial.write_text(TRIAL)
        environment = os.environ | {"PYTHONPATH": folder}
        subprocess.run([*command, str(trial)], check=True, cwd=folder, env=environment)


def main() -> None:
    """Check the contents, then try the wheel."""
    parser = argparse.ArgumentParser(description="Look into a wheel and use it.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--every", action="store_true", help="in every Python that is found")
    parser.add_argument("--python", help="a command that runs a Python of another platform")
    arguments = parser.parse_args()
    check_contents(arguments.wheel)
    if arguments.python:
        try_with(arguments.wheel, shlex.split(arguments.python))
    elif arguments.every:
        for interpreter in interpreters().values():
            try_in_environment(arguments.wheel, interpreter)
    else:
        try_in_environment(arguments.wheel, another_interpreter())


if __name__ == "__main__":
    main()
