"""One place that turns what may go wrong in a command into a message and an exit status."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from pyengine.core.errors import InvalidRequestError, PyEngineError

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130


@contextmanager
def guarded() -> Iterator[None]:
    """Print an error of ours without a traceback and leave; Ctrl-C leaves with status 130.

    Status 2: the input was refused and nothing ran. Status 1: anything else that the engine
    reports. Errors of other kinds are defects and keep their traceback.
    """
    try:
        yield
    except InvalidRequestError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from error
    except PyEngineError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(FAILED) from error
    except KeyboardInterrupt as error:
        typer.echo("\ninterrupted", err=True)
        raise typer.Exit(INTERRUPTED) from error
