"""Serializes long responses on a thread, a slice at a time."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from pydantic import BaseModel

from pyengine.server.schemas.slices import is_long, json_slices

_SECONDS_AT_ONCE = 0.005


class JsonThread:
    """One thread for all long responses, which take turns.

    More threads would not be faster, but would make the event loop wait for the interpreter.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "pyengine-json")

    async def json_of(self, model: BaseModel) -> AsyncIterator[bytes]:
        """A response as JSON in pieces of some 100 KB. A short one is one piece, made at once."""
        slices = json_slices(model)
        if not is_long(model):
            yield b"".join(slices)
            return
        loop = asyncio.get_running_loop()
        while piece := await loop.run_in_executor(self._pool, _next, slices):
            yield piece

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
