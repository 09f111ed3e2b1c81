"""Exceptions as HTTP responses: a status and a body in OpenAI's error format."""

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

from pyengine.errors import (
    ConfigurationError,
    ContextLengthError,
    EngineAsleepError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    NoReplicaError,
    PyEngineError,
    QueueFullError,
    ReplicaLostError,
    StructuredOutputError,
    TenantQueueFullError,
    WeightUpdateError,
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
_RETRYABLE: Mapping[type[PyEngineError], tuple[str, int | None]] = {
    EngineAsleepError: ("asleep", 10),
    EngineClosedError: ("draining", 10),
    EngineDeadError: ("engine_dead", None),
    NoReplicaError: ("no_replica", 5),
    QueueFullError: ("queue_full", 1),
    ReplicaLostError: ("replica_lost", 1),
}
"""Errors that a client can retry: their code, and the seconds of the Retry-After header."""
_CODES: Mapping[type[PyEngineError], str] = {
    ConfigurationError: "not_configured",
    StructuredOutputError: "structured_output_failed",
    WeightUpdateError: "weights_refused",
}
"""Errors of status 400 that are no one field's."""
_LONGEST_PATH = 200
"""Characters of a field name that an error message repeats."""
_PROMPT_FORMS = "send text, token ids, or a list of at most 1,024 of either; none may be empty"


NOSNIFF = (b"x-content-type-options", b"nosniff")
"""The header of every response that keeps browsers from guessing another type of content."""


class ApiError(HTTPException):
    """An error response.

    `param` is the field at fault, `code` identifies the error for programs.
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
        self.code = code
        self._retry_after = retry_after

    def to_json(self) -> str:
        """The body as JSON."""
        fallback = "invalid_request_error" if self.status_code < 500 else "server_error"
        kind = _TYPES.get(self.status_code, fallback)
        info = ErrorInfo(message=self.detail, type=kind, param=self._param, code=self.code)
        return ErrorResponse(error=info).to_json()

    def response(self) -> Response:
        """The response with status, headers and body."""
        headers = {} if self._retry_after is None else {"Retry-After": f"{self._retry_after}"}
        if self.status_code == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(self.to_json(), self.status_code, headers, media_type="application/json")


class FieldError(ApiError):
    """The error for a field of a request: status 400."""

    def __init__(self, field: str, message: str, *, code: str | None = None) -> None:
        super().__init__(400, message, param=field, code=code)


def as_api_error(error: Exception) -> ApiError:
    """Convert any exception. Details of unexpected ones go to the log only."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return ApiError(400, str(error), code="context_length_exceeded")
        case InvalidRequestError():
            return ApiError(400, str(error))
        case ConfigurationError() | WeightUpdateError() | StructuredOutputError():
            return ApiError(400, str(error), code=_CODES[type(error)])
        case TenantQueueFullError():
            return ApiError(429, str(error), code="too_many_requests", retry_after=1)
        case PyEngineError() if type(error) in _RETRYABLE:
            code, retry_after = _RETRYABLE[type(error)]
            return ApiError(503, str(error), code=code, retry_after=retry_after)
        case PyEngineError():
            return ApiError(500, str(error))
        case _:
            _log.error("unexpected error in a request", exc_info=error)
            return ApiError(500, "internal error; the server's log has the details")


def handle_errors(app: FastAPI) -> None:
    """Register handlers that give every error response of the application the same format."""

    async def of_ours(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def of_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _of_validation(error.errors(), request).response()

    async def of_routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        route = f"{request.method} {request.url.path}"
        messages = {404: f"no such route: {route}", 405: f"method not allowed: {route}"}
        detail = messages.get(error.status_code, str(error.detail))
        response = ApiError(error.status_code, detail).response()
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(ApiError, of_ours)
    app.add_exception_handler(PyEngineError, of_ours)
    app.add_exception_handler(RequestValidationError, of_validation)
    app.add_exception_handler(HTTPException, of_routing)
    app.add_exception_handler(Exception, of_ours)


def _of_validation(errors: Sequence[Any], request: Request) -> ApiError:
    """The most specific of the errors that pydantic found."""
    unknown = [error for error in errors if error["type"] == "extra_forbidden"]
    first = unknown[0] if unknown else _most_specific(errors)
    path = _path(first["loc"])
    if unknown:
        return _of_unknown(path, first["loc"][1:], request)
    if not path:
        remedy = "send JSON with the header content-type: application/json"
        is_form = isinstance(first["input"], bytes)
        return ApiError(400, remedy if is_form else f"the body is not a JSON object: {remedy}")
    if first["type"] == "missing":
        return FieldError(path, f"{path} is missing", code="missing_parameter")
    message = _PROMPT_FORMS if path.partition("[")[0] == "prompt" else first["msg"]
    return FieldError(path, f"{path}={reprlib.repr(first['input'])}: {message}")


def _most_specific(errors: Sequence[Any]) -> Any:
    """Of the errors for the alternatives of a field, the one for the closest alternative."""
    return max(errors, key=lambda error: (not error["type"].endswith("_type"), len(error["loc"])))


def _path(location: Sequence[Any]) -> str:
    """The path of a field, such as `stop[3]`, without pydantic's names of alternatives."""
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
    """The error for a field that a route does not have."""
    name, route = str(location[-1]), request.url.path.removeprefix(request.scope["root_path"])
    is_within = len(location) > 1
    refusal = None if is_within else rules_of(route).get(name)
    if refusal is not None:
        message = f"{name!r} is not supported, and nothing was run: {refusal.note}"
        return FieldError(path, message, code="unsupported_parameter")
    body = getattr(request.scope.get("route"), "body_field", None)
    forms = [] if body is None else _forms_within(body.field_info.annotation)
    known = _known_names(forms, location[:-1])
    hint = OTHER_NAMES.get(name) or (None if is_within else _hint_of_other_routes(name, route))
    if hint is None and len(name) > _LONGEST_PATH:  # comparing it would block the event loop
        hint = "leave it out"
    if hint is None:
        nearest = difflib.get_close_matches(name, [other for other in known if other != name], n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "leave it out"
    message = f"unknown field {path!r}, and nothing was run: {hint}"
    return FieldError(path, message, code="unknown_parameter")


def _hint_of_other_routes(name: str, route: str) -> str | None:
    """The hint for a field that exists on another route only."""
    for other in (CHAT, COMPLETIONS):
        rule = rules_of(other).get(name)
        if rule is not None and rules_of(route):
            return rule.note if rule.effect is Effect.REFUSED else f"{name} is for {other}"
    return None


def _known_names(forms: list[Any], location: Sequence[Any]) -> list[str]:
    """Names of the fields at this location within the models of a body."""
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
    """The pydantic models within a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [form for inner in get_args(annotation) for form in _forms_within(inner)]
