"""Folders that are built once and then only read."""

import fcntl
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyengine.errors import ModelLoadError
from pyengine.models.transformers_calls import load_errors

CACHE_VARIABLE = "PYENGINE_CACHE"
_WORKSHOP = re.compile(r"\..+-[a-z0-9_]{8}")
_SPARE_BYTES = 64 << 20
"""Left free on the disk beside what is built: the tokenizer, and whoever else writes."""


def cache_root() -> Path:
    """Where converted models live: `$PYENGINE_CACHE`, or the platform's cache folder."""
    with load_errors("there is no folder for the cache", way_out=f"; set {CACHE_VARIABLE}"):
        if chosen := os.environ.get(CACHE_VARIABLE):
            return Path(chosen).expanduser()
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "pyengine"
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "pyengine"


def build_once(target: Path, build: Callable[[Path], None], *, num_bytes: int = 0) -> Path:
    """Return `target`; where it does not exist, let `build` fill a folder that becomes it.

    The folder appears under its name in one step, complete: a build that fails or is killed
    leaves nothing under that name, and of two processes that build at once the first to
    finish wins and the other takes its result. What a killed one left elsewhere is removed by
    the next build. `num_bytes` is what will be written. Raises `ModelLoadError` where the cache
    cannot be written or has no room for that much.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent)
        _check_room(target.parent, num_bytes)
        with _workshop(target) as workshop:
            build(workshop)
            workshop.chmod(0o755)
            try:
                workshop.rename(target)
            except OSError:
                if not target.is_dir():
                    raise
    except OSError as error:
        raise ModelLoadError(
            f"the converted model cannot be stored in {target.parent}: {error}; "
            f"set {CACHE_VARIABLE} to a folder that can be written and has room"
        ) from error
    return target


def discard(target: Path) -> None:
    """Remove a built folder, so that it is built again; readers keep what they have mapped."""
    doomed = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    target.rename(doomed / target.name)
    shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def _workshop(target: Path) -> Iterator[Path]:
    """A folder beside `target` to build in, locked as long as this process lives."""
    while True:
        workshop = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            handle = os.open(workshop, os.O_RDONLY)
        except FileNotFoundError:  # somebody took it for abandoned
            continue
        with suppress(OSError):  # a file system without locks: then nobody removes it either
            fcntl.flock(handle, fcntl.LOCK_EX)
        if workshop.is_dir():  # and nobody did so before it was locked
            break
        os.close(handle)
    try:
        yield workshop
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
        os.close(handle)


def _remove_abandoned(folder: Path) -> None:
    """Remove the workshops in `folder` whose process is gone: nobody holds their lock."""
    for path in folder.iterdir():
        if not _WORKSHOP.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes and free < num_bytes + _SPARE_BYTES:
        raise ModelLoadError(
            f"the converted model takes {readable_size(num_bytes)} in {folder}, where "
            f"{readable_size(free)} are free: make room, or set "
            f"{CACHE_VARIABLE} to a folder elsewhere"
        )


def readable_size(num_bytes: int) -> str:
    """A number of bytes as people say it: `1.3 GB`."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes / 1e3:.1f} kB"
