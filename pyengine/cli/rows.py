"""Names and values below each other."""

from collections.abc import Iterator, Mapping

import typer


def print_rows(title: str, rows: Mapping[str, object]) -> None:
    """A title, and a line for each row; nested rows carry the names above them."""
    flat = dict(_flatten(rows))
    width = max(map(len, flat))
    typer.secho(title, bold=True)
    for key, value in flat.items():
        typer.echo(f"  {key:<{width}}  {value}")


def _flatten(rows: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in rows.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}: ")
        else:
            yield name, value
