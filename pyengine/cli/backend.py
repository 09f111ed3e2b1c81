"""What the command line asks of an engine, and how it gets one.

Commands take the factory from typer's context object, so a test hands in a fake engine and
nothing here imports torch before a command really opens a model.
"""

import atexit
import gc
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pyengine.core.errors import ConfigurationError
from pyengine.core.outputs import RequestOutput
from pyengine.core.sampling_params import SamplingParams
from pyengine.core.settings import EngineSettings

if TYPE_CHECKING:
    import typer

    from pyengine.engine import AsyncEngine

_E = TypeVar("_E")


class StatsView(Protocol):
    """The part of the engine's statistics that the closing line reads."""

    @property
    def counters(self) -> Mapping[str, int]:
        """The block manager's counters; they only grow."""

    @property
    def num_drafts(self) -> int:
        """Decodes with drafts so far."""


class Engine(Protocol):
    """The part of `pyengine.LLM` that the commands use."""

    @property
    def model_path(self) -> Path:
        """The local folder the model was loaded from."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers, or None for a model without one."""

    def generate_iter(
        self, prompts: Any, sampling_params: Sequence[SamplingParams]
    ) -> Iterator[RequestOutput]:
        """Run a batch; each result when it has ended, `index` being its prompt's position."""

    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Run one prompt; every item holds the text so far."""

    def recording(self, path: Path) -> AbstractContextManager[None]:
        """Record what the block manager does meanwhile."""

    def apply_chat_template(self, messages: Any) -> list[int]:
        """The token ids of a conversation, ready for the assistant's answer."""

    def stats(self) -> StatsView:
        """The usage and the counters as of now."""

    def describe(self) -> Mapping[str, object]:
        """Versions, device, dtype, attention backend and why, pool size."""


@contextmanager
def ended(outputs: Iterator[RequestOutput]) -> Iterator[Iterator[RequestOutput]]:
    """Outputs to read; what is unfinished when the block is left is ended."""
    try:
        yield outputs
    finally:
        close = getattr(outputs, "close", None)  # a generator's
        if close is not None:
            close()


EngineFactory = Callable[[EngineSettings], Engine]


@contextmanager
def held_interrupt() -> Iterator[None]:
    """Have Ctrl-C wait for the end of the block; a second one does not.

    C extensions that are interrupted while they import NumPy go on without it, silently.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)
        if len(held) > 1:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if held:
        raise KeyboardInterrupt


@contextmanager
def _libraries() -> Iterator[None]:
    """Where torch is imported. Raises `ConfigurationError` where the process may not have it."""
    try:
        yield
    except ModuleNotFoundError:
        raise
    except (ImportError, MemoryError, OSError) as error:
        raise ConfigurationError(
            f"torch and transformers could not be loaded: {str(error) or type(error).__name__}; "
            "they map some 4 GB: look at the limits of this process (`ulimit -v`, `ulimit -n`), "
            "or install them again"
        ) from error


def open_llm(settings: EngineSettings) -> Engine:
    """Load the model and build a real engine. Imports torch and transformers."""
    with held_interrupt(), _libraries():
        from pyengine.engine import LLM

    return _settled(LLM(**asdict(settings)))


def open_async_engine(settings: EngineSettings) -> "AsyncEngine":
    """The same, for a server."""
    with held_interrupt(), _libraries():
        from pyengine.engine import AsyncEngine

    return _settled(AsyncEngine(**asdict(settings)))


def _settled(engine: _E) -> _E:
    gc.freeze()  # what was imported and loaded stays: later collections pass it over
    atexit.register(gc.unfreeze)  # at the end it goes as usual
    gc.enable()
    return engine


def factory_of(context: "typer.Context") -> EngineFactory:
    """The factory a caller handed in as the context object, else the one of real engines."""
    factory: EngineFactory | None = context.find_root().obj
    return factory or open_llm
