"""Rules of imports, held by import-linter, and the modules that `import pyengine` may load."""

import ast
import json
import re
import shutil
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.support.processes import run_program, run_python

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pyengine"
PACKAGES = {
    "attention",
    "cli",
    "cpu",
    "engine",
    "executor",
    "kernels",
    "kv_cache",
    "models",
    "request",
    "sampling",
    "scheduler",
    "speculation",
    "utils",
}
FEWEST_MODULES = 30
OWN_IMPORT_MS = 100


def lint(folder: Path, status: int) -> str:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    return run_program(command, cwd=folder, status=status).stdout


def test_contracts_are_kept_and_every_module_was_scanned() -> None:
    said = lint(ROOT, 0)
    seen = grimp.build_graph("pyengine", cache_dir=None).modules  # what import-linter looks at
    files = [path.relative_to(ROOT).with_suffix("") for path in PACKAGE.rglob("*.py")]
    assert seen == {".".join(path.parts).removesuffix(".__init__") for path in files}
    assert len(seen) >= FEWEST_MODULES
    assert re.search(r"Contracts: [1-9]\d* kept, 0 broken", said), said
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} >= PACKAGES


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("scheduler", "import torch"),
        ("scheduler", "from pyengine.executor import model_runner"),
        ("executor", "import pyengine.speculation.policy"),
        ("executor/tensor_parallel", "import pyengine.engine.core"),
        ("executor/tensor_parallel", "import pyengine.sampling.sampler"),
        ("kv_cache", "import transformers"),
        ("sampling", "import pyengine.kv_cache"),
        ("attention", "import pyengine.models.loader"),
        ("engine", "import pyengine.cli"),
        ("engine", "import pyengine.llm"),
        ("utils", "import pyengine.kv_cache"),
        ("kv_cache", "import pyengine.cpu"),
        ("cpu", "import pyengine.kv_cache"),
        ("cpu", "import torch"),
        ("scheduler", "import pyengine.speculation.policy"),
        ("executor", "import pyengine.request.request"),
        ("executor", "import pyengine.scheduler.batch"),
        ("request", "import pyengine.scheduler.pins"),
        (
            "scheduler",
            "import typing\nif typing.TYPE_CHECKING:\n    import pyengine.engine",
        ),
    ],
)
def test_a_contract_breaks_when_it_should(tmp_path: Path, package: str, line: str) -> None:
    shutil.copytree(PACKAGE, tmp_path / "pyengine", ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "pyengine" / package / "intruder.py").write_text(f"{line}\n")
    said = lint(tmp_path, 1)
    assert f"pyengine.{package.replace('/', '.')}.intruder" in said, said


def imports_of_files(folder: Path) -> dict[str, set[str]]:
    """The files of ours that each file of a package imports, also for types and in functions."""
    code = (
        "import grimp, json; graph = grimp.build_graph('pyengine', cache_dir=None)\n"
        "print(json.dumps({name: [*graph.find_modules_directly_imported_by(name)]"
        " for name in graph.modules}))"
    )
    done = run_python(code, cwd=folder)
    return {name: set(imports) for name, imports in json.loads(done.stdout).items()}


def test_no_files_import_each_other_in_a_circle() -> None:
    imports = imports_of_files(ROOT)
    assert len(imports) > 200 and "pyengine.engine.core" in imports["pyengine.engine.loop"]
    TopologicalSorter(imports).prepare()


def test_a_circle_of_files_is_found(tmp_path: Path) -> None:
    for name, line in (("a", "if False:\n    import pyengine.b"), ("b", "import pyengine.a")):
        (tmp_path / "pyengine").mkdir(exist_ok=True)
        (tmp_path / "pyengine" / f"{name}.py").write_text(f"{line}\n")
    (tmp_path / "pyengine" / "__init__.py").touch()
    with pytest.raises(CycleError, match=r"pyengine\.b"):
        TopologicalSorter(imports_of_files(tmp_path)).prepare()


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


@pytest.mark.parametrize(("module", "package"), [("_kv", "kv_cache"), ("_cpu", "cpu")])
def test_each_module_of_the_extension_has_one_importer(module: str, package: str) -> None:
    """import-linter does not see compiled modules, so this one is checked by hand."""
    users = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        if any(name.startswith(f"pyengine.{module}") for name in imported(path))
    }
    assert users == {package}


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("import pyengine._kv", "_cpu"),
        ("from pyengine import BlockManager", "_cpu"),
        ("import pyengine.kv_cache.pool", "_cpu"),
        ("import pyengine.scheduler", "_cpu"),
        ("from pyengine._cpu import CpuAttention", "_kv"),
        ("from pyengine.cpu import CpuAttention, threads", "_kv"),
    ],
)
def test_one_module_of_the_extension_does_not_load_the_other(line: str, other: str) -> None:
    loaded = run_python(f"import sys; {line}; print(sorted(sys.modules))").stdout
    assert f"'pyengine.{other}'" not in loaded
    assert "'torch'" not in loaded


def test_both_modules_of_the_extension_are_in_one_file_and_have_exceptions_of_their_own() -> None:
    names = run_python(
        "from pyengine import _cpu, _kv\n"
        "assert _cpu.__file__ == _kv.__file__ and _cpu.__name__ == 'pyengine._cpu'\n"
        "shared = set(_cpu.__all__) & set(_kv.__all__) - {'__version__'}\n"
        "assert not any(getattr(_cpu, name) is getattr(_kv, name) for name in shared)\n"
        "print(*sorted(shared))"
    )
    assert names.stdout.split() == ["BufferError", "ConfigError", "HandleError"]


def test_no_module_imports_from_the_package_itself() -> None:
    for path in PACKAGE.rglob("*.py"):
        names = {name for name in imported(path) if re.fullmatch(r"pyengine(\.\w+)?", name)}
        assert names <= {f"pyengine.{package}" for package in PACKAGES}, path


def test_import_pyengine_loads_numpy_and_nothing_else() -> None:
    loaded = run_python(
        "import json, sys; before = set(sys.modules)\n"
        "import pyengine; pyengine.BlockManager\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    others = set(json.loads(loaded.stdout)) - set(sys.stdlib_module_names)
    assert "pyengine" in others
    assert others <= {"pyengine", "numpy"}


@pytest.mark.parametrize("module", ["pyengine.scheduler", "pyengine.kv_cache", "pyengine.cli.app"])
def test_no_torch_before_it_is_needed(module: str) -> None:
    heavy = run_python(
        f"import sys, {module}; print({{'torch', 'transformers', 'tokenizers'}} & set(sys.modules))"
    )
    assert heavy.stdout.strip() == "set()"


def test_own_import_time_is_small() -> None:
    """Self time of our own modules, the extension included, by the interpreter's own clock."""
    done = run_program([sys.executable, "-X", "importtime", "-c", "import pyengine"])
    own = re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(pyengine\S*)", done.stderr)
    assert "pyengine" in {name for _, name in own}
    assert sum(int(micros) for micros, _ in own) / 1000 < OWN_IMPORT_MS
