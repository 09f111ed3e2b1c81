"""POST /update_weights_from_disk, /sleep and /wake_up, GET /is_sleeping and /weights_version.

All of them need an admin's key.
"""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import Field

from pyengine.server.callers import caller_of, require_admin
from pyengine.server.context import Context
from pyengine.server.engine_protocol import ChangeableEngine
from pyengine.server.errors import ApiError
from pyengine.server.routes.json_route import JsonRoute
from pyengine.server.schemas.requests import ClientModel
from pyengine.server.schemas.responses import ServerModel

_MAX_PATH = 4096


async def _admins_engine(request: Request, context: Context) -> ChangeableEngine:
    """The engine, for an admin."""
    require_admin(caller_of(request.scope), request.url.path)
    if not isinstance(context.engine, ChangeableEngine):
        raise ApiError(501, "this server has no engine of its own: send this to each replica")
    return context.engine


_Engine = Annotated[ChangeableEngine, Depends(_admins_engine)]

router = APIRouter(route_class=JsonRoute)


class UpdateWeights(ClientModel):
    """The body of POST /update_weights_from_disk."""

    model_path: Annotated[str, Field(min_length=1, max_length=_MAX_PATH)]
    """A folder of the server's, with the same model."""
    mode: Literal["finish", "abort", "keep", "recompute"] = "keep"


class WeightsVersion(ServerModel):
    """The number of updates of the weights so far."""

    weights_version: int


class Sleeping(ServerModel):
    """Whether weights or KV pool are not in memory."""

    is_sleeping: bool


@router.post("/update_weights_from_disk")
async def update_weights_from_disk(body: UpdateWeights, engine: _Engine) -> WeightsVersion:
    """Replace the weights by those of a folder. See `LLM.update_weights`."""
    version = await engine.update_weights(body.model_path, mode=body.mode)
    return WeightsVersion(weights_version=version)


@router.get("/weights_version")
async def weights_version(engine: _Engine) -> WeightsVersion:
    """The current version."""
    return WeightsVersion(weights_version=engine.weights_version)


@router.post("/sleep", response_class=Response)
async def sleep(
    engine: _Engine,
    level: Annotated[int, Query(ge=1, le=2)] = 1,
    mode: Literal["finish", "abort", "recompute"] = "abort",
) -> Response:
    """Give the memory of the KV pool back, and at level 2 that of the weights, too."""
    await engine.sleep(level, mode=mode)
    return Response()


@router.post("/wake_up", response_class=Response)
async def wake_up(
    engine: _Engine,
    tags: Annotated[list[Literal["weights", "kv_cache"]] | None, Query()] = None,
    model_path: Annotated[str | None, Query(max_length=_MAX_PATH)] = None,
) -> Response:
    """Bring back what sleep has dropped; with `model_path` the weights of that folder."""
    await engine.wake_up(tags, weights=model_path)
    return Response()


@router.get("/is_sleeping")
async def is_sleeping(engine: _Engine) -> Sleeping:
    """Whether the engine sleeps."""
    return Sleeping(is_sleeping=engine.is_sleeping)
