"""GET /v1/requests/{id}/cache: why the tokens of a recent request were not cached."""

from fastapi import APIRouter, Request

from pyengine.server.callers import caller_of
from pyengine.server.context import Context
from pyengine.server.errors import ApiError
from pyengine.server.routes.json_route import JsonRoute
from pyengine.server.schemas.responses import RequestCache

router = APIRouter(route_class=JsonRoute)


@router.get("/v1/requests/{request_id}/cache")
async def request_cache(request_id: str, request: Request, context: Context) -> RequestCache:
    """The cached tokens of a recent request's prompts by source, and why others were computed.

    The id is that of the response, or the client's own. Each key finds its own requests only.
    """
    key = caller_of(request.scope).key
    cache = context.explanations.find(key, request_id, context.disclosure)
    if cache is None:
        raise ApiError(
            404,
            f"no recent request of this key has the id {request_id[:200]!r}, or it has no output "
            "yet; the last 256 are kept",
            code="request_not_found",
        )
    return cache
