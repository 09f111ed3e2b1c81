"""Look into a wheel and use it in an empty environment of another Python.

    python tools/try_wheel.py dist/pyengine_kv-*.whl

Fails if the wheel holds anything but the package, its metadata and the licence, if it is not
an abi3 wheel, or if `BlockManager` does not work where NumPy is the only dependency.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
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
assert "torch" not in sys.modules
print(f"Python {sys.version.split()[0]}: pyengine {pyengine.__version__}, BlockManager works")
"""


def check_contents(wheel: Path) -> None:
    """Refuse names that do not belong into the wheel, and the lack of those that do."""
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names}
    info = next(folder for folder in folders if folder.endswith(".dist-info"))
    strangers = sorted(folders - {"pyengine", info})
    suffixes = {".html", ".py", ".pyi", ".so", ".typed"}
    strangers += [n for n in names if n.startswith("pyengine/") and Path(n).suffix not in suffixes]
    if strangers:
        raise SystemExit(f"{wheel.name} holds what does not belong there: {strangers}")
    wanted = ["pyengine/__init__.py", "pyengine/py.typed", "pyengine/_kv.pyi"]
    wanted += ["pyengine/server/dashboard/kv.html"]
    missing = [name for name in wanted if name not in names]
    missing += ["a licence file"] * (not any("LICENSE" in n for n in names if n.startswith(info)))
    missing += ["the extension"] * (not any(n.startswith("pyengine/_kv.abi3") for n in names))
    if missing or "-abi3-" not in wheel.name:
        raise SystemExit(f"{wheel.name} lacks {missing or 'the abi3 tag'}")
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1024:.0f} KiB")


def candidates() -> list[str]:
    """Pythons by name on the path, then those that pyenv keeps, newest first."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    kept = [root.glob(f"versions/{name.removeprefix('python')}.*/bin/python") for name in NAMES]
    return [*NAMES, *(str(path) for paths in kept for path in paths)]


def find_interpreter() -> str:
    """The first Python that starts and is of another version than this one, else this one."""
    probe = f"import venv, sys; sys.exit(sys.version_info[:2] == {sys.version_info[:2]})"
    for name in filter(shutil.which, candidates()):
        if subprocess.run([name, "-c", probe], capture_output=True, check=False).returncode == 0:
            return name
    print(f"no other Python found, trying with {sys.executable}")
    return sys.executable


def main(wheel: Path) -> None:
    """Check the contents, then install and use the wheel in a temporary environment."""
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([find_interpreter(), "-m", "venv", folder], check=True)
        python = str(Path(folder) / "bin" / "python")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        subprocess.run([*pip, str(wheel.resolve())], check=True)
        subprocess.run([python, "-c", TRIAL], check=True, cwd=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
