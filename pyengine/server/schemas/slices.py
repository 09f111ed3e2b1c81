"""Long lists of a response, which are made and serialized in slices.

A list of a hundred thousand log-probabilities takes seconds. In slices, the event loop can run in
between; see `JsonThread`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

_to_json = partial(to_json, inf_nan_mode="null")  # as pydantic's models do: NaN is not JSON
_ITEMS_AT_ONCE = 32
"""Items that are serialized by one call, which holds the interpreter's lock."""
_SECONDS_AT_ONCE = 0.005
_FEW_ITEMS = 16
_FEW_MODELS = 32


class SlicedList:
    """A list whose items are made whenever it is iterated, such as while it is serialized.

    `make` returns an iterator over `count` items: JSON values or pydantic models all of whose
    fields are set. It may be called by any thread.
    """

    def __init__(self, count: int, make: Callable[[], Iterator[Any]]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return self._make()


def items(count: int, make: Callable[[], Iterator[Any]]) -> Any:
    """A list of these items. A `SlicedList` stands for more than one."""
    return SlicedList(count, make) if count > 1 else list(make())


def is_long(model: BaseModel) -> bool:
    """True if a response should be serialized on a thread."""
    return _num_items(model) > _FEW_ITEMS


def _num_items(value: Any) -> int:
    """The items of sliced lists; any number of models, which take time too, counts as one."""
    if isinstance(value, SlicedList):
        return len(value)
    if isinstance(value, BaseModel):
        return sum([_num_items(field) for field in value.__dict__.values()])
    if isinstance(value, list) and value and isinstance(value[0], BaseModel):
        count = sum([_num_items(item) for item in value])
        return count if len(value) <= _FEW_MODELS else count + _FEW_ITEMS + 1
    return 0


def json_slices(model: BaseModel) -> Iterator[bytes]:
    """The fields of a model that were set, as JSON in pieces."""
    if not _is_composed(model):
        yield model.model_dump_json(exclude_unset=True).encode()
        return
    before = b"{"
    for name in type(model).model_fields:
        if name in model.model_fields_set:
            yield b"%b%b:" % (before, to_json(name))
            yield from _slices_of_value(getattr(model, name))
            before = b","
    yield b"}"


def _is_composed(value: Any) -> bool:
    """True if there is a sliced list, or a list of models, anywhere within."""
    if isinstance(value, BaseModel):
        return any(_is_composed(field) for field in value.__dict__.values())
    is_of_models = isinstance(value, list) and bool(value) and isinstance(value[0], BaseModel)
    return is_of_models or isinstance(value, SlicedList)


def _slices_of_value(value: Any) -> Iterator[bytes]:
    if isinstance(value, BaseModel):
        yield from json_slices(value)
    elif isinstance(value, SlicedList):
        rest, before = iter(value), b"["
        while part := list(islice(rest, _ITEMS_AT_ONCE)):
            yield before + _to_json(part)[1:-1]
            before = b","
        yield b"]"
    elif _is_composed(value):
        before = b"["
        for item in value:
            yield before
            yield from json_slices(item)
            before = b","
        yield b"]"
    else:
        yield _to_json(value)


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
