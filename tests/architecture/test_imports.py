"""Who may import whom, held by import-linter, and what `import pyengine` may load."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pyengine"
ROOMS = {
    "attention",
    "cache",
    "cli",
    "core",
    "engine",
    "models",
    "parallel",
    "runner",
    "sampling",
    "scheduler",
    "speculation",
}
FEWEST_MODULES = 30
OWN_IMPORT_MS = 100


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_contracts_are_kept_and_every_module_was_scanned() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = grimp.build_graph("pyengine", cache_dir=None).modules  # what import-linter looks at
    files = [path.relative_to(ROOT).with_suffix("") for path in PACKAGE.rglob("*.py")]
    assert seen == {".".join(path.parts).removesuffix(".__init__") for path in files}
    assert len(seen) >= FEWEST_MODULES
    assert re.search(r"Contracts: [1-9]\d* kept, 0 broken", done.stdout), done.stdout
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} >= ROOMS


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("scheduler", "import torch"),
        ("scheduler", "from pyengine.runner import model_runner"),
        ("runner", "from pyengine.scheduler import scheduler"),
        ("runner", "import pyengine.parallel"),
        ("parallel", "from pyengine.scheduler import scheduler"),
        ("parallel", "import pyengine.engine"),
        ("parallel", "import pyengine.sampling"),
        ("cache", "import transformers"),
        ("models", "import pyengine.cache"),
        ("engine", "import pyengine.cli"),
        ("core", "import pyengine.cache"),
        ("speculation", "import torch"),
        ("scheduler", "import pyengine.speculation"),
    ],
)
def test_a_contract_breaks_when_it_should(tmp_path: Path, room: str, line: str) -> None:
    shutil.copytree(PACKAGE, tmp_path / "pyengine", ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "pyengine" / room / "intruder.py").write_text(f"{line}\n")
    done = lint(tmp_path)
    assert done.returncode == 1
    assert f"pyengine.{room}.intruder" in done.stdout, done.stdout


def imported(path: Path) -> set[str]:
    """The names of modules that a file imports, and of what it takes from them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_only_the_cache_imports_the_extension() -> None:
    """import-linter does not see compiled modules, so this one is checked by hand."""
    users = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        if any(name.startswith("pyengine._kv") for name in imported(path))
    }
    assert users == {"cache"}


def test_nobody_inside_imports_the_front_door() -> None:
    for path in PACKAGE.rglob("*.py"):
        front = {name for name in imported(path) if re.fullmatch(r"pyengine(\.\w+)?", name)}
        assert front <= {f"pyengine.{room}" for room in ROOMS}, path


def test_import_pyengine_loads_numpy_and_nothing_else() -> None:
    loaded = python(
        "import json, sys; before = set(sys.modules)\n"
        "import pyengine; pyengine.BlockManager\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    foreign = set(json.loads(loaded)) - set(sys.stdlib_module_names)
    assert "pyengine" in foreign
    assert foreign <= {"pyengine", "numpy"}


@pytest.mark.parametrize("module", ["pyengine.scheduler", "pyengine.cache", "pyengine.cli.app"])
def test_no_torch_before_it_is_needed(module: str) -> None:
    heavy = python(
        f"import sys, {module}; print({{'torch', 'transformers', 'tokenizers'}} & set(sys.modules))"
    )
    assert heavy.strip() == "set()"


def test_own_import_time_is_small() -> None:
    """Self time of our own modules, the extension included, by the interpreter's own clock."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import pyengine"],
        capture_output=True,
        text=True,
        check=True,
    )
    own = re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(pyengine\S*)", done.stderr)
    assert "pyengine" in {name for _, name in own}
    assert sum(int(micros) for micros, _ in own) / 1000 < OWN_IMPORT_MS
