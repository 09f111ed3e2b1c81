"""From a request's fields to the engine and back: what completions and chats have in common."""

import asyncio
import re
import reprlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pyengine.core.errors import ContextLengthError, InvalidRequestError, QueueFullError
from pyengine.core.fields import shown
from pyengine.core.outputs import RequestOutput
from pyengine.core.sampling_params import RequestOutputKind, SamplingParams
from pyengine.core.structured_outputs import StructuredOutputs
from pyengine.engine import RequestState, encode_text
from pyengine.server.context import ServerContext
from pyengine.server.engine_client import ServedStream
from pyengine.server.errors import ApiError, as_api_error
from pyengine.server.middleware.auth import caller_of
from pyengine.server.middleware.limits import release_body
from pyengine.server.middleware.traffic import KeyCounts
from pyengine.server.schemas.ignored import IGNORED_HEADER
from pyengine.server.schemas.requests import MAX_ITEMS, SamplingFields
from pyengine.server.schemas.responses import PromptTokensDetails, ServerModel, Usage

_T = TypeVar("_T")

_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "prompt_logprobs",
    "detokenize",
    "skip_special_tokens",
    "bad_words",
    "allowed_token_ids",
    "truncate_prompt_tokens",
    "speculate",
)
"""Fields of `SamplingParams` that clients set by the same name."""


def sampling_params(
    body: SamplingFields, default: SamplingParams, own: Mapping[str, Any]
) -> SamplingParams:
    """The sampling parameters of a request; what is left out or null is as in `default`.

    `own` are those that the route has worked out. Raises `InvalidRequestError`.
    """
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    given = {name: value for name in _FIELDS if (value := getattr(body, name)) is not None}
    if body.stop is not None:
        several = [body.stop] if isinstance(body.stop, str) else body.stop
        given["stop"] = [text for text in several if text]  # an empty string has no effect
    if body.logit_bias is not None:
        given["logit_bias"] = _bias(body.logit_bias)
    form = _form(body)
    if form is not None:
        given["structured_outputs"] = form
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    return replace(default, **{**given, **own, "output_kind": kind})


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    for token in bias:
        if not re.fullmatch(r"0|[1-9][0-9]{0,18}", token):  # one spelling of each: none is lost
            raise ApiError(
                400,
                f"logit_bias[{reprlib.repr(token)}]: its keys must be token ids, as text",
                param="logit_bias",
            )
    return {int(token): value for token, value in bias.items()}


def _form(body: SamplingFields) -> StructuredOutputs | None:
    """The form that the answer must have. Raises `InvalidRequestError` for none that can be."""
    asked, form = body.response_format, body.structured_outputs
    if asked is not None and asked.type != "text":
        if form is not None:
            raise ApiError(
                400,
                "response_format and structured_outputs both say what form the answer has: send "
                "one of them",
                param="response_format",
            )
        if asked.type == "json_object":
            return StructuredOutputs(json_object=True)
        if asked.json_schema is None:
            raise ApiError(
                400, "response_format.json_schema is missing", param="response_format.json_schema"
            )
        return StructuredOutputs(json=asked.json_schema.schema_)
    if form is None:
        return None
    return StructuredOutputs(**form.model_dump(by_alias=True, exclude_none=True))


def check_count(n: int | None, num_prompts: int) -> None:
    """Raise `ApiError` for more answers than one call may ask for, before any is made."""
    if (n or 1) * num_prompts > MAX_ITEMS:
        raise ApiError(
            400,
            f"n={n or 1} answers to {num_prompts} prompts: a request may ask for at most "
            f"{MAX_ITEMS} in all",
            param="n",
        )


def within_limit(body: SamplingFields, params: SamplingParams, limit: int | None) -> SamplingParams:
    """The parameters of a request where no answer may have more than `limit` tokens.

    A request that names no length gets at most the limit. Raises `ApiError` for one that asks for
    more.
    """
    name, length = _length_field(body)
    if limit is None:
        return params
    if length is not None and length > limit:
        raise ApiError(
            400,
            f"{name}={shown(length)}: an answer of this server has at most {limit} tokens",
            param=name,
            code="max_answer_tokens",
        )
    longest = limit if params.max_tokens is None else min(limit, params.max_tokens)
    return replace(params, max_tokens=longest)


