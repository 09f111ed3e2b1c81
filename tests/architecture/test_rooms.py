"""docs/explanation/architecture.md: its rooms, files and imports are those of the tree."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.docs import ROOT, table

DOCUMENT = "docs/explanation/architecture.md"
PACKAGE = ROOT / "pyengine"
ROOMS = sorted(file.parent.name for file in PACKAGE.glob("*/__init__.py"))
SAID = {row[0]: row for row in table(DOCUMENT, "room", "holds")}


def imported(path: Path) -> set[str]:
    """Rooms of ours that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names]
    return {two[1] for two in parts if two[0] == "pyengine" and two[1] in (*ROOMS, "_kv")}


def test_every_room_is_in_the_table_and_in_the_picture() -> None:
    assert len(ROOMS) >= 10
    assert sorted(name for name in SAID if not name.startswith("rust/")) == ROOMS
    crates = {f"rust/{file.parent.name}" for file in ROOT.glob("rust/*/Cargo.toml")}
    assert {name for name in SAID if name.startswith("rust/")} <= crates
    text = (ROOT / DOCUMENT).read_text(encoding="utf-8")
    [picture] = re.findall(r"^```\ncli\n.*?^```$", text, re.MULTILINE | re.DOTALL)
    assert sorted(set(re.findall(r"[a-z]{3,}", picture)) & set(ROOMS)) == ROOMS


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_the_table_says(room: str) -> None:
    files = list((PACKAGE / room).rglob("*.py"))
    assert files
    real = set().union(*map(imported, files)) - {room}
    names = list(SAID)
    column = SAID[room][2]
    above = {name for name in names[: names.index(room)] if not name.startswith("rust/")}
    said = above if column == "all above" else set(re.findall(r"\w+", column))
    assert real == said


@pytest.mark.parametrize(
    ("room", "header"), [("engine", "file"), ("server", "module"), ("cluster", "part")]
)
def test_every_file_of_a_large_room_is_in_its_table(room: str, header: str) -> None:
    files = sorted(str(file.relative_to(PACKAGE / room)) for file in (PACKAGE / room).rglob("*.py"))
    assert len(files) > 10
    assert sorted(row[0] for row in table(DOCUMENT, header, "what it does")) == [
        name for name in files if not name.endswith("__init__.py")
    ]
