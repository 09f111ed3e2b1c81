"""Text on standard output, notes on standard error.

Answers go to standard output unchanged. On a terminal, control characters in prompts, answers and
file names are escaped.
"""

import os
import sys
from typing import TextIO

# How control characters are written, except line ends and tabs.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
del _CONTROLS[ord("\n")], _CONTROLS[ord("\t")]

_BOLD, DIM, RED, GREEN, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[0m"
"""ANSI sequences for a terminal."""


def write(text: str, *, bold: bool = False, style: str = "") -> None:
    """Write to standard output and flush. On a terminal without NO_COLOR, in bold or a `style`."""
    _write(sys.stdout, text, _BOLD if bold else style)


def note(text: str, *, dim: bool = False) -> None:
    """Write a line to standard error."""
    _write(sys.stderr, f"{text}\n", DIM if dim else "")


def _write(stream: TextIO, text: str, style: str) -> None:
    if stream.isatty():
        text = text.translate(_CONTROLS)
        if style and not os.environ.get("NO_COLOR"):
            text = f"{style}{text}{_PLAIN}"
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        error.filename = stream.name
        raise
