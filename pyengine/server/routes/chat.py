"""POST /v1/chat/completions: conversations by the model's chat template, and its answers."""

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from pyengine.engine.chat_template import ChatOptions, render_chat, unread_keys
from pyengine.errors import ContextLengthError
from pyengine.outputs import CompletionOutput, RequestOutput
from pyengine.sampling_params import SamplingParams, StructuredOutputs
from pyengine.server.context import Context
from pyengine.server.errors import ApiError
from pyengine.server.routes.generation import (
    Call,
    Tally,
    answer,
    begin,
    check_count,
    sampling_params,
)
from pyengine.server.routes.json_route import JsonRoute
from pyengine.server.routes.template_variables import TemplateVariables
from pyengine.server.routes.tool_calls import Offered, ParsedCall, offered
from pyengine.server.schemas.fields import CHAT
from pyengine.server.schemas.ignored import check_ignored, ignored_fields
from pyengine.server.schemas.logprobs import chat_logprobs, prompt_logprobs
from pyengine.server.schemas.requests import ChatCompletionRequest, ChatOptionFields, Tool
from pyengine.server.schemas.responses import (
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatMessage,
    FinishReason,
    TextItems,
    ToolCall,
)
from pyengine.server.settings import ServerSettings

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletionResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def chat_completions(
    body: ChatCompletionRequest, request: Request, context: Context
) -> Response:
    """Answer a conversation."""
    template = str(getattr(context.engine.tokenizer, "chat_template", None) or "")
    variables = TemplateVariables.of(body, template, context.settings)
    ignored = [*ignored_fields(CHAT, body), *variables.ignored]
    check_ignored(ignored, CHAT, context.settings)
    check_count(body.n, 1)
    tools = offered(body)
    params = _params(body, tools, context.engine.get_default_sampling_params())
    options = chat_options(body, variables, context.settings, body.tools if tools.names else None)

    def encoded(tokenizer: Any) -> list[list[int]]:
        ignored.extend(unread_keys(body.messages, template))
        check_ignored(ignored, CHAT, context.settings)
        return [render(body.messages, tokenizer, options, context.longest_text)]

    start = begin(context, request, body, params, encoded, ignored)
    return await answer(request, body, start, _Writer(body, tools))


