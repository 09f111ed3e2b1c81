"""A GGUF file that is open: its header, and its tensors by ordinary reads.

It is not mapped, so a file may be cut or removed later; a change during a read is refused.
"""

import hashlib
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.errors import ModelLoadError
from pyengine.models.gguf_header import GGUFArray, GGUFTensor, read_header
from pyengine.models.transformers_calls import load_errors

Bytes = npt.NDArray[np.uint8]

_LENGTH = struct.Struct("<Q")
_LONGEST_ARRAY = 1 << 28


class GGUFFile:
    """An open GGUF file, its header and its tensors.

    Raises `ModelLoadError` as `read_header` does, and for a file that changed since it was opened.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._status = os.fstat(descriptor)
        if not stat.S_ISREG(self._status.st_mode):
            raise ModelLoadError(f"{path} is not a regular file: name a GGUF file")
        self.header = read_header(path, descriptor)

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> "Iterator[GGUFFile]":
        """The file at `path`; checks at the end that it is still the same."""
        with load_errors(f"{path} cannot be read"), open(path, "rb", opener=_opened) as stream:
            file = cls(path, stream.fileno())
            yield file
            file.check_unchanged()

    def read(self, tensor: GGUFTensor, out: Bytes) -> None:
        """Read the bytes of `tensor` into `out`."""
        view, done = memoryview(out.data), 0
        while done < len(view):
            num_bytes = os.preadv(self._descriptor, [view[done:]], tensor.offset + done)
            if num_bytes == 0:
                raise ModelLoadError(
                    f"{self.path} was cut while it was read: {tensor.name!r} has {done} of "
                    f"{len(view)} bytes; get it again"
                )
            done += num_bytes

    def texts(self, array: GGUFArray) -> list[str]:
        """The strings of an array in the header."""
        data = self._bytes_of(array)
        unpack, width = _LENGTH.unpack_from, _LENGTH.size
        texts, at = [], 0
        for _ in range(array.length):
            (length,) = unpack(data, at)
            at += width
            texts.append(data[at : at + length].decode("utf-8", "replace"))
            at += length
        return texts

    def numbers(self, array: GGUFArray) -> "npt.NDArray[Any]":
        """The numbers of an array in the header."""
        assert array.dtype is not None
        return np.frombuffer(self._bytes_of(array), array.dtype)

    def _bytes_of(self, array: GGUFArray) -> bytes:
        """The items of an array as they are in the file, whose header was checked."""
        num_bytes = array.end - array.start
        if num_bytes > _LONGEST_ARRAY:
            raise ModelLoadError(
                f"{self.path} has an array of {num_bytes} bytes in its header, and no vocabulary "
                f"has more than {_LONGEST_ARRAY}: get it again"
            )
        data = os.pread(self._descriptor, num_bytes, array.start)
        if len(data) < num_bytes:
            raise ModelLoadError(f"{self.path} was cut while it was read; get it again")
        return data

    def check_unchanged(self) -> None:
        """Raise if the file was written to since it was opened."""
        now = os.fstat(self._descriptor)
        before = self._status
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise ModelLoadError(
                f"{self.path} was changed while it was read: load it again when it is complete"
            )


def _opened(path: str, flags: int) -> int:
    """Open without waiting for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def file_digest(path: Path) -> bytes:
    """The SHA-256 digest of a file."""
    with load_errors(f"{path} cannot be read"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
