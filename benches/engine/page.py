"""Tables of docs/benchmarks/engine.md: printed, and written between their marks if asked for."""

from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/benchmarks/engine.md"
MANAGER = PAGE.with_name("block-manager.md")


def has_place(name: str, page: Path) -> bool:
    """True if the page has the marks of this table."""
    return f"<!-- {name} -->\n" in page.read_text(encoding="utf-8")


def publish(name: str, lines: Iterable[str], *, write: bool, page: Path = PAGE) -> None:
    """Print; with `write`, replace what is between `<!-- name -->` and `<!-- end of name -->`."""
    text = "\n".join(lines)
    print(text)
    if not write:
        return
    before, mark, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not (mark and end):
        raise ValueError(f"{page} has no marks <!-- {name} --> and <!-- end of {name} -->")
    page.write_text(f"{before}{mark}{text}\n{end}{after}", encoding="utf-8")