def _params(body: ChatCompletionRequest, tools: Offered, default: SamplingParams) -> SamplingParams:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(
            400,
            "max_tokens and max_completion_tokens mean the same: send one of them",
            param="max_completion_tokens",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    own: dict[str, Any] = {
        "max_tokens": most,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }
    if body.detokenize is False and tools.names:
        raise ApiError(
            400,
            "detokenize: false gives no text, and calls of tools are found in it: leave it out",
            param="detokenize",
        )
    if tools.schema is not None:
        own["structured_outputs"] = StructuredOutputs(json=tools.schema)
    return sampling_params(body, default, own)


def chat_options(
    body: ChatOptionFields,
    variables: TemplateVariables,
    settings: ServerSettings,
    tools: Sequence[Tool] | None,
) -> ChatOptions:
    """How the conversation becomes a prompt."""
    begins_turn = body.add_generation_prompt
    return ChatOptions(
        add_generation_prompt=not body.continue_final_message
        if begins_turn is None
        else begins_turn,
        continue_final_message=body.continue_final_message,
        tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
        variables=variables.values,
        seconds=settings.template_timeout,
    )


def render(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, options: ChatOptions, longest_text: int
) -> list[int]:
    """The token ids of a conversation. Raises `InvalidRequestError`."""
    length = sum(len(text) for text in _texts(messages))
    if length > longest_text:
        raise ContextLengthError(
            f"the messages have {length} characters, and of no text do more than {longest_text} "
            "fit into the model's maximum context length: shorten them"
        )
    # The openai client sends its own messages back with nulls, lm-eval names the type of them all.
    plain = [
        {
            key: value
            for key, value in message.items()
            if value is not None and not (key == "type" and value in ("text", "message"))
        }
        for message in messages
    ]
    return render_chat(plain, tokenizer, options)


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


class _Answer:
    """One answer as far as it was written."""

    def __init__(self, body: ChatCompletionRequest, tools: Offered) -> None:
        self._parser = tools.parser()
        self._most = 1 if body.parallel_tool_calls is False else None
        self._calls: list[ToolCall] = []
        self.is_begun = False
        self.plain: TextItems | None = None
        """How it goes on with text alone, if items need no more."""

    def new(self, one: CompletionOutput) -> tuple[str, list[ToolCall]]:
        """The content and the calls that are certain now that this has come."""
        if self._parser is None:
            return one.text, []
        parts = self._parser.feed(one.text)
        if one.is_finished:
            parts += self._parser.end()
        before = len(self._calls)
        for part in parts:
            if isinstance(part, ParsedCall) and len(self._calls) != self._most:
                self._calls.append(_call(len(self._calls), part))
        return "".join([one for one in parts if isinstance(one, str)]), self._calls[before:]

    def finish_reason(self, one: CompletionOutput) -> FinishReason | None:
        """Why it has ended, if it has."""
        is_for_calls = one.finish_reason == "stop" and self._calls
        return "tool_calls" if is_for_calls else one.finish_reason


def _call(index: int, call: ParsedCall) -> ToolCall:
    return ToolCall(
        index=index,
        id=f"call_{uuid4().hex}",
        type="function",
        function=CalledFunction(name=call.name, arguments=call.arguments),
    )


class _Writer:
    """Writes what a client gets of what the engine gives."""

    def __init__(self, body: ChatCompletionRequest, tools: Offered) -> None:
        self._body = body
        self._answers: defaultdict[int, _Answer] = defaultdict(lambda: _Answer(body, tools))

    def whole(self, call: Call, outputs: Sequence[RequestOutput]) -> ChatCompletionResponse:
        """The answer of one piece."""
        (output,) = outputs
        tally = Tally(call)
        tally.add(output)
        choices = []
        for one in output.outputs:
            content, calls = self._answers[one.index].new(one)
            message = ChatMessage(role="assistant", content=content or (None if calls else ""))
            if calls:
                message.tool_calls = calls
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

    async def chunks(self, call: Call) -> AsyncIterator[str]:
        """The items of a stream."""
        tally, options = Tally(call), self._body.stream_options
        has_usage = options is not None and options.continuous_usage_stats
        async for item in call.stream:
            tally.add(item)
            rest = {} if self._answers else self._of_prompt(item)
            if has_usage:
                rest["usage"] = tally.usage()
            for one in item.outputs:
                answer = self._answers[one.index]
                content, calls = answer.new(one)
                if answer.plain is not None and not calls and not one.is_finished:
                    if content:
                        yield answer.plain.with_text(content)
                    continue
                choice = self._choice(answer, one, content, calls)
                if choice is not None:
                    yield self._chunk(call, [choice], rest).to_json()
                if not (has_usage or self._shows_tokens):
                    answer.plain = self._text_items(call, one)
        if options is not None and options.include_usage:
            yield self._chunk(call, [], {"usage": tally.usage()}).to_json()

    @property
    def _shows_tokens(self) -> bool:
        return bool(self._body.logprobs or self._body.return_token_ids)

    def _choice(
        self, answer: _Answer, one: CompletionOutput, content: str, calls: list[ToolCall]
    ) -> ChatChunkChoice | None:
        """What is new of an answer; None where that is nothing a client could tell."""
        delta = ChatMessage()
        if not answer.is_begun:
            delta.role, delta.content = "assistant", ""
        if content:
            delta.content = content
        if calls:
            delta.tool_calls = calls
        answer.is_begun = True
        if not (delta.model_fields_set or self._shows_tokens or one.is_finished):
            return None
        return ChatChunkChoice(delta=delta, **self._rest(one))

    def _text_items(self, call: Call, one: CompletionOutput) -> TextItems:
        """How an answer that has not ended goes on where it is text alone."""
        rest = {**self._rest(one), "finish_reason": None, "stop_reason": None}
        return TextItems(
            lambda text: self._chunk(
                call, [ChatChunkChoice(delta=ChatMessage(content=text), **rest)], {}
            )
        )

    def _rest(self, one: CompletionOutput) -> dict[str, Any]:
        """What choices have beside the message, in one piece or streamed."""
        rest: dict[str, Any] = {
            "index": one.index,
            "finish_reason": self._answers[one.index].finish_reason(one),
            "stop_reason": one.stop_reason,
            "logprobs": None,
        }
        if self._body.logprobs:
            rest["logprobs"] = chat_logprobs(
                one.token_ids,
                one.logprobs or (),
                top=self._body.top_logprobs or 0,
                as_ids=self._body.return_tokens_as_token_ids,
            )
        if self._body.return_token_ids:
            rest["token_ids"] = one.token_ids
        return rest

    def _of_prompt(self, item: RequestOutput) -> dict[str, Any]:
        rest: dict[str, Any] = {}
        if self._body.return_token_ids:
            rest["prompt_token_ids"] = item.prompt_token_ids
        if self._body.prompt_logprobs is not None and item.prompt_logprobs is not None:
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
