"""Write the tables of docs/reference/request-fields.md from the server's own table of fields."""

from pathlib import Path

from pyengine.server.schemas.fields import field_tables

DOCUMENT = Path(__file__).parents[1] / "docs/reference/request-fields.md"
BEGIN, END = "<!-- fields -->\n", "<!-- end of fields -->"


def with_tables(text: str) -> str:
    """The page with the tables from the code."""
    head, _, rest = text.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise SystemExit(f"{DOCUMENT} has no place for the tables: {BEGIN.strip()} ... {END}")
    return f"{head}{BEGIN}" + "\n".join(field_tables()) + f"\n{END}{tail}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
