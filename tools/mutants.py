"""Find changes of the engine's Python that no test notices, by mutmut, on a copy of the tree.

    python tools/mutants.py [FILE...]

`make mutants-python` runs it in an environment with mutmut. The tests of a file run for each of its
mutants, in a process that is forked after all imports. Copies and results of mutmut stay in
target/mutants-python; the tree itself is not changed.
"""

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import IO

ROOT = Path(__file__).parents[1]
OUT = ROOT / "target" / "mutants-python"
COPIED = ("pyengine", "tests", "benches", "tools", "pyproject.toml")
CHILDREN = 2

_SCHEDULER = ("tests/unit/scheduler",)
TESTS: dict[str, tuple[str, ...]] = {
    "pyengine/scheduler/scheduler.py": _SCHEDULER,
    "pyengine/scheduler/batch.py": _SCHEDULER,
    "pyengine/scheduler/order.py": _SCHEDULER,
    "pyengine/scheduler/pins.py": _SCHEDULER,
    "pyengine/scheduler/queue.py": _SCHEDULER,
    "pyengine/scheduler/shares.py": _SCHEDULER,
    "pyengine/scheduler/states.py": _SCHEDULER,
    "pyengine/executor/executor.py": (
        "tests/unit/executor/test_device_queue.py",
        "tests/unit/engine/test_step_rows.py",
        "tests/unit/engine/test_overlap.py",
        "tests/unit/engine/test_core.py",
    ),
    "pyengine/engine/step_rows.py": (
        "tests/unit/engine/test_step_rows.py",
        "tests/unit/engine/test_overlap.py",
        "tests/unit/engine/test_core.py",
    ),
    "pyengine/engine/recovery.py": (
        "tests/unit/engine/test_recovery.py",
        "tests/unit/engine/test_device_errors.py",
    ),
    "pyengine/server/middleware/auth.py": (
        "tests/unit/server/middleware/test_auth.py",
        "tests/unit/server/middleware/test_keys.py",
    ),
}
"""The files that are mutated, and the tests that should notice."""

_SETTINGS = """\
[mutmut]
source_paths=pyengine
only_mutate={file}
also_copy=
    {copied}
pytest_add_cli_args_test_selection=
    {tests}
pytest_add_cli_args=
    -p
    no:cacheprovider
    -m
    not soak and not gpu and not clients and not cluster
"""


def main(files: list[str]) -> None:
    """Mutate each file, and print the surviving mutants."""
    for file in files or list(TESTS):
        if file not in TESTS:
            sys.exit(f"{file} has no tests listed in tools/mutants.py; it lists {', '.join(TESTS)}")
        mutate(file)


def mutate(file: str) -> None:
    """Run mutmut on one file, in a fresh copy."""
    start, folder = monotonic(), OUT / Path(file).stem
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    settings = _SETTINGS.format(
        file=file,
        copied="\n    ".join(name for name in COPIED if name not in ("pyengine", "tests")),
        tests="\n    ".join(TESTS[file]),
    )
    (folder / "setup.cfg").write_text(settings)
    print(f"{file}: the output of mutmut is in {folder / 'mutmut.log'}", flush=True)
    with (folder / "mutmut.log").open("w") as log:
        done = mutmut(folder, "run", "--max-children", str(CHILDREN), output=log)
    if done.returncode:
        sys.exit(f"mutmut failed: {(folder / 'mutmut.log').read_text()[-2000:]}")
    results = dict(re.findall(r"^\s+(\S+): (.+)$", said(folder, "results", "--all", "true"), re.M))
    for name, result in results.items():
        if result not in ("killed", "timeout"):
            print(f"\n{result}: {said(folder, 'show', name)}")
    counts = Counter(results.values())
    parts = ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))
    print(f"{file}: {len(results)} mutants in {monotonic() - start:.0f} s: {parts}", flush=True)


def said(folder: Path, *arguments: str) -> str:
    """The output of mutmut."""
    return str(mutmut(folder, *arguments, output=subprocess.PIPE).stdout)


def mutmut(
    folder: Path, *arguments: str, output: int | IO[str]
) -> "subprocess.CompletedProcess[str]":
    """Call it in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "mutmut", *arguments],
        cwd=folder,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
