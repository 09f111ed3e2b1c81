"""The command line: `pyengine generate`, `chat`, `serve`, `info` and `trace replay`."""

import atexit
import gc
import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING

from pyengine.utils.openmp import wait_briefly

if TYPE_CHECKING:
    from pyengine.cli.backend import EngineFactory


def main(factory: "EngineFactory | None" = None) -> None:
    """Run the command line; where its libraries are missing, name the extra that holds them.

    `factory` makes the engines; None: real ones.
    """
    wait_briefly()
    # Importing torch and transformers makes a million objects and frees none: looking for garbage
    # meanwhile takes a fifth of the time to the first token. `open_llm` turns it on again.
    gc.disable()
    end = _QuickEnd()
    atexit.register(end.leave)  # the first one that is registered is called last
    _prepare_streams()
    try:
        from pyengine.cli.app import app
        from pyengine.cli.status import report
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        if sys.argv[1:3] == ["trace", "replay"]:  # the base install has all that this needs
            from pyengine.cli.replay import run_bare

            raise SystemExit(run_bare(sys.argv[3:])) from None
        from pyengine.utils.packaging import needs_engine_extra

        print(f"error: {needs_engine_extra('the command line', 'typer')}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    try:
        app(obj=factory)
    except (KeyboardInterrupt, OSError) as error:  # commands handle their own; this is around them
        end.status = report(error)
        raise SystemExit(end.status) from None
    except SystemExit as left:
        end.status = left.code if isinstance(left.code, int) else None
        raise
    finally:
        _drop_what_cannot_be_said()


class _QuickEnd:
    """Has the process end once everything was closed and said.

    Else the interpreter would take what torch and transformers have made to pieces, a million
    objects, which takes seconds and gives back nothing that the system does not.
    """

    status: int | None = None
    """What the command ended with; None: in another way, which is the interpreter's to show."""

    def leave(self) -> None:
        """Called by `atexit`, when other threads have ended."""
        if self.status is None or "torch" not in sys.modules:
            return
        with suppress(OSError, ValueError):  # where not all can be said the interpreter tells
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.status)


def _drop_what_cannot_be_said() -> None:
    """Where standard error takes nothing (a full disk), what waits for it goes nowhere.

    The interpreter would try again when it ends, and change the status to 120.
    """
    try:
        sys.stderr.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


def _prepare_streams() -> None:
    """Have all three streams, and no text that they can't take or give."""
    for name, mode, errors in (
        ("stdin", "r", "surrogateescape"),
        ("stdout", "w", "backslashreplace"),
        ("stderr", "w", "backslashreplace"),
    ):
        if getattr(sys, name) is None:  # closed by who started us; else the next file is it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)
