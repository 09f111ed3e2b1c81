"""The command line: `pyengine generate`, `chat`, `info` and `trace replay`."""

import gc
import os
import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyengine.cli.backend import EngineFactory


_ESCAPED = "backslashreplace"


def main(factory: "EngineFactory | None" = None) -> None:
    """Run the command line; where its libraries are missing, name the extra that holds them.

    `factory` makes the engines; None: real ones.
    """
    # Threads of torch's OpenMP spin while they wait for each other. Where they do not, a step of
    # one row takes 1.6 times as long; where they do, and another process is on one of two cores,
    # it takes two to four times as long as it has to. Spinning briefly is never the slowest
    # (docs/performance.md). OpenMP reads the setting when torch is first imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "4000")
    # Importing torch and transformers makes a million objects and frees none: looking for garbage
    # meanwhile takes a fifth of the time to the first token. `open_llm` turns it on again.
    gc.disable()
    try:
        from pyengine.cli.app import app
        from pyengine.cli.options import report
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        from pyengine.core.distribution import needs_engine_extra

        print(f"error: {needs_engine_extra('the command line', 'typer')}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:  # commands handle their own
        raise SystemExit(130) from None
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what can't be encoded or decoded is no accident
            stream.reconfigure(errors="surrogateescape" if stream is sys.stdin else _ESCAPED)
    try:
        app(obj=factory)
    except OSError as error:  # commands handle their own; this is help that can't be printed
        raise SystemExit(report(error)) from None
