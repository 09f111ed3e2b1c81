"""Bodies as strict JSON: no NaN, no half characters, no nesting without end."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from pyengine.server.errors import ApiError


class JsonRequest(Request):
    """A request whose body is read by pydantic's parser."""

    async def json(self) -> Any:
        """The body; fields that are null are left out. Raises `ApiError` (400) for no JSON."""
        body = await self.body()
        try:
            found = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from error
        if not isinstance(found, dict):
            return found
        return {name: value for name, value in found.items() if value is not None}


class JsonRoute(APIRoute):
    """A route that takes such requests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See `APIRoute`."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle
