"""Engines of commands, and their factories.

Commands get the factory from typer's context object, so tests can pass a fake engine. Importing
this module does not import the engine.
"""

import atexit
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from pyengine.cli.status import interruptible_imports
from pyengine.cli.terminal import note
from pyengine.config import EngineSettings
from pyengine.errors import ConfigurationError
from pyengine.outputs import RequestOutput
from pyengine.utils.packaging import EMBEDDED_NAME, require_engine_extra

if TYPE_CHECKING:
    import typer

    from pyengine.async_engine import AsyncEngine
    from pyengine.llm import LLM

_E = TypeVar("_E")


Engine: TypeAlias = "LLM"
"""The engine of a command; tests pass one that has the methods that the command calls."""


@contextmanager
def ended(outputs: Iterator[RequestOutput]) -> Iterator[Iterator[RequestOutput]]:
    """Iterate over outputs, and abort unfinished requests at the end of the block."""
    try:
        yield outputs
    finally:
        close = getattr(outputs, "close", None)  # a generator's
        if close is not None:
            close()


EngineFactory = Callable[[EngineSettings], Engine]


@contextmanager
def libraries() -> Iterator[None]:
    """Import the engine within this block. Ctrl-C ends the process at once.

    Raises `ConfigurationError` if one of its libraries cannot be loaded.
    """
    try:
        require_engine_extra("the engine")
    except ModuleNotFoundError as error:
        raise ConfigurationError(str(error)) from None
    try:
        with interruptible_imports():
            yield
    except ModuleNotFoundError:
        raise
    except (ImportError, MemoryError, OSError) as error:
        raise ConfigurationError(
            f"a library of the engine could not be loaded: {str(error) or type(error).__name__}; "
            "raise the limits of the process (`ulimit -v`, `ulimit -n`), or reinstall the library"
        ) from None


def open_llm(settings: EngineSettings) -> Engine:
    """Load the model and build a real engine."""
    with libraries():
        _note_loading(settings)
        from pyengine.llm import LLM

    return _frozen(LLM(**asdict(settings)))


def open_async_engine(settings: EngineSettings) -> "AsyncEngine":
    """Load the model and build an engine for a server."""
    with libraries():
        _note_loading(settings)
        from pyengine.async_engine import AsyncEngine

    return _frozen(AsyncEngine(**asdict(settings)))


def _note_loading(settings: EngineSettings) -> None:
    """Say at once what is loaded: imports may take seconds."""
    demo = f"the demo model, {EMBEDDED_NAME},"
    note(f"loading {demo if settings.model is None else settings.model} ...", dim=True)


def _frozen(engine: _E) -> _E:
    gc.freeze()  # imported modules and weights are permanent: exclude them from collections
    atexit.register(gc.unfreeze)
    gc.enable()
    return engine


def factory_of(context: "typer.Context") -> EngineFactory:
    """The factory in the context object, by default that of real engines."""
    factory: EngineFactory | None = context.find_root().obj
    return factory or open_llm
