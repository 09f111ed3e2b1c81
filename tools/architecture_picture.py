"""Draw docs/images/architecture.svg from import rules, imports and docstrings.

    python -m tools.architecture_picture

Rows are the layers of import-linter's contract in pyproject.toml: a package imports only from lower
rows. An arrow is an import; arrows that follow from two others are omitted. A test compares the
picture with the code.
"""

import ast
import re
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pyengine"
PICTURE = ROOT / "docs/images/architecture.svg"
EXTENSION = {"_cpu": "cpu-py", "_kv": "kv-py"}
"""The modules of the extension, with the crate of each."""

WIDTH, BOX_WIDTH, BOX_HEIGHT, GAP, MARGIN = 980, 168, 54, 34, 12
Graph = dict[str, set[str]]


def layers() -> list[list[str]]:
    """Names of packages and modules, row by row, from the top."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    [rows] = [
        contract["layers"] for contract in contracts if contract.get("containers") == ["pyengine"]
    ]
    return [re.findall(r"\w+", row) for row in rows]


def files_of(name: str) -> list[Path]:
    """The source files of a package or module."""
    package = PACKAGE / name
    return sorted(package.rglob("*.py")) if package.is_dir() else [package.with_suffix(".py")]


def imports_of(name: str, known: set[str]) -> set[str]:
    """The other members of `known` that a package or module imports at run time."""
    found: set[str] = set()
    for path in files_of(name):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        types_only = {
            inner
            for node in tree.body
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if node in types_only:
                continue
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [dotted.split(".") for dotted in found]
    return {
        part[1] for part in parts if part[0] == "pyengine" and part[1:] and part[1] in known
    } - {name}


def graph() -> Graph:
    """The imports of each package, and the dependencies of modules of the extension and crates."""
    names = {name for row in layers() for name in row}
    found = {name: imports_of(name, names | set(EXTENSION)) for name in sorted(names)}
    crates = crate_dependencies()
    return {**found, **{module: crates[crate] for module, crate in EXTENSION.items()}, **crates}


def crate_dependencies() -> Graph:
    """The crates of the extension, each with those that it depends on."""
    found: Graph = {}
    for path in sorted((ROOT / "rust").glob("*/Cargo.toml")):
        cargo = tomllib.loads(path.read_text(encoding="utf-8"))
        found[path.parent.name] = set(cargo.get("dependencies", {}))
    reached, left = set[str](), [*EXTENSION.values()]
    while left:
        name = left.pop()
        reached.add(name)
        left += [below for below in found[name] & set(found) if below not in reached]
    return {name: found[name] & reached for name in sorted(reached)}


def reachable(edges: Graph, start: str) -> set[str]:
    """All nodes that are reachable from a node."""
    seen, left = set[str](), list(edges[start])
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += edges[name]
    return seen


def reduced(edges: Graph) -> Graph:
    """The graph without edges that follow from two others."""
    below = {name: reachable(edges, name) for name in edges}
    return {
        name: {target for target in targets if not any(target in below[via] for via in targets)}
        for name, targets in edges.items()
    }


def purpose(name: str) -> str:
    """The first words of a package's docstring, or of a crate's description."""
    crate = ROOT / "rust" / EXTENSION.get(name, name) / "Cargo.toml"
    if crate.exists():
        words = str(tomllib.loads(crate.read_text(encoding="utf-8"))["package"]["description"])
    else:
        path = PACKAGE / name / "__init__.py"
        path = path if path.exists() else path.parent.with_suffix(".py")
        words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"[:.;,(]", words.replace("`", ""))[0].strip()


def picture() -> str:
    """The picture as SVG."""
    bindings = set(EXTENSION.values())
    crates = [name for name in crate_dependencies() if name not in bindings]
    rows = [*layers(), [*EXTENSION], crates]
    places = {name: place for at, row in enumerate(rows) for name, place in placed(at, row)}
    height = len(rows) * (BOX_HEIGHT + GAP) - GAP + 2 * MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="system-ui, sans-serif">',
        "<title>Packages of pyengine: each imports only from the rows below it</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#fff"/>',
    ]
    edges = graph()
    arrows = reduced({name: edges[name] - bindings for name in places})
    for name, targets in arrows.items():
        below = sorted(targets, key=lambda target: places[target])
        for at, target in enumerate(below):
            x, y = places[name]
            start = (x + BOX_WIDTH * (at + 1) // (len(below) + 1), y + BOX_HEIGHT)
            lines.append(line(start, places[target], [*places.values()]))
    for name, (x, y) in places.items():
        lines += box(name, x, y, "#ffedd5" if name in EXTENSION or name in crates else "#eef2ff")
    return "\n".join([*lines, "</svg>\n"])


def placed(row: int, names: list[str]) -> Iterator[tuple[str, tuple[int, int]]]:
    """The top left corner of each box of a row."""
    step = WIDTH // len(names)
    for at, name in enumerate(names):
        yield name, (step * at + (step - BOX_WIDTH) // 2, MARGIN + row * (BOX_HEIGHT + GAP))


def line(start: tuple[int, int], end: tuple[int, int], boxes: list[tuple[int, int]]) -> str:
    """A line from the bottom of one box to the top of another, around other boxes."""
    x, y = start
    to_x, to_y = end[0] + BOX_WIDTH // 2, end[1]
    path = f"M{x} {y}"
    for top in range(y + GAP, to_y, BOX_HEIGHT + GAP):
        straight = x + (to_x - x) * (top - y) // (to_y - y)
        across = free_place(straight, [left for left, row in boxes if row == top])
        path += curve(x, y, across, top) + f"V{top + BOX_HEIGHT}"
        x, y = across, top + BOX_HEIGHT
    path += curve(x, y, to_x, to_y)
    return f'<path d="{path}" fill="none" stroke="#8a93b8" stroke-width="1.5"/>'


def curve(x: int, y: int, to_x: int, to_y: int) -> str:
    """A curve that begins and ends vertically."""
    middle = (y + to_y) // 2
    return f"C{x} {middle} {to_x} {middle} {to_x} {to_y}"


def free_place(x: int, lefts: list[int]) -> int:
    """The position nearest to `x` that no box of a row covers."""
    for left in lefts:
        if left - MARGIN < x < left + BOX_WIDTH + MARGIN:
            sides = left - MARGIN, left + BOX_WIDTH + MARGIN
            return min(sides, key=lambda side: abs(side - x))
    return x


def box(name: str, x: int, y: int, fill: str) -> Iterator[str]:
    """A box with a name and its purpose."""
    middle = x + BOX_WIDTH // 2
    yield (
        f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{fill}" '
        'stroke="#4f5fb5"/>'
    )
    yield (
        f'<text x="{middle}" y="{y + 19}" text-anchor="middle" font-size="14" font-weight="600" '
        f'fill="#222">{escape(name)}</text>'
    )
    for at, line in enumerate(textwrap.wrap(purpose(name), 29)[:2]):
        yield (
            f'<text x="{middle}" y="{y + 35 + 14 * at}" text-anchor="middle" font-size="11" '
            f'fill="#555">{escape(line)}</text>'
        )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
