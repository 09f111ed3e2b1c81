"""Folders that are built once and then only read."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from pyengine.core.errors import ModelLoadError

CACHE_VARIABLE = "PYENGINE_CACHE"


def cache_root() -> Path:
    """Where converted models live: `$PYENGINE_CACHE`, or the platform's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pyengine"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pyengine"


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`; where it does not exist, let `build` fill a folder that becomes it.

    The folder appears under its name in one step, complete: a build that fails or is killed
    leaves nothing under that name, and of two processes that build at once the first to
    finish wins and the other takes its result. Raises `ModelLoadError` where the cache cannot
    be written.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        workshop = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ModelLoadError(
            f"the converted model cannot be stored in {target.parent}: {error}; "
            f"set {CACHE_VARIABLE} to a folder that can be written"
        ) from error
    try:
        build(workshop)
        workshop.chmod(0o755)
        try:
            workshop.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    return target
