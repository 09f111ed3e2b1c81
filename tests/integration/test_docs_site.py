"""The documentation as a site: links lead somewhere, every page has its place, tables are made."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from pyengine.config import EngineSettings
from tests.support.docs import BLOCK, ROOT
from tools.docs_tables import TABLES, with_tables

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OUTSIDE = [path for path in sorted(ROOT.glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    """A page without its blocks of code."""
    return BLOCK.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("path", [*PAGES, *OUTSIDE], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for link in LINK.findall(prose(path)):
        target, _, anchor = link.partition("#")
        if re.match(r"\w+:", target):
            continue
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), link
        if DOCS in path.parents:
            assert DOCS in file.parents, f"{link} is not a part of the site"
        if anchor:
            assert anchor in anchors(file), link


def test_every_page_has_its_place_in_the_navigation() -> None:
    named = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(named) == [str(path.relative_to(DOCS)) for path in PAGES]


def test_the_reference_names_what_can_be_imported() -> None:
    names = [name for path in PAGES for name in re.findall(r"^::: (\S+)$", path.read_text(), re.M)]
    assert len(names) > 10
    for name in names:
        module, _, attribute = name.rpartition(".")
        try:
            import_module(name)
        except ModuleNotFoundError:
            assert hasattr(import_module(module), attribute), name


def test_tables_are_made_of_the_code() -> None:
    places = [
        n for path in PAGES for n in re.findall(r"<!-- table: ([\w-]+) -->", path.read_text())
    ]
    assert sorted(places) == sorted(TABLES)
    made = with_tables("<!-- table: engine-settings -->")
    shown = [name for name in EngineSettings.__dataclass_fields__ if f"| `{name}` |" in made]
    assert len(shown) > 25
    with pytest.raises(KeyError):
        with_tables("<!-- table: of-nothing -->")
