"""GET /load and /v1/requests/{id}/cache, POST /reset_prefix_cache and /abort_requests, and POST
/v1/load_lora_adapter and /v1/unload_lora_adapter.
"""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import Field

from pyengine.request.lora import LoRARequest
from pyengine.server.callers import caller_of, require_admin
from pyengine.server.context import Context
from pyengine.server.errors import ApiError
from pyengine.server.routes.json_route import JsonRoute
from pyengine.server.schemas.requests import MAX_ITEMS, ClientModel, RequestId
from pyengine.server.schemas.responses import RequestCache, ServerModel

router = APIRouter(route_class=JsonRoute)


class Load(ServerModel):
    """HTTP requests in progress, running sequences, waiting requests: those of the caller's key,
    and for an admin those of all keys."""

    server_load: int
    num_running: int
    num_waiting: int


class AbortRequest(ClientModel):
    """The body of POST /abort_requests."""

    request_ids: Annotated[list[RequestId], Field(max_length=MAX_ITEMS, fail_fast=True)]


class LoadLoRAAdapter(ClientModel):
    """The body of POST /v1/load_lora_adapter. With `load_inplace` a loaded one is replaced."""

    lora_name: Annotated[str, Field(max_length=128)]
    lora_path: Annotated[str, Field(max_length=4096)]
    load_inplace: bool = False


class UnloadLoRAAdapter(ClientModel):
    """The body of POST /v1/unload_lora_adapter. The number has no effect, as in vLLM."""

    lora_name: Annotated[str, Field(max_length=128)]
    lora_int_id: int | None = None


class Aborted(ServerModel):
    """The given ids that belong to running requests."""

    aborted: list[str]


@router.get("/load")
async def load(request: Request, context: Context) -> Load:
    """The current load of the server, or with a client's key that of its requests."""
    caller = caller_of(request.scope)
    is_whole = caller.is_admin
    stats = context.engine.stats() if is_whole else context.engine.load_of(caller.tenant)
    num_open = context.num_open if is_whole else context.num_open_of[caller.name]
    return Load(
        server_load=num_open - 1,  # without this one
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
    )


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


@router.post("/reset_prefix_cache", response_class=Response)
async def reset_prefix_cache(request: Request, context: Context) -> Response:
    """Hide all cached blocks from later requests; they are evicted as space is needed.

    With a client's key, only the blocks that this key has cached.
    """
    context.reset(caller_of(request.scope))
    return Response()


@router.post("/abort_requests")
async def abort_requests(body: AbortRequest, request: Request, context: Context) -> Aborted:
    """End requests; their clients get the tokens so far, with the finish reason "abort".

    An id is that of a response, or the client's own (`request_id`, x-request-id), which ends all
    requests with that id. A client's key ends its own requests only.
    """
    caller = caller_of(request.scope)
    calls = context.calls_of(caller, body.request_ids)
    ids = {name for running in calls.values() for call in running for name in call.request_ids}
    await asyncio.gather(*(context.engine.abort(name) for name in ids))
    return Aborted(aborted=[request_id for request_id, running in calls.items() if running])


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load_lora_adapter(
    body: LoadLoRAAdapter, request: Request, context: Context
) -> PlainTextResponse:
    """Load a LoRA adapter from a folder of the server; clients name it as their model.

    Needs an admin key. A loaded adapter of this name gets 400, unless `load_inplace` replaces it.
    """
    require_admin(caller_of(request.scope), "/v1/load_lora_adapter")
    lora_request = LoRARequest(body.lora_name, body.lora_path)
    names = {each.lora_name for each in context.engine.list_loras()}
    if body.lora_name in names and not body.load_inplace:
        raise ApiError(
            400,
            f"the adapter {body.lora_name!r} is loaded: unload it first, or send load_inplace",
            param="lora_name",
        )
    await asyncio.to_thread(context.load_lora, lora_request)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_lora_adapter(
    body: UnloadLoRAAdapter, request: Request, context: Context
) -> PlainTextResponse:
    """Unload a LoRA adapter; requests that have begun keep it. Needs an admin key."""
    require_admin(caller_of(request.scope), "/v1/unload_lora_adapter")
    if not context.engine.remove_lora(body.lora_name):
        raise ApiError(
            404,
            f"no adapter {body.lora_name!r} is loaded",
            param="lora_name",
            code="adapter_not_found",
        )
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
