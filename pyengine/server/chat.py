"""POST /v1/chat/completions: conversations by the model's chat template, and its answers."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response

from pyengine.core.errors import InvalidRequestError
from pyengine.core.outputs import CompletionOutput, RequestOutput
from pyengine.core.sampling_params import SamplingParams
from pyengine.core.server_settings import ServerSettings
from pyengine.engine import ChatOptions, RequestState, render_chat
from pyengine.server.context import Context
from pyengine.server.errors import ApiError
from pyengine.server.generation import (
    Call,
    Maker,
    Tally,
    answer,
    begin,
    check_count,
    sampling_params,
)
from pyengine.server.json_route import JsonRoute
from pyengine.server.logprobs import chat_logprobs, prompt_logprobs
from pyengine.server.requests import ChatCompletionRequest, ChatOptionFields
from pyengine.server.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatMessage,
    ErrorResponse,
)

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletionResponse,
    responses={400: {"model": ErrorResponse}},
)
async def chat_completions(
    body: ChatCompletionRequest, request: Request, context: Context
) -> Response:
    """Answer a conversation."""
    check_count(body.n, 1)
    params = _params(body, context.engine.get_default_sampling_params())
    options = chat_options(body, context.settings)

    def make(tokenizer: Any, maker: Maker) -> list[RequestState]:
        return maker.requests([render(body, tokenizer, options, context.longest_text)], params)

    limit = context.settings.template_timeout
    start = begin(context, request, body, make, limit=limit)
    return await answer(request, body, start, _Writer(body))


def _params(body: ChatCompletionRequest, default: SamplingParams) -> SamplingParams:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(
            400,
            "max_tokens and max_completion_tokens mean the same: send one of them",
            param="max_completion_tokens",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    own = {"max_tokens": most, "logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    return sampling_params(body, default, own)


def chat_options(body: ChatOptionFields, settings: ServerSettings) -> ChatOptions:
    """How the conversation becomes a prompt. Raises `ApiError` for variables nobody may set."""
    variables = body.chat_template_kwargs
    for name in variables or ():
        if name not in settings.template_variable:
            raise ApiError(
                400,
                f"chat_template_kwargs[{name[:80]!r}]: this server lets requests set "
                f"{', '.join(settings.template_variable) or 'none'}",
                param="chat_template_kwargs",
            )
    begins_turn = body.add_generation_prompt
    return ChatOptions(
        add_generation_prompt=not body.continue_final_message
        if begins_turn is None
        else begins_turn,
        continue_final_message=body.continue_final_message,
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None,
        variables=variables,
    )


def render(
    body: ChatOptionFields, tokenizer: Any, options: ChatOptions, longest_text: int
) -> list[int]:
    """The token ids of a conversation. Raises `InvalidRequestError`."""
    length = sum(len(text) for text in _texts(body.messages))
    if length > longest_text:
        raise InvalidRequestError(
            f"the messages have {length} characters, and of no text do more than {longest_text} "
            "fit into the model: shorten them"
        )
    messages = [
        {key: value for key, value in message.items() if value is not None}
        for message in body.messages
    ]
    return render_chat(messages, tokenizer, options)


def _texts(value: Any) -> list[str]:
    """All texts within, at any depth."""
    todo, texts = [value], []
    while todo:
        one = todo.pop()
        if isinstance(one, str):
            texts.append(one)
        elif isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, list):
            todo += one
    return texts


@dataclass(slots=True)
class _Writer:
    """Writes what a client gets of what the engine gives."""

    body: ChatCompletionRequest
    _begun: set[int] = field(default_factory=set)
    """Choices of which something was sent."""

    def whole(self, call: Call, outputs: Sequence[RequestOutput]) -> ChatCompletionResponse:
        """The answer of one piece."""
        (output,) = outputs
        tally = Tally()
        tally.add(output)
        choices = []
        for one in output.outputs:
            message = ChatMessage(role="assistant", content=one.text)
            choices.append(ChatChoice(message=message, **self._rest(one)))
        return ChatCompletionResponse(
            id=f"chatcmpl-{call.name}",
            object="chat.completion",
            created=call.created,
            model=call.model,
            choices=choices,
            usage=tally.usage(),
            **self._of_prompt(output),
        )

    async def chunks(self, call: Call) -> AsyncIterator[ChatCompletionChunk]:
        """The items of a stream."""
        tally, options = Tally(), self.body.stream_options
        async for item in call.stream:
            tally.add(item)
            rest = self._of_prompt(item) if not self._begun else {}
            if options is not None and options.continuous_usage_stats:
                rest["usage"] = tally.usage()
            for one in item.outputs:
                yield self._chunk(call, self._new(one), rest)
        if options is not None and options.include_usage:
            yield self._chunk(call, [], {"usage": tally.usage()})

    def _new(self, one: CompletionOutput) -> list[ChatChunkChoice]:
        delta = ChatMessage(content=one.text)
        if one.index not in self._begun:
            self._begun.add(one.index)
            delta.role = "assistant"
        return [ChatChunkChoice(delta=delta, **self._rest(one))]

    def _rest(self, one: CompletionOutput) -> dict[str, Any]:
        """What choices have beside the message, in one piece or streamed."""
        rest: dict[str, Any] = {
            "index": one.index,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
            "logprobs": None,
        }
        if self.body.logprobs:
            rest["logprobs"] = chat_logprobs(
                one.token_ids,
                one.logprobs or (),
                top=self.body.top_logprobs or 0,
                as_ids=self.body.return_tokens_as_token_ids,
            )
        if self.body.return_token_ids:
            rest["token_ids"] = one.token_ids
        return rest

    def _of_prompt(self, item: RequestOutput) -> dict[str, Any]:
        rest: dict[str, Any] = {}
        if self.body.return_token_ids:
            rest["prompt_token_ids"] = item.prompt_token_ids
        if self.body.prompt_logprobs is not None and item.prompt_logprobs is not None:
            rest["prompt_logprobs"] = prompt_logprobs(item.prompt_logprobs)
        return rest

    @staticmethod
    def _chunk(call: Call, choices: Sequence[ChatChunkChoice], rest: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=f"chatcmpl-{call.name}",
            object="chat.completion.chunk",
            created=call.created,
            model=call.model,
            choices=list(choices),
            **rest,
        )
