"""Names and values below each other."""

from collections.abc import Iterator, Mapping

import typer


def print_rows(title: str, rows: Mapping[str, object]) -> None:
    """A title, and a line for each row; nested ones stay as they are, behind the name above."""
    flat = dict(_flatten(rows))
    width = max(map(len, flat), default=0)
    typer.secho(title, bold=True)
    for key, value in flat.items():
        typer.echo(f"  {key:<{width}}  {value}")


def _flatten(rows: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in rows.items():
        name = key.replace("_", " ")
        if isinstance(value, Mapping):
            yield from ((f"{name}: {one}", of_it) for one, of_it in value.items())
        else:
            yield name, value
