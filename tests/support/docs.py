"""Code and tables in Markdown documents: found, run, compared with what the document says."""

import re
from pathlib import Path

from tests.support.forked import run_forked
from tests.support.processes import run_python

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^\s*print\(.*\)  # (.+)$", re.MULTILINE)


def blocks(document: str, language: str) -> list[str]:
    """The code blocks of a document (a path from the root) in one language."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return [code for name, code in BLOCK.findall(text) if name == language]


def commands(document: str) -> list[list[str]]:
    """The words of each command in its console blocks."""
    lines = "".join(blocks(document, "console")).splitlines()
    return [line.split("#")[0].split() for line in lines if line.strip()]


def printed(code: str) -> list[str]:
    """The expected output, from comments after the code's prints."""
    return PRINTED.findall(code)


def run(code: str, *, has_torch: bool = False) -> str:
    """The output of the code at the root, in a new process; `has_torch`: torch is imported."""
    return (run_forked(code, timeout=300) if has_torch else run_python(code)).stdout


def table(document: str, *header: str) -> list[list[str]]:
    """The cells below the one table whose header begins with these cells, without backquotes."""
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    cells = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if line.startswith("|")
        else []
        for line in lines
    ]
    [start] = [at for at, row in enumerate(cells) if row[: len(header)] == list(header)]
    end = next((at for at in range(start, len(cells)) if not cells[at]), len(cells))
    return cells[start + 2 : end]
