"""docs/explanation/architecture.md: its packages, files and imports are those of the tree."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.docs import ROOT, table

DOCUMENT = "docs/explanation/architecture.md"
PACKAGE = ROOT / "pyengine"
PACKAGES = sorted(file.parent.name for file in PACKAGE.glob("*/__init__.py"))
SAID = {row[0]: row for row in table(DOCUMENT, "package", "holds")}


def imported(path: Path) -> set[str]:
    """Packages of ours that a file imports when it runs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    types_only = {
        inner
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in types_only:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names]
    return {two[1] for two in parts if two[0] == "pyengine" and two[1] in (*PACKAGES, "_kv")}


def test_every_package_is_in_the_table_and_in_the_picture() -> None:
    assert len(PACKAGES) >= 10
    assert sorted(name for name in SAID if not name.startswith("rust/")) == PACKAGES
    crates = {f"rust/{file.parent.name}" for file in ROOT.glob("rust/*/Cargo.toml")}
    assert {name for name in SAID if name.startswith("rust/")} <= crates
    text = (ROOT / DOCUMENT).read_text(encoding="utf-8")
    [picture] = re.findall(r"^```\ncli\n.*?^```$", text, re.MULTILINE | re.DOTALL)
    assert sorted(set(re.findall(r"[a-z_]{3,}", picture)) & set(PACKAGES)) == PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_what_the_table_says(package: str) -> None:
    files = list((PACKAGE / package).rglob("*.py"))
    assert files
    real = set().union(*map(imported, files)) - {package}
    names = list(SAID)
    column = SAID[package][2]
    above = {name for name in names[: names.index(package)] if not name.startswith("rust/")}
    said = above if column == "all above" else set(re.findall(r"\w+", column))
    assert real == said


@pytest.mark.parametrize(
    ("package", "header"), [("engine", "file"), ("server", "module"), ("cluster", "part")]
)
def test_every_file_of_a_large_package_is_in_its_table(package: str, header: str) -> None:
    files = sorted(
        str(file.relative_to(PACKAGE / package)) for file in (PACKAGE / package).rglob("*.py")
    )
    assert len(files) > 10
    assert sorted(row[0] for row in table(DOCUMENT, header, "what it does")) == [
        name for name in files if not name.endswith("__init__.py")
    ]
