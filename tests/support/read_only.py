"""Folders in which nothing can be written."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing can be written in a folder meanwhile: a read-only mount, or modes that forbid it.

    Skips the test for a root that may not mount, because modes do not stop it.
    """
    is_root = os.geteuid() == 0
    mount = ["mount", "--bind", "-o", "ro", str(folder), str(folder)]
    if is_root and subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("root may not mount here")
    if not is_root:
        _forbid_writing(folder)
    try:
        with pytest.raises(OSError):
            (folder / "new").touch()
        yield
    finally:
        if is_root:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        else:
            folder.chmod(0o700)
            for path in folder.iterdir():
                path.chmod(0o600)


@contextmanager
def another_user(folder: Path) -> Iterator[None]:
    """This process is a user who owns the folder, and may not write in it. For root."""
    user = 12345
    for path in (folder, *folder.iterdir()):
        os.chown(path, user, -1)
    _forbid_writing(folder)
    os.seteuid(user)
    try:
        with pytest.raises(PermissionError):
            (folder / "new").touch()
        yield
    finally:
        os.seteuid(0)


def _forbid_writing(folder: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o400)
    folder.chmod(0o500)