def check_length(body: SamplingFields, request: RequestState) -> None:
    """Raise `ApiError` if the context does not hold as many tokens as the client asks for."""
    (name, length), most = _length_field(body), request.samples[0].max_output
    if length is not None and length > most:
        num_prompt_tokens = len(request.prompt_token_ids)
        raise ApiError(
            400,
            f"{name}={shown(length)}: the prompt has {num_prompt_tokens} tokens and the context "
            f"{num_prompt_tokens + most}, so at most {most} tokens of answer fit; ask for fewer",
            param=name,
            code="context_length_exceeded",
        )


def _length_field(body: SamplingFields) -> tuple[str, int | None]:
    """The field in which a client says how long an answer may be, and its value."""
    length = getattr(body, "max_completion_tokens", None)
    return ("max_tokens", body.max_tokens) if length is None else ("max_completion_tokens", length)


def check_priority(priority: float, most: float) -> None:
    """Raise `ApiError` (400) for a priority that is too far from 0."""
    if abs(priority) <= most:
        return
    limit = f"from -{most:g} to {most:g}" if most else "0: --max-priority lets clients choose"
    raise ApiError(
        400, f"priority={priority:g}: on this server it may be {limit}", param="priority"
    )


@dataclass(frozen=True, slots=True)
class Call:
    """A call that runs: its names, when it came, what it gives, and its fields without effect.

    `name` is the server's, `client_id` the one that the client sent, if it did.
    """

    context: ServerContext
    name: str
    client_id: str | None
    model: str
    created: int
    stream: ServedStream
    counts: KeyCounts
    """Of its key."""
    ignored: Sequence[str] = ()

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer."""
        ignored = {IGNORED_HEADER: ", ".join(self.ignored)} if self.ignored else {}
        return {"x-request-id": self.client_id or self.name, **ignored}

    def leave(self) -> None:
        """End what has not ended."""
        self.context.leave(self.name, self.stream)


def client_id_of(request: Request, body: SamplingFields) -> str | None:
    """The id that a client has for its request, in a field or a header. Others may have it too."""
    if body.request_id is not None:
        return body.request_id
    header = request.headers.get("x-request-id", "")
    is_fit = 0 < len(header) <= 200 and all("!" <= character <= "~" for character in header)
    return header if is_fit else None


def new_name(client_id: str | None) -> str:
    """An id that nobody can guess or has had. It begins with the client's, to be found in logs."""
    return uuid4().hex if client_id is None else f"{client_id}-{uuid4().hex}"


async def begin(
    context: ServerContext,
    request: Request,
    body: SamplingFields,
    params: SamplingParams,
    encoded: Callable[[Any], list[list[int]]],
    ignored: Sequence[str],
) -> Call:
    """Make the requests of a call, off the event loop, and queue them.

    `encoded` gives the token ids of its prompts by a tokenizer; `ignored` are its fields without
    effect.
    """
    model = context.check_model(body.model)
    client_id, caller = client_id_of(request, body), caller_of(request.scope)
    name = new_name(client_id)
    params = within_limit(body, params, context.settings.max_answer_tokens)
    salt = context.salt(caller.key, body.cache_salt)
    check_priority(body.priority, caller.max_priority)

    def made(prompts: Sequence[Sequence[int]]) -> list[RequestState]:
        requests = [
            context.engine.request(
                ids,
                params,
                name if len(prompts) == 1 else f"{name}-{place}",
                cache_salt=salt,
                priority=body.priority,
            )
            for place, ids in enumerate(prompts)
        ]
        for made_request in requests:
            check_length(body, made_request)
        return requests

    threads = context.tokenizers
    if params.structured_outputs is None:
        requests = await threads.run(lambda tokenizer: made(encoded(tokenizer)))
    else:  # a grammar may take a while to compile, and tokenizers are for all
        prompts = await threads.run(encoded)
        await compiled(context, params.structured_outputs, caller.key)
        requests = await asyncio.to_thread(made, prompts)
    release_body(request.scope)
    stream = context.submit(name, caller.key, client_id, requests)
    counts = context.traffic.keys[caller.name]
    counts.requests += 1
    return Call(context, name, client_id, model, int(time.time()), stream, counts, ignored)


