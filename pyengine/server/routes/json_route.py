"""Bodies as strict JSON, read without keeping the event loop from others.

No NaN, no half characters, no nesting without end. A body is cheap to send and can be dear to
read: everything that takes time is counted first, a slice at a time, and large bodies are read one
after the other.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from pyengine.server.errors import ApiError

SMALL_BODY = 1 << 14
"""Bytes of a body that is read at once, whatever is in it."""
SLICE = 1 << 16
"""Bytes of a body that are counted before other tasks of the event loop run."""
MAX_CONTAINERS = 1 << 15
"""Objects and lists of a body."""
MAX_TEXTS = 1 << 16
"""Texts of a body, names of fields included."""
MAX_BESIDE = 1 << 16
"""Items of a body beside its prompt or tokens, at any depth."""
MAX_FIELDS = 1 << 11
"""Fields of one object."""
_BYTES_PER_ITEM = 8
"""A body may have an item for so many of the bytes that the server allows."""
_LONG_NUMBER = b"0" * 64
"""To read one of n digits takes n * n steps."""
_DIGITS_AS_0 = bytes.maketrans(b"123456789", b"0" * 9)
_LISTS_OF_IDS = ("prompt", "tokens")


async def check_counts(body: bytes, max_items: int) -> None:
    """Raise `ApiError` (400) if the body has more items than can be read at once.

    Counts outside of texts only, so a text may be as long as it likes. Gives way to other tasks
    after each slice.
    """
    containers = texts = items = 0
    is_text, rest = False, b""
    for start in range(0, len(body), SLICE):
        # Pairs of backslashes first: what is left before a quote is one backslash, or none.
        part = (rest + body[start : start + SLICE]).replace(b"\\\\", b"")
        rest = b"\\" if part.endswith(b"\\") else b""
        pieces = part.removesuffix(rest).replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[is_text::2])
        texts += len(pieces) // 2
        is_text ^= len(pieces) % 2 == 0
        if _LONG_NUMBER in outside.translate(_DIGITS_AS_0):
            raise ApiError(400, "the body has a number of 64 digits or more", code="invalid_json")
        containers += outside.count(b"{") + outside.count(b"[")
        items += outside.count(b",")
        for count, most, what in (
            (containers, MAX_CONTAINERS, "objects and lists"),
            (texts, MAX_TEXTS, "texts"),
            (items, max_items, "items"),
        ):
            if count > most:
                raise _too_many(most, what)
        await asyncio.sleep(0)


def check_items(found: dict[str, Any]) -> None:
    """Raise `ApiError` (400) for more items than are worth to be validated.

    Token ids are not counted: they are validated fast, and up to the first that is wrong.
    """
    left = MAX_BESIDE
    containers: list[Any] = [value for name, value in found.items() if name not in _LISTS_OF_IDS]
    fields = len(found)
    while True:
        if fields > MAX_FIELDS:
            raise _too_many(MAX_FIELDS, "fields in one object")
        if not containers:
            return
        value = containers.pop()
        fields = 0
        if isinstance(value, dict):
            fields = len(value)
            left -= fields
            containers += value.values() if fields <= MAX_FIELDS else ()
        elif isinstance(value, list):
            left -= len(value)
            containers += value if left >= 0 else ()
        if left < 0:
            raise _too_many(MAX_BESIDE, "items beside the prompt")


def _too_many(most: int, what: str) -> ApiError:
    return ApiError(
        400,
        f"the body has more than {most:,} {what}, the most that this server reads at once: send "
        "less at a time",
        code="too_many_items",
    )


def read_json(body: bytes) -> Any:
    """The body; fields that are null are left out. Raises `ApiError` (400) for no JSON."""
    try:
        found = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(found, dict):
        return None if isinstance(found, list) else found  # a list is no request, and may be long
    check_items(found)
    return {name: value for name, value in found.items() if value is not None}


class JsonRequest(Request):
    """A request whose body is read by pydantic's parser."""

    async def json(self) -> Any:
        """See `read_json`."""
        body = await self.body()
        if len(body) <= SMALL_BODY:
            return read_json(body)
        context = self.app.state.context
        max_items = max(MAX_BESIDE, context.settings.max_body_bytes // _BYTES_PER_ITEM)
        async with context.reading:
            await check_counts(body, max_items)
            found = read_json(body)
            await asyncio.sleep(0)  # others run before this body is validated
        return found


class JsonRoute(APIRoute):
    """A route that takes such requests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See `APIRoute`."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle
