"""The boundary to transformers: no log noise, no code from model folders, one kind of error."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyengine.errors import ConfigurationError, ModelLoadError, PyEngineError

_LONGEST_REASON = 1500  # maximum characters of another library's error text
_LONGEST_JSON = 1 << 25  # bytes of a file; the longest index of weights has about 15 MB


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn progress bars and warnings off inside."""
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
def load_errors(problem: str, *, way_out: str = "") -> Iterator[None]:
    """Turn errors inside into `ModelLoadError`s that begin with `problem` and end with `way_out`.

    On bad files transformers and its libraries raise nearly every type of error; this is the one
    place that converts them. Errors of pyengine pass. Out of memory, which is no fault of the
    files, becomes a `ConfigurationError`.
    """
    try:
        yield
    except PyEngineError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exceptions
        if _is_out_of_memory(error):
            raise ConfigurationError(
                f"{problem}: {reason_of(error)}; memory ran out: give this process more "
                "(`ulimit -v`), or take a smaller model or dtype"
            ) from error
        raise ModelLoadError(f"{problem}: {reason_of(error)}{way_out}") from error


def _is_out_of_memory(error: Exception) -> bool:
    """True if memory ran out; libraries in C++ and Rust only give the system's message."""
    return isinstance(error, MemoryError) or "cannot allocate memory" in str(error).lower()


def reason_of(error: BaseException) -> str:
    """The text of an error in one line; with its type unless the text is enough."""
    text = " ".join(str(error).split())
    if len(text) > _LONGEST_REASON:
        text = f"{text[:_LONGEST_REASON]} ..."
    speaks = isinstance(error, OSError | ImportError) or type(error) in (ValueError, Exception)
    name = type(error).__name__
    return text if text and speaks else f"{name}: {text}" if text else name


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if it is missing or damaged."""
    try:
        return read_object(path)
    except ModelLoadError:
        return {}


def read_object(path: Path) -> dict[str, Any]:
    """The object in the JSON file at `path`. Raises `ModelLoadError` as `read_value`."""
    value = read_value(path)
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} cannot be used: it has no object in it; get it again")
    return value


def read_value(path: Path) -> Any:
    """The value in the JSON file at `path`.

    Raises `ModelLoadError` for a file that is missing, no regular file, too long, or damaged.
    """
    try:
        if path.exists() and not path.is_file():
            raise ModelLoadError(f"{path} is not a regular file: model folders hold files only")
        if (size := path.stat().st_size) > _LONGEST_JSON:
            raise ModelLoadError(
                f"{path} has {size} bytes, and no such file has more than {_LONGEST_JSON}: "
                "get it again"
            )
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be used: {error}; get it again") from error


def required_code(settings: dict[str, Any], purpose: str) -> str:
    """The Python code that a file's `auto_map` names for `purpose`, as text; "": none."""
    entry = settings.get("auto_map")
    if isinstance(entry, dict):
        entry = entry.get(purpose)
    names = entry if isinstance(entry, list) else [entry]
    return ", ".join(sorted({str(name) for name in names if name}))


def remote_code(path: Path, code: str) -> ModelLoadError:
    """The refusal of a model whose file at `path` needs its own Python code."""
    return ModelLoadError(
        f"{path} asks for its own Python code ({code}), and pyengine never runs code out of "
        "model folders: choose a model that transformers itself knows"
    )
