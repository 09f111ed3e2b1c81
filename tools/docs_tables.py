"""Generate tables of the documentation from the code while `make docs` builds the site.

This hook of MkDocs replaces a line `<!-- table: NAME -->` by the table, so that no setting is
described twice.
"""

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyengine.config import EngineSettings
from pyengine.engine.offloading import COUNTERS as OFFLOAD_COUNTERS
from pyengine.engine.offloading import STORE_COUNTERS
from pyengine.engine.stats import EngineStats
from pyengine.kv_cache import COUNTERS, BlockManager
from pyengine.server.metrics import EngineMetrics
from pyengine.server.settings import ServerSettings
from pyengine.utils.settings import option_of

_PACKAGE = Path(__file__).parents[1] / "pyengine"
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


def modules_tables() -> Iterator[str]:
    """A heading for each package, and a row for each file: the first paragraph of its docstring."""
    for package in sorted(path.parent for path in _PACKAGE.rglob("__init__.py")):
        yield f"\n## {'.'.join(package.relative_to(_PACKAGE.parent).parts)}\n"
        yield f"{_summary(package / '__init__.py')}\n"
        files = sorted(path for path in package.glob("*.py") if path.stem != "__init__")
        if files:
            yield "| file | |"
            yield "|---|---|"
        for path in files:
            yield f"| `{path.name}` | {_summary(path)} |"


def _summary(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.sub(r"([|*<])", r"\\\1", paragraph)


class _IdleEngine:
    """The part of an idle engine that metrics read."""

    def stats(self) -> EngineStats:
        manager = BlockManager(1, 1)
        counters = {**manager.stats().as_dict(), "forked_tokens": 0, "forked_blocks": 0}
        store = dict.fromkeys({**OFFLOAD_COUNTERS, **STORE_COUNTERS, "restore_cost": ""}, 0.0)
        return EngineStats(manager.usage(), counters, 0, 0, 0, 0, store=store)

    def describe(self) -> dict[str, object]:
        return {}

    def observe(self, observer: Any) -> None:
        pass


def metrics_table() -> Iterator[str]:
    """A row for each metric of an engine: name, kind, help."""
    yield "| name | kind | meaning |"
    yield "|---|---|---|"
    engine: Any = _IdleEngine()
    for family in EngineMetrics(engine, model_name="").collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield f"| `{name}` | {family.type} | {family.documentation} |"


def counters_table() -> Iterator[str]:
    """A row for each counter of the block manager."""
    yield "| counter | meaning |"
    yield "|---|---|"
    for name, meaning in COUNTERS.items():
        yield f"| `{name}` | {meaning} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "engine-settings": lambda: settings_table(EngineSettings),
    "counters": counters_table,
    "metrics": metrics_table,
    "modules": modules_tables,
    "server-settings": lambda: settings_table(ServerSettings),
}


def with_tables(markdown: str) -> str:
    """The page with its tables; an unknown name is an error."""
    return _PLACE.sub(lambda place: "\n".join(TABLES[place[1]]()), markdown)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the tables of one page, for MkDocs."""
    return with_tables(markdown)
