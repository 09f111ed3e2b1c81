"""docs/explanation: the picture is that of the imports, the tables leave nothing out."""

import re
import tomllib

import pytest

from pyengine.utils.packaging import DISTRIBUTION
from tests.support.docs import ROOT, table
from tools.architecture_picture import PICTURE, graph, layers, picture, reduced

ARCHITECTURE = "docs/explanation/architecture.md"
DEPENDENCIES = "docs/explanation/dependencies.md"
WAY = "docs/explanation/find-your-way.md"


def test_the_picture_is_that_of_the_imports() -> None:
    drawn = PICTURE.read_text(encoding="utf-8")
    assert drawn == picture(), "python -m tools.architecture_picture draws it"
    assert "(../images/architecture.svg)" in (ROOT / ARCHITECTURE).read_text(encoding="utf-8")


def test_the_picture_looked() -> None:
    found = graph()
    assert "_kv" in found["kv_cache"] and "kv-core" in found["_kv"]
    assert "_cpu" in found["cpu"] and "cpu-kernels" in found["_cpu"]
    assert not found["_kv"] & found["_cpu"] - {"forks"}
    assert "torch" not in found
    assert [row for row in layers() if "engine" in row]
    ends: set[str] = set()
    assert reduced({"a": {"b", "c"}, "b": {"c"}, "c": ends})["a"] == {"b"}


def test_every_package_and_crate_is_in_the_table() -> None:
    said = [row[0] for row in table(ARCHITECTURE, "package", "holds")]
    packages = sorted(file.parent.name for file in (ROOT / "pyengine").glob("*/__init__.py"))
    assert len(packages) >= 8
    assert sorted(name for name in said if not name.startswith("rust/")) == packages
    crates = {f"rust/{file.parent.name}" for file in ROOT.glob("rust/*/Cargo.toml")}
    assert crates - {name for name in said if name.startswith("rust/")} <= {"rust/fuzz"}
    assert {name for name in said if name.startswith("rust/")} <= crates


def names(requirements: list[str | dict[str, str]]) -> set[str]:
    """The distributions of requirements; references to groups and to this project have none."""
    texts = [each for each in requirements if isinstance(each, str)]
    return {re.split(r"[\[<>=;~ ]", text)[0] for text in texts} - {DISTRIBUTION}


def test_every_dependency_has_its_reason() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = settings["project"]
    real = {("", name) for name in names(project["dependencies"])}
    groups = project["optional-dependencies"] | settings["dependency-groups"]
    for extra, requirements in groups.items():
        real |= {(extra, name) for name in names(requirements)}
    said = [
        (extra, name.strip())
        for extra, several, _ in table(DEPENDENCIES, "extra", "dependency")
        for name in several.split(",")
    ]
    assert len(said) == len(set(said))
    assert set(said) == real


def test_every_crate_has_its_reason() -> None:
    real: set[str] = set()
    for path in ROOT.glob("rust/*/Cargo.toml"):
        cargo = tomllib.loads(path.read_text(encoding="utf-8"))
        tables = [cargo, *cargo.get("target", {}).values()]
        for each in tables:
            for kind in ("dependencies", "dev-dependencies", "build-dependencies"):
                real |= set(each.get(kind, {}))
    ours = {path.parent.name for path in ROOT.glob("rust/*/Cargo.toml")}
    said = {
        name.strip() for row in table(DEPENDENCIES, "crate", "why") for name in row[0].split(",")
    }
    assert said == real - ours


ROWS = table(WAY, "question", "file")


@pytest.mark.parametrize(("question", "file", "symbol"), ROWS, ids=[row[2] for row in ROWS])
def test_the_way_leads_there(question: str, file: str, symbol: str) -> None:
    assert symbol in (ROOT / file).read_text(encoding="utf-8")
    assert f"**{question}**" in (ROOT / WAY).read_text(encoding="utf-8")


def test_the_newcomers_questions_are_answered() -> None:
    assert len(ROWS) >= 11