async def compiled(context: ServerContext, form: StructuredOutputs, tenant: bytes) -> None:
    """Wait until a grammar is compiled, without a thread. Raises `InvalidRequestError`.

    Raises `ApiError` (429) if too many grammars of this tenant wait.
    """
    try:
        grammar = asyncio.wrap_future(context.engine.compile_structured_outputs(form, tenant))
    except QueueFullError as error:
        raise ApiError(429, str(error), code="too_many_grammars", retry_after=2) from error
    # Others may wait for the same one; and if the client goes, nobody reads an error.
    grammar.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        await asyncio.shield(grammar)
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error)) from error


def encode(context: ServerContext, tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """The token ids of a text, with or without the `special` tokens that the tokenizer adds."""
    if tokenizer is None:
        raise InvalidRequestError("the prompt is text and this model has no tokenizer: send ids")
    if len(text) > context.longest_text:
        raise ContextLengthError(
            f"the prompt has {len(text)} characters, and of no text do more than "
            f"{context.longest_text} fit into the model, whose maximum context length is "
            f"{context.max_model_len} tokens: shorten it"
        )
    return encode_text(text, partial(tokenizer.encode, add_special_tokens=special))


@dataclass(slots=True)
class Tally:
    """The tokens of a call, as they come."""

    call: Call
    prompt: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    completion: int = 0

    def add(self, item: RequestOutput) -> None:
        """Take an item: a delta, or the whole."""
        counts = self.call.counts
        if item.index not in self.prompt:
            self.prompt[item.index] = len(item.prompt_token_ids)
            cached = self.call.context.reported_cached_tokens(item.num_cached_tokens)
            self.cached[item.index] = cached
            counts.prompt_tokens += len(item.prompt_token_ids)
            counts.cached_tokens += cached
        count = sum([len(output.token_ids) for output in item.outputs])
        self.completion += count
        counts.generation_tokens += count

    def usage(self) -> Usage:
        """What has come so far."""
        prompt = sum(self.prompt.values())
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self.completion,
            total_tokens=prompt + self.completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self.cached.values())),
        )


class Writer(Protocol):
    """Writes what a client gets of what the engine gives."""

    def whole(self, call: Call, outputs: Sequence[RequestOutput]) -> ServerModel:
        """The answer of one piece."""

    def chunks(self, call: Call) -> AsyncIterator[str]:
        """The items of a stream, as JSON."""


async def answer(
    request: Request, body: SamplingFields, start: Coroutine[Any, Any, Call], writer: Writer
) -> Response:
    """Run a call to its end, or to the beginning of its stream."""
    if body.stream:
        call = await unless_gone(request, start)
        return EventStream(call, writer.chunks(call))

    async def run() -> Response:
        call = await start
        outputs = await _outputs_of(call)
        content = writer.whole(call, outputs).to_json()
        return Response(content, headers=call.headers, media_type="application/json")

    return await unless_gone(request, run())


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` gives; if the client goes meanwhile it is cancelled.

    Raises `ApiError` then, which nobody reads.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has gone")
        return task.result()
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _outputs_of(call: Call) -> list[RequestOutput]:
    """Every output of a call, whole, in the order of its prompts."""
    try:
        outputs = {item.index: item async for item in call.stream}
    finally:
        call.leave()
    return [outputs[place] for place in range(len(outputs))]


class EventStream(StreamingResponse):
    """Server-sent events; what runs for them is ended whenever and however they end.

    `items` are JSON.
    """

    def __init__(self, call: Call, items: AsyncIterator[str]) -> None:
        self._call = call
        headers = {**call.headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(items), headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            with suppress(OSError):  # the client is gone
                await super().__call__(scope, receive, send)
        finally:
            self._call.leave()


async def _events(items: AsyncIterator[str]) -> AsyncIterator[bytes]:
    try:
        async for item in items:
            yield f"data: {item}\n\n".encode()
    except Exception as error:  # the status was sent: all that is left is to say so
        yield f"data: {as_api_error(error).to_json()}\n\n".encode()
    yield b"data: [DONE]\n\n"
