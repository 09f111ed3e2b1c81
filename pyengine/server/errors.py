"""Whatever goes wrong, as a client reads it: a status, and OpenAI's shape around a sentence."""

import difflib
import logging
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pyengine.core.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    NoReplicaError,
    PyEngineError,
    QueueFullError,
    ReplicaLostError,
)
from pyengine.server.requests import ChatCompletionRequest, CompletionRequest
from pyengine.server.responses import ErrorInfo, ErrorResponse

_log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    503: "overloaded_error",
}
_UNKNOWN: Mapping[str, str] = {
    "best_of": "ask for n answers and take the best",
    "chat_template": "templates are not taken from requests; the model's own is used",
    "extra_body": "the openai client sends its content as fields of the request; send those",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_choice": 'use structured_outputs: {"choice": [...]}',
    "guided_decoding_backend": "there is one",
    "guided_grammar": 'use structured_outputs: {"grammar": "..."}',
    "guided_json": 'use structured_outputs: {"json": ...} or response_format',
    "guided_regex": 'use structured_outputs: {"regex": "..."}',
    "image_url": "this server takes text",
    "images": "this server takes text",
    "input": "use prompt, or messages with /v1/chat/completions",
    "inputs": "use prompt, or messages with /v1/chat/completions",
    "length_penalty": "there is no beam search",
    "max_length": "use max_tokens",
    "max_new_tokens": "use max_tokens",
    "max_output_tokens": "use max_tokens",
    "num_beams": "there is no beam search",
    "prompt_embeds": "this server takes text and token ids",
    "reasoning_effort": "use chat_template_kwargs, if the model's template reads it",
    "stop_sequences": "use stop",
    "suffix": "text cannot be filled in between",
    "use_beam_search": "there is no beam search",
}
"""What was meant by fields that others know, and what to do here."""
_LATER: Mapping[type[PyEngineError], tuple[str, int | None]] = {
    EngineClosedError: ("draining", 10),
    EngineDeadError: ("engine_dead", None),
    NoReplicaError: ("no_replica", 5),
    QueueFullError: ("queue_full", 1),
    ReplicaLostError: ("replica_lost", 1),
}
"""Errors that are nobody's fault: a word for them, and in how many seconds to come again."""
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

    async def of_validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _of_validation(error.errors()).response()

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


def _of_validation(errors: Sequence[Any]) -> ApiError:
    """The error that says most, of those that pydantic found."""
    unknown = [one for one in errors if one["type"] == "extra_forbidden"]
    first = unknown[0] if unknown else _telling(errors)
    path = _path(first["loc"])
    if unknown:
        name = str(first["loc"][-1])
        return ApiError(
            400,
            f"there is no field {path!r}, and nothing was run: {_hint(name)}",
            param=path,
            code="unknown_parameter",
        )
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
    return max(errors, key=lambda one: (not one["type"].endswith("_type"), len(one["loc"])))


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
    return path


def _hint(name: str) -> str:
    if name in _UNKNOWN:
        return _UNKNOWN[name]
    elsewhere = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
    if name in elsewhere:
        return f"{name} is for {elsewhere[name]}"
    known = [*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields]
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {nearest[0]}?" if nearest else "leave it out"
