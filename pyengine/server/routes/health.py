"""GET /health, /ping, /version, /v1/models, /v1/models/NAME: status and identity of the server."""

from fastapi import APIRouter, Response

from pyengine.server.context import Context, ServerContext
from pyengine.server.errors import ApiError
from pyengine.server.schemas.responses import ModelCard, ModelList
from pyengine.utils.packaging import package_version

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.head("/ping", include_in_schema=False)
@router.get("/health", response_class=Response)
@router.get("/ping", response_class=Response)
async def health(context: Context) -> Response:
    """Status 200 while the server accepts requests and the engine runs, else 503."""
    context.engine.check_health()
    if context.is_draining:
        raise ApiError(503, "the server is shutting down", code="draining")
    return Response()


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of pyengine."""
    return {"version": package_version()}


@router.get("/v1/models")
async def models(context: Context) -> ModelList:
    """The served model, once for each of its names, and its adapters."""
    names = [*context.names, *(each.lora_name for each in context.engine.list_loras())]
    return ModelList(object="list", data=[_card(name, context) for name in names])


@router.get("/v1/models/{name:path}")
async def model(name: str, context: Context) -> ModelCard:
    """The served model by one of its names, or an adapter."""
    return _card(context.check_model(name), context)


def _card(name: str, context: ServerContext) -> ModelCard:
    is_adapter = name not in context.names
    return ModelCard(
        id=name,
        object="model",
        created=context.created,
        owned_by="pyengine",
        root=str(context.engine.describe()["model"]),
        parent=context.names[0] if is_adapter else None,
        max_model_len=context.max_model_len,
    )
