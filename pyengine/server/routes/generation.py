"""Runs a completion or chat: queues its requests, returns a response or a stream."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pyengine.errors import ContextLengthError, InvalidRequestError, QueueFullError
from pyengine.outputs import RequestOutput
from pyengine.request.cache_hints import CacheHints
from pyengine.request.prompts import StrippedThinking, tokens_of
from pyengine.request.request import Request as EngineRequest
from pyengine.sampling_params import SamplingParams, StructuredOutputs
from pyengine.server.callers import caller_of
from pyengine.server.context import ServerContext
from pyengine.server.engine_protocol import EngineStream
from pyengine.server.errors import ApiError, as_api_error
from pyengine.server.middleware.limits import release_body
from pyengine.server.middleware.refusals import CLIENT_HAS_GONE
from pyengine.server.routes.ignored import ignored_header
from pyengine.server.routes.params import check_length, check_logprobs, check_priority, within_limit
from pyengine.server.schemas.pooling import PoolingFields
from pyengine.server.schemas.requests import SamplingFields
from pyengine.server.schemas.responses import PromptCache, PromptTokensDetails, ServerModel, Usage
from pyengine.server.traffic import KeyCounts

_T = TypeVar("_T")
_PART_OF_EVENT = 1 << 16
"""Bytes above which an event of a stream is sent in parts."""


@dataclass(slots=True)
class PromptDetails:
    """Details of the prompts of a body besides their text."""

    ignored: list[str]
    """Fields without effect."""
    pins: list[tuple[int, float]] = field(default_factory=list)
    """Prefixes to pin, in tokens, and for how many seconds."""
    thinking: StrippedThinking | None = None
    """The part that the next turn of the conversation leaves out."""


@dataclass(frozen=True, slots=True)
class Call:
    """A running call. `name` is the server's id, `client_id` the one that the client sent."""

    context: ServerContext
    name: str
    client_id: str | None
    model: str
    created: int
    stream: EngineStream
    counts: KeyCounts
    """Usage of the key."""
    key: bytes
    explains_cache: bool = False
    """Whether `usage` says why tokens were not cached."""
    ignored: Sequence[str] = ()
    """Fields of the request without effect."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        return {"x-request-id": self.client_id or self.name, **ignored_header(self.ignored)}

    def finish(self) -> None:
        """Abort the requests that have not finished."""
        self.context.finish(self.name, self.stream)


def client_id_of(request: Request, body: SamplingFields | PoolingFields) -> str | None:
    """The id of a request from `request_id` or x-request-id. It need not be unique."""
    if body.request_id is not None:
        return body.request_id
    header = request.headers.get("x-request-id", "")
    is_valid = 0 < len(header) <= 200 and all("!" <= character <= "~" for character in header)
    return header if is_valid else None


def new_name(client_id: str | None) -> str:
    """A unique, unguessable id. It begins with the client's id, to be found in logs."""
    return uuid4().hex if client_id is None else f"{client_id}-{uuid4().hex}"


async def begin(
    context: ServerContext,
    request: Request,
    body: SamplingFields,
    params: SamplingParams,
    encoded: Callable[[Any], list[list[int]]],
    details: PromptDetails,
) -> Call:
    """Create the requests of a call on a thread, and queue them.

    `encoded` returns the token ids of the prompts, given a tokenizer; `details` are complete then.
    """
    model = context.check_model(body.model)
    lora_request = context.lora_of(model)
    client_id, caller = client_id_of(request, body), caller_of(request.scope)
    name = new_name(client_id)
    params = within_limit(body, params, context.settings.max_answer_tokens)
    salt = context.salt(caller.key, body.cache_salt)
    check_priority(body.priority, caller.max_priority)

    def created(prompts: Sequence[Sequence[int]]) -> list[EngineRequest]:
        hints = CacheHints(
            pins=tuple(details.pins),
            owner=caller.name.encode(),
            num_owners=max(1, len(context.settings.keys)),
        )
        requests = [
            context.engine.request(
                ids,
                params,
                name if len(prompts) == 1 else f"{name}-{index}",
                cache_salt=salt,
                priority=body.priority,
                tenant=caller.tenant,
                cache_hints=hints,
                thinking=details.thinking,
                lora_request=lora_request,
            )
            for index, ids in enumerate(prompts)
        ]
        for state in requests:
            check_length(body, state)
        check_logprobs(body, requests, context.settings)
        return requests

    threads = context.tokenizers
    if params.structured_outputs is None:
        requests = await threads.run(lambda tokenizer: created(encoded(tokenizer)), caller.tenant)
    else:  # compiling a grammar may be slow and must not block the tokenizer threads
        prompts = await threads.run(encoded, caller.tenant)
        await compiled(context, params.structured_outputs, caller.tenant)
        requests = await threads.run(lambda _: created(prompts), caller.tenant)
    call = queued(context, request, (name, client_id, model), requests)
    return replace(call, explains_cache=bool(body.explain_cache), ignored=details.ignored)


def queued(
    context: ServerContext,
    request: Request,
    names: tuple[str, str | None, str],
    requests: Sequence[EngineRequest],
) -> Call:
    """Queue the requests of a call; `names` are its own, the client's for it, and the model's."""
    (name, client_id, model), caller = names, caller_of(request.scope)
    release_body(request.scope)
    stream = context.submit(name, caller.key, client_id, requests)
    counts = context.traffic.keys[caller.name]
    counts.requests += 1
    return Call(
        context=context,
        name=name,
        client_id=client_id,
        model=model,
        created=int(time.time()),
        stream=stream,
        counts=counts,
        key=caller.key,
    )


