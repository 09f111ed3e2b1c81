"""Whatever goes wrong, as a client reads it: a status, and OpenAI's shape around a sentence."""

import difflib
import logging
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pyengine.core.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    NoReplicaError,
    PyEngineError,
    QueueFullError,
    ReplicaLostError,
)
from pyengine.server.schemas.fields import CHAT, COMPLETIONS, OTHER_NAMES, Effect, rules_of
from pyengine.server.schemas.responses import ErrorInfo, ErrorResponse

_log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_LATER: Mapping[type[PyEngineError], tuple[str, int | None]] = {
    EngineClosedError: ("draining", 10),
    EngineDeadError: ("engine_dead", None),
    NoReplicaError: ("no_replica", 5),
    QueueFullError: ("queue_full", 1),
    ReplicaLostError: ("replica_lost", 1),
}
"""Errors that are nobody's fault: a word for them, and in how many seconds to come again."""
_LONGEST_PATH = 200
"""Characters of a field's name that an error repeats."""
_PROMPT_FORMS = "give text, token ids, or a list of at most 1,024 of either, none of them empty"


class ApiError(HTTPException):
    """An answer other than the one asked for.

    `param` is the field at fault, `code` a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(status, message)
        self._param = param
        self._code = code
        self._retry_after = retry_after

    def to_json(self) -> str:
        """The body."""
        fallback = "invalid_request_error" if self.status_code < 500 else "server_error"
        kind = _TYPES.get(self.status_code, fallback)
        info = ErrorInfo(message=self.detail, type=kind, param=self._param, code=self._code)
        return ErrorResponse(error=info).to_json()

    def response(self) -> Response:
        """The whole answer."""
        headers = {} if self._retry_after is None else {"Retry-After": f"{self._retry_after}"}
        if self.status_code == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(self.to_json(), self.status_code, headers, media_type="application/json")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error. One that is a defect goes to the log, and no further."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return ApiError(400, str(error), code="context_length_exceeded")
        case InvalidRequestError():
            return ApiError(400, str(error))
        case PyEngineError() if type(error) in _LATER:
            code, retry_after = _LATER[type(error)]
            return ApiError(503, str(error), code=code, retry_after=retry_after)
        case PyEngineError():
            return ApiError(500, str(error))
        case _:
            _log.error("a request ended in a defect", exc_info=error)
            return ApiError(500, "the server has a defect; its log has the rest")


def handle_errors(app: FastAPI) -> None:
    """Have all errors of the application answered in one shape."""

    async def of_ours(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def of_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _of_validation(error.errors(), request).response()

    async def of_routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        asked = f"{request.method} {request.url.path}"
        words = {404: f"there is no {asked}", 405: f"{asked} is not there by this method"}
        answer = ApiError(error.status_code, words.get(error.status_code, str(error.detail)))
        response = answer.response()
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(ApiError, of_ours)
    app.add_exception_handler(PyEngineError, of_ours)
    app.add_exception_handler(RequestValidationError, of_validation)
    app.add_exception_handler(HTTPException, of_routing)
    app.add_exception_handler(Exception, of_ours)


def _of_validation(errors: Sequence[Any], request: Request) -> ApiError:
    """The error that says most, of those that pydantic found."""
    unknown = [error for error in errors if error["type"] == "extra_forbidden"]
    first = unknown[0] if unknown else _telling(errors)
    path = _path(first["loc"])
    if unknown:
        return _of_unknown(path, first["loc"][1:], request)
    if not path:
        found = first["input"]
        is_form = isinstance(found, bytes)
        way_out = "send JSON with the header content-type: application/json"
        return ApiError(400, way_out if is_form else f"the body is no JSON object: {way_out}")
    if first["type"] == "missing":
        return ApiError(400, f"{path} is missing", param=path, code="missing_parameter")
    message = _PROMPT_FORMS if path.partition("[")[0] == "prompt" else first["msg"]
    return ApiError(400, f"{path}={reprlib.repr(first['input'])}: {message}", param=path)


def _telling(errors: Sequence[Any]) -> Any:
    """Of the errors of a field's alternatives, the one about a value that nearly fits."""
    return max(errors, key=lambda error: (not error["type"].endswith("_type"), len(error["loc"])))


def _path(location: Sequence[Any]) -> str:
    """The field as it would be written: `stop[3]`; which alternative it was is left out."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not path:
            path = str(part)
        elif str(part).isidentifier() and part not in ("str", "int", "float", "bool"):
            path += f".{part}"
    return path if len(path) <= _LONGEST_PATH else f"{path[:_LONGEST_PATH]}..."


def _of_unknown(path: str, location: Sequence[Any], request: Request) -> ApiError:
    """The error about a field that a route does not have."""
    name, route = str(location[-1]), request.url.path.removeprefix(request.scope["root_path"])
    is_within = len(location) > 1
    refusal = None if is_within else rules_of(route).get(name)
    if refusal is not None:
        message = f"{name!r} cannot be served, and nothing was run: {refusal.note}"
        return ApiError(400, message, param=path, code="unsupported_parameter")
    body = getattr(request.scope.get("route"), "body_field", None)
    forms = [] if body is None else _forms_within(body.field_info.annotation)
    known = _known_names(forms, location[:-1])
    hint = OTHER_NAMES.get(name) or (None if is_within else _hint_of_other_routes(name, route))
    if hint is None and len(name) > _LONGEST_PATH:  # comparing it holds the event loop
        hint = "leave it out"
    if hint is None:
        nearest = difflib.get_close_matches(name, [other for other in known if other != name], n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "leave it out"
    message = f"there is no field {path!r}, and nothing was run: {hint}"
    return ApiError(400, message, param=path, code="unknown_parameter")


def _hint_of_other_routes(name: str, route: str) -> str | None:
    """The hint for a field of another route."""
    for other in (CHAT, COMPLETIONS):
        rule = rules_of(other).get(name)
        if rule is not None and rules_of(route):
            return rule.note if rule.effect is Effect.REFUSED else f"{name} is for {other}"
    return None


def _known_names(forms: list[Any], location: Sequence[Any]) -> list[str]:
    """The names of the fields at this location within the forms of a body."""
    for part in location:
        forms = [
            inner
            for outer in forms
            for name, field in outer.model_fields.items()
            if part in (name, field.alias)
            for inner in _forms_within(field.annotation)
        ]
    return [field.alias or name for form in forms for name, field in form.model_fields.items()]


def _forms_within(annotation: Any) -> list[Any]:
    """The models that a type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [form for inner in get_args(annotation) for form in _forms_within(inner)]
