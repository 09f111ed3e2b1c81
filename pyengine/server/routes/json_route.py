"""Request bodies as strict JSON, parsed without blocking the event loop.

NaN, lone surrogates and deep nesting are refused. A body is cheap to send and can be expensive to
parse, so its items are counted first, a slice at a time. Large bodies are parsed one at a time.
"""

import asyncio
import reprlib
from collections.abc import Callable, Coroutine
from math import isfinite
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from pyengine.server.errors import ApiError

SMALL_BODY = 1 << 14
"""Smaller bodies are parsed without counting."""
SLICE = 1 << 16
"""Bytes that are counted before other tasks of the event loop run."""
MAX_CONTAINERS = 1 << 15
"""Objects and lists of a body."""
MAX_STRINGS = 1 << 16
"""Strings of a body, field names included."""
MAX_OTHER_ITEMS = 1 << 16
"""Items of a body outside of its prompt or tokens, at any depth."""
MAX_FIELDS = 1 << 11
"""Fields of one object."""
_BYTES_PER_ITEM = 8
"""The limit of items is the limit of bytes divided by this."""
_LONG_NUMBER = b"0" * 64
"""Parsing a number of n digits takes O(n^2)."""
_DIGITS_AS_0 = bytes.maketrans(b"123456789", b"0" * 9)
_LISTS_OF_IDS = ("input", "prompt", "tokens")


def _infinite(body: dict[str, Any]) -> ApiError:
    """The error for a body with an infinite number; it names the first field that has one."""
    name, field = next((name, field) for name, field in body.items() if _is_infinite(field))
    shown = f"{reprlib.repr(name)[1:-1]}={reprlib.repr(field)}"
    message = f"{shown}: a number beyond 1.8e308 is not finite: send a smaller one"
    return ApiError(400, message, code="invalid_json")


def _is_infinite(field: Any) -> bool:
    """True if there is an infinite number anywhere within."""
    values = [field]
    while values:
        value = values.pop()
        if isinstance(value, float) and not isfinite(value):
            return True
        if isinstance(value, dict | list):
            values += value.values() if isinstance(value, dict) else value
    return False


async def check_counts(body: bytes, max_items: int) -> None:
    """Raise `ApiError` (400) if the body has too many items to be parsed at once.

    Ignores the inside of strings. Yields to other tasks after each slice.
    """
    containers = strings = items = 0
    is_text, rest = False, b""
    for start in range(0, len(body), SLICE):
        # Remove pairs of backslashes: at most one is left before a quote.
        part = (rest + body[start : start + SLICE]).replace(b"\\\\", b"")
        rest = b"\\" if part.endswith(b"\\") else b""
        pieces = part.removesuffix(rest).replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[is_text::2])
        strings += len(pieces) // 2
        is_text ^= len(pieces) % 2 == 0
        if _LONG_NUMBER in outside.translate(_DIGITS_AS_0):
            raise ApiError(400, "the body has a number of 64 digits or more", code="invalid_json")
        containers += outside.count(b"{") + outside.count(b"[")
        items += outside.count(b",")
        for count, limit, kind in (
            (containers, MAX_CONTAINERS, "objects and lists"),
            (strings, MAX_STRINGS, "strings"),
            (items, max_items, "items"),
        ):
            if count > limit:
                raise _too_many(limit, kind)
        await asyncio.sleep(0)


def check_items(body: dict[str, Any]) -> None:
    """Raise `ApiError` (400) if the body has too many items to be validated.

    Token ids are not counted: their validation is fast and stops at the first error.
    """
    budget = MAX_OTHER_ITEMS
    containers: list[Any] = [value for name, value in body.items() if name not in _LISTS_OF_IDS]
    fields = len(body)
    while True:
        if fields > MAX_FIELDS:
            raise _too_many(MAX_FIELDS, "fields in one object")
        if not containers:
            return
        value = containers.pop()
        fields = 0
        if isinstance(value, dict):
            fields = len(value)
            budget -= fields
            containers += value.values() if fields <= MAX_FIELDS else ()
        elif isinstance(value, list):
            budget -= len(value)
            containers += value if budget >= 0 else ()
        elif isinstance(value, float) and not isfinite(value):  # 1e999 is JSON
            raise _infinite(body)
        if budget < 0:
            raise _too_many(MAX_OTHER_ITEMS, "items beside the prompt")


def _too_many(limit: int, kind: str) -> ApiError:
    return ApiError(
        400,
        f"the body has more than {limit:,} {kind}, the limit of this server: send less at a time",
        code="too_many_items",
    )


def read_json(body: bytes) -> Any:
    """Parse a body; fields set to null are left out. Raises `ApiError` (400) for invalid JSON."""
    try:
        parsed = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(parsed, dict):
        return None if isinstance(parsed, list) else parsed  # keep long lists out of the error
    check_items(parsed)
    return {name: value for name, value in parsed.items() if value is not None}


class JsonRequest(Request):
    """A request whose body is parsed by pydantic."""

    async def json(self) -> Any:
        """See `read_json`."""
        body = await self.body()
        if len(body) <= SMALL_BODY:
            return read_json(body)
        context = self.app.state.context
        max_items = max(MAX_OTHER_ITEMS, context.settings.max_body_bytes // _BYTES_PER_ITEM)
        async with context.reading:
            await check_counts(body, max_items)
            parsed = read_json(body)
            await asyncio.sleep(0)  # let other tasks run before this body is validated
        return parsed


class JsonRoute(APIRoute):
    """A route that receives a `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See `APIRoute`."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle
