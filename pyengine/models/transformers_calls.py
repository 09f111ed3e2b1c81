"""The boundary to transformers: no log noise, no code from model folders, one kind of error."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyengine.errors import ConfigurationError, ModelLoadError, PyEngineError

_LONGEST_REASON = 1500
"""Characters of another library's error text that are passed on."""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Progress bars off and warnings silenced inside; as they were before, afterwards."""
    from transformers.utils import logging

    hf_logging: Any = logging  # its functions carry no types

    verbosity = hf_logging.get_verbosity()
    had_bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if had_bars:
            hf_logging.enable_progress_bar()


@contextmanager
def paused_gc() -> Iterator[None]:
    """No garbage collection inside: importing torch and transformers is a tenth faster so."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def load_errors(what: str, *, way_out: str = "") -> Iterator[None]:
    """Whatever fails inside is a `ModelLoadError` that begins with `what` and ends with `way_out`.

    Files of other people make transformers and the libraries below it raise nearly every type
    of error: this is the one place where they are turned. The errors of pyengine pass. Memory that
    runs out is no fault of the files: it is a `ConfigurationError`.
    """
    try:
        yield
    except PyEngineError:
        raise
    except Exception as error:  # a bare Exception is what the tokenizers library raises
        if _is_out_of_memory(error):
            raise ConfigurationError(
                f"{what}: {reason_of(error)}; there is not enough memory for it: give this process "
                "more (`ulimit -v`), or take a smaller model or dtype"
            ) from error
        raise ModelLoadError(f"{what}: {reason_of(error)}{way_out}") from error


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out: libraries in C++ and Rust say so in the system's words alone."""
    return isinstance(error, MemoryError) or "cannot allocate memory" in str(error).lower()


def reason_of(error: BaseException) -> str:
    """The text of an error in one line; its type too, where the text alone says little."""
    text = " ".join(str(error).split())
    if len(text) > _LONGEST_REASON:
        text = f"{text[:_LONGEST_REASON]} ..."
    speaks = isinstance(error, OSError | ImportError) or type(error) in (ValueError, Exception)
    name = type(error).__name__
    return text if text and speaks else f"{name}: {text}" if text else name


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where it is missing or damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def code_asked_for(settings: dict[str, Any], purpose: str) -> str:
    """The Python that a file's `auto_map` wants to be run for `purpose`, in words; "": none."""
    wanted = settings.get("auto_map")
    if isinstance(wanted, dict):
        wanted = wanted.get(purpose)
    names = wanted if isinstance(wanted, list) else [wanted]
    return ", ".join(sorted({str(name) for name in names if name}))


def remote_code(path: Path, asked: str) -> ModelLoadError:
    """The refusal of a model whose file at `path` needs its own Python code."""
    return ModelLoadError(
        f"{path} asks for its own Python code ({asked}), and pyengine never runs code out of "
        "model folders: choose a model that transformers itself knows"
    )