async def compiled(context: ServerContext, form: StructuredOutputs, tenant: bytes) -> None:
    """Await the compilation of a grammar. Raises `InvalidRequestError`.

    Raises `ApiError` (429) if too many grammars of this tenant are waiting.
    """
    try:
        grammar = asyncio.wrap_future(context.engine.compile_structured_outputs(form, tenant))
    except QueueFullError as error:
        raise ApiError(429, str(error), code="too_many_grammars", retry_after=2) from error
    # Not cancelled: other requests may await the same grammar. The callback retrieves the error.
    grammar.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        await asyncio.shield(grammar)
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error)) from error


def encode(context: ServerContext, tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """The token ids of a text. `special`: with the tokens that the tokenizer adds."""
    if tokenizer is None:
        raise InvalidRequestError("this model has no tokenizer: send token ids instead of text")
    if len(text) > context.longest_text:
        raise ContextLengthError(
            f"the prompt has {len(text)} characters; no text of more than {context.longest_text} "
            f"fits into the maximum context length of {context.max_model_len} tokens: shorten it"
        )
    return tokens_of(text, tokenizer, add_special_tokens=special)


@dataclass(slots=True)
class UsageCounter:
    """Counts the tokens of a call as they arrive."""

    call: Call
    prompt: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    caches: dict[int, PromptCache] = field(default_factory=dict)
    restored: int = 0
    completion: int = 0
    pin_refused: str | None = None

    def add(self, item: RequestOutput) -> None:
        """Count the tokens of an output: a delta, or a complete one."""
        counts = self.call.counts
        if item.index not in self.prompt:
            self.prompt[item.index] = len(item.prompt_token_ids)
            cached = self.call.context.reported_cached_tokens(item.num_cached_tokens)
            self.cached[item.index] = cached
            self.restored += item.num_restored_tokens
            self.pin_refused = item.pin_error
            self._explain(item)
            counts.prompt_tokens += len(item.prompt_token_ids)
            counts.cached_tokens += cached
        count = sum([len(output.token_ids) for output in item.outputs])
        self.completion += count
        counts.generation_tokens += count

    def _explain(self, item: RequestOutput) -> None:
        """Keep why tokens of the prompt were not cached, for its sender."""
        if item.cache is not None:
            call, at = self.call, item.index
            call.context.explanations.put(call.key, call.name, call.client_id, at, item.cache)
            if call.explains_cache:
                self.caches[at] = call.context.disclosure.of(item.cache)

    def usage(self) -> Usage:
        """The usage so far."""
        prompt = sum(self.prompt.values())
        details = PromptTokensDetails(cached_tokens=sum(self.cached.values()))
        if self.restored:
            details.restored_tokens = self.restored
        if self.call.explains_cache:
            details.cache = [self.caches.get(index) for index in sorted(self.prompt)]
        if self.pin_refused is not None:
            details.pin_refused = self.pin_refused
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self.completion,
            total_tokens=prompt + self.completion,
            prompt_tokens_details=details,
        )


class Writer(Protocol):
    """Converts outputs of the engine to the response of a route."""

    def whole(self, call: Call, outputs: Sequence[RequestOutput]) -> ServerModel:
        """The response without streaming."""

    def chunks(self, call: Call) -> AsyncIterator[str | ServerModel]:
        """The chunks of a stream: as JSON, or to be serialized."""


async def answer(
    request: Request, body: SamplingFields, start: Coroutine[Any, Any, Call], writer: Writer
) -> Response:
    """Run a call and return its response; a stream begins to run once it is sent."""
    if body.stream:
        call = await unless_gone(request, start)
        return EventStream(call, writer.chunks(call))

    async def run() -> Response:
        call = await start
        return await responded(call, writer.whole(call, await outputs_of(call)))

    return await unless_gone(request, run())


async def responded(call: Call, body: ServerModel) -> Response:
    """The response of a call whose requests have ended."""
    pieces = [piece async for piece in call.context.json_thread.json_of(body)]
    if len(pieces) == 1:
        return Response(pieces[0], headers=call.headers, media_type="application/json")
    headers = {**call.headers, "Content-Length": f"{sum(map(len, pieces))}"}
    return StreamingResponse(_iterated(pieces), headers=headers, media_type="application/json")


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Await `work`, and cancel it if the client disconnects.

    Raises `ApiError` (499) in that case.
    """
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_HAS_GONE, "the client has disconnected")
        return task.result()
    finally:
        for pending in (task, disconnect):
            pending.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def outputs_of(call: Call) -> list[RequestOutput]:
    """The outputs of a call, in the order of its prompts."""
    try:
        outputs = {item.index: item async for item in call.stream}
    finally:
        call.finish()
    return [outputs[index] for index in range(len(outputs))]


class EventStream(StreamingResponse):
    """Server-sent events of `items`. The call is aborted if the client disconnects."""

    def __init__(self, call: Call, items: AsyncIterator[str | ServerModel]) -> None:
        self._call = call
        headers = {**call.headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(call, items), headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            with suppress(OSError):  # the client has disconnected
                await super().__call__(scope, receive, send)
        finally:
            self._call.finish()


async def _iterated(pieces: Sequence[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def _events(call: Call, items: AsyncIterator[str | ServerModel]) -> AsyncIterator[bytes]:
    thread = call.context.json_thread
    try:
        async for item in items:
            if isinstance(item, str):
                yield f"data: {item}\n\n".encode()
                continue
            part = b"data: "
            async for piece in thread.json_of(item):
                if len(part) > _PART_OF_EVENT:
                    yield part
                    part = b""
                part += piece
            yield part + b"\n\n"
    except Exception as error:  # the status was sent already: the error is the last event
        yield f"data: {as_api_error(error).to_json()}\n\n".encode()
    yield b"data: [DONE]\n\n"
