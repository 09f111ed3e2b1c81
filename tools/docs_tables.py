"""Tables of the documentation that are made of the code while `make docs` builds the site.

A page holds a line `<!-- table: NAME -->`; this hook of MkDocs puts the table there. So no setting
is described twice.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

from pyengine.core.option import option_of
from pyengine.core.server_settings import ServerSettings
from pyengine.core.settings import EngineSettings

_PLACE = re.compile(r"^<!-- table: ([\w-]+) -->$", re.MULTILINE)


def settings_table(kind: Any) -> Iterator[str]:
    """A row for each setting: its name, its option on the command line, its default, its help."""
    yield "| setting | option | default | what it does |"
    yield "|---|---|---|---|"
    for field in dataclasses.fields(kind):
        option = option_of(field)
        if option.hidden:
            continue
        flag = option.flag or f"--{field.name.replace('_', '-')}"
        shown = "" if field.default in (None, ()) else f"`{field.default!r}`"
        words = option.help.replace("|", "\\|").replace("*", "\\*")
        yield f"| `{field.name}` | `{flag}` | {shown} | {words} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "engine-settings": lambda: settings_table(EngineSettings),
    "server-settings": lambda: settings_table(ServerSettings),
}


def with_tables(markdown: str) -> str:
    """The page with its tables. An unknown table is an error."""
    return _PLACE.sub(lambda place: "\n".join(TABLES[place[1]]()), markdown)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the tables of one page: MkDocs calls this for each."""
    return with_tables(markdown)
