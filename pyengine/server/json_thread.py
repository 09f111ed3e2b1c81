"""Serializes long responses on a thread, a slice at a time."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from pydantic import BaseModel

from pyengine.server.schemas.slices import is_long, json_slices

_SECONDS_AT_ONCE = 0.005


class JsonThread:
    """One thread for all long responses, which take turns.

    More threads would not be faster, but would keep the event loop waiting for the interpreter's
    lock.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "pyengine-json")

    async def json_of(self, model: BaseModel) -> bytes:
        """A response as JSON. A short one is serialized at once."""
        slices = json_slices(model)
        if not is_long(model):
            return b"".join(slices)
        loop = asyncio.get_running_loop()
        parts: list[bytes] = []
        while part := await loop.run_in_executor(self._pool, _next, slices):
            parts.append(part)
        return await loop.run_in_executor(self._pool, b"".join, parts)

    def close(self) -> None:
        """End the thread once its current slice is done."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _next(slices: Iterator[bytes]) -> bytes:
    """Slices of some milliseconds; empty at the end."""
    parts, end = [], perf_counter() + _SECONDS_AT_ONCE
    for piece in slices:
        parts.append(piece)
        if perf_counter() > end:
            break
    return b"".join(parts)
