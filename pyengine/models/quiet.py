"""Loading without transformers' progress bars and remarks."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
