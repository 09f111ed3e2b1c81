"""POST /v1/chat/completions: conversations, rendered by the model's chat template."""

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from pyengine.outputs import CompletionOutput, RequestOutput
from pyengine.request.chat_messages import template_reads, unread_keys
from pyengine.request.chat_template import ChatOptions, render_chat, template_text
from pyengine.request.thinking import stripped_thinking
from pyengine.sampling_params import SamplingParams, StructuredOutputs
from pyengine.server.context import Context
from pyengine.server.errors import FieldError
from pyengine.server.routes.cache_control import cache_marks, pinned_prefixes
from pyengine.server.routes.generation import Call, PromptDetails, UsageCounter, answer, begin
from pyengine.server.routes.ignored import check_ignored, ignored_fields
from pyengine.server.routes.json_route import JsonRoute
from pyengine.server.routes.params import check_count, sampling_params
from pyengine.server.routes.template_variables import TemplateVariables
from pyengine.server.routes.tool_calls import OfferedTools, ParsedCall, offered_tools
from pyengine.server.schemas.fields import CHAT
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
    ServerModel,
    TextItems,
    ToolCall,
)
from pyengine.server.settings import ServerSettings

router = APIRouter(route_class=JsonRoute)

_WITHOUT_CACHE_CONTROL: Any = {"cache_control": True, "function": {"cache_control"}}


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletionResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def chat_completions(
    body: ChatCompletionRequest, request: Request, context: Context
) -> Response:
    """Answer a conversation."""
    template = template_text(context.engine.tokenizer, has_tools=bool(body.tools))
    variables = TemplateVariables.of(body, template, context.settings)
    details = PromptDetails([*ignored_fields(CHAT, body), *variables.ignored])
    check_count(body.n, 1)
    tools = offered_tools(body)
    params = _params(body, tools, context.engine.get_default_sampling_params())
    details.ignored.extend(ignored_of_tools(tools.shown))
    if tools.shown and not template_reads(template, "tools"):
        details.ignored.extend(tools.unread())
    check_ignored(details.ignored, CHAT, context.settings)
    options = chat_options(body, variables, context.settings, tools.shown, context.longest_text)

    marks = cache_marks(body.messages) if context.engine.max_pinned_blocks else None

    def encoded(tokenizer: Any) -> list[list[int]]:
        unread = unread_keys(body.messages, template)
        if marks:
            unread = [name for name in unread if not name.endswith(".cache_control")]
        details.ignored.extend(unread)
        check_ignored(details.ignored, CHAT, context.settings)
        token_ids = render(body.messages, tokenizer, options)
        if marks:
            ended = replace(options, add_generation_prompt=False, continue_final_message=False)
            rendered = partial(render, tokenizer=tokenizer, options=ended)
            details.pins.extend(pinned_prefixes(body.messages, marks, token_ids, rendered))
        details.thinking = stripped_thinking(tokenizer, options)
        return [token_ids]

    start = begin(context, request, body, params, encoded, details)
    return await answer(request, body, start, _Writer(body, tools))


def _params(
    body: ChatCompletionRequest, tools: OfferedTools, default: SamplingParams
) -> SamplingParams:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        message = "max_tokens and max_completion_tokens mean the same: send one of them"
        raise FieldError("max_completion_tokens", message)
    if body.top_logprobs is not None and not body.logprobs:
        raise FieldError("top_logprobs", "top_logprobs needs logprobs: true")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    overrides: dict[str, Any] = {
        "max_tokens": limit,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }
    if body.detokenize is False and tools.names:
        message = "detokenize: false returns no text, which tools need: leave it out"
        raise FieldError("detokenize", message)
    if tools.schema is not None:
        overrides["structured_outputs"] = StructuredOutputs(json=tools.schema)
    return sampling_params(body, default, overrides)


def ignored_of_tools(tools: Sequence[Tool]) -> list[str]:
    """The fields of tools without effect."""
    marked = any(tool.cache_control or tool.function.cache_control for tool in tools)
    return ["tools.cache_control"] if marked else []


def chat_options(
    body: ChatOptionFields,
    variables: TemplateVariables,
    settings: ServerSettings,
    tools: Sequence[Tool] | None,
    longest_text: int,
) -> ChatOptions:
    """Options of rendering the conversation as a prompt."""
    begins_turn = body.add_generation_prompt
    return ChatOptions(
        add_generation_prompt=not body.continue_final_message
        if begins_turn is None
        else begins_turn,
        continue_final_message=body.continue_final_message,
        tools=[tool.model_dump(exclude_none=True, exclude=_WITHOUT_CACHE_CONTROL) for tool in tools]
        if tools
        else None,
        variables=variables.values,
        longest=longest_text,
        seconds=settings.template_timeout,
    )


def render(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, options: ChatOptions
) -> list[int]:
    """The token ids of a conversation. Raises `InvalidRequestError`."""
    # The openai client sends messages back with nulls, lm-eval adds a type to each.
    plain = [
        {
            key: value
            for key, value in message.items()
            if value is not None and not (key == "type" and value in ("text", "message"))
        }
        for message in messages
    ]
    return render_chat(plain, tokenizer, options)


class _Answer:
    """State of one answer of a chat."""

    def __init__(self, body: ChatCompletionRequest, tools: OfferedTools) -> None:
        self._parser = tools.parser()
        self.is_function_call = tools.are_functions
        is_single = body.parallel_tool_calls is False or tools.are_functions
        self._max_calls = 1 if is_single else None
        self._calls: list[ToolCall] = []
        self.is_begun = False
        self.plain: TextItems | None = None
        """Template of the following chunks if they contain text only."""

    def new(self, output: CompletionOutput) -> tuple[str, list[ToolCall]]:
        """The content and the tool calls that are complete with this output."""
        if self._parser is None:
            return output.text, []
        parts = self._parser.feed(output.text)
        if output.is_finished:
            parts += self._parser.end()
        before = len(self._calls)
        for part in parts:
            if isinstance(part, ParsedCall) and len(self._calls) != self._max_calls:
                self._calls.append(_call(len(self._calls), part))
        return "".join([part for part in parts if isinstance(part, str)]), self._calls[before:]

    def finish_reason(self, output: CompletionOutput) -> FinishReason | None:
        """The finish reason of a finished answer, else None."""
        if output.finish_reason != "stop" or not self._calls:
            return output.finish_reason
        return "function_call" if self.is_function_call else "tool_calls"

    def add_calls(self, message: ChatMessage, calls: list[ToolCall]) -> None:
        """Add calls to a message, or to a delta of it, in the form of the request."""
        if calls and self.is_function_call:
            message.function_call = calls[0].function
        elif calls:
            message.tool_calls = calls


def _call(index: int, call: ParsedCall) -> ToolCall:
    return ToolCall(
        index=index,
        id=f"call_{uuid4().hex}",
        type="function",
        function=CalledFunction(name=call.name, arguments=call.arguments),
    )


class _Writer:
    """Converts outputs of the engine to chat responses."""

    def __init__(self, body: ChatCompletionRequest, tools: OfferedTools) -> None:
        self._body = body
        self._answers: defaultdict[int, _Answer] = defaultdict(lambda: _Answer(body, tools))

    def whole(self, call: Call, outputs: Sequence[RequestOutput]) -> ChatCompletionResponse:
        """The response without streaming."""
        (output,) = outputs
        tally = UsageCounter(call)
        tally.add(output)
        choices = []
        for completion in output.outputs:
            answer = self._answers[completion.index]
            content, calls = answer.new(completion)
            message = ChatMessage(role="assistant", content=content or (None if calls else ""))
            answer.add_calls(message, calls)
            choices.append(ChatChoice(message=message, **self._rest(completion)))
        return ChatCompletionResponse(
            id=f"chatcmpl-{call.name}",
            object="chat.completion",
            created=call.created,
            model=call.model,
            choices=choices,
            usage=tally.usage(),
            **self._of_prompt(output),
        )

    async def chunks(self, call: Call) -> AsyncIterator[str | ServerModel]:
        """The chunks of a stream: as JSON, or to be serialized."""
        tally, options = UsageCounter(call), self._body.stream_options
        has_usage = options is not None and options.continuous_usage_stats
        async for item in call.stream:
            tally.add(item)
            rest = {} if self._answers else self._of_prompt(item)
            rest |= {"usage": tally.usage()} if has_usage else self._no_usage
            for output in item.outputs:
                answer = self._answers[output.index]
                content, calls = answer.new(output)
                if answer.plain is not None and not calls and not output.is_finished:
                    if content:
                        yield answer.plain.with_text(content)
                    continue
                choice = self._choice(answer, output, content, calls)
                if choice is not None:
                    yield self._chunk(call, [choice], rest)
                if not (has_usage or self._shows_tokens):
                    answer.plain = self._text_items(call, output)
        if options is not None and options.include_usage:
            yield self._chunk(call, [], {"usage": tally.usage()})

    @property
    def _no_usage(self) -> dict[str, Any]:
        """The usage of a chunk before the last one: null if the last one has it."""
        options = self._body.stream_options
        return {"usage": None} if options is not None and options.include_usage else {}

    @property
    def _shows_tokens(self) -> bool:
        return bool(self._body.logprobs or self._body.return_token_ids)

    def _choice(
        self, answer: _Answer, output: CompletionOutput, content: str, calls: list[ToolCall]
    ) -> ChatChunkChoice | None:
        """The delta of an answer; None if it is empty."""
        delta = ChatMessage()
        if not answer.is_begun:
            delta.role, delta.content = "assistant", ""
        if content:
            delta.content = content
        answer.add_calls(delta, calls)
        answer.is_begun = True
        if not (delta.model_fields_set or self._shows_tokens or output.is_finished):
            return None
        return ChatChunkChoice(delta=delta, **self._rest(output))

    def _text_items(self, call: Call, output: CompletionOutput) -> TextItems:
        """The template of further chunks of text."""
        rest = {**self._rest(output), "finish_reason": None, "stop_reason": None}
        return TextItems(
            lambda text: self._chunk(
                call, [ChatChunkChoice(delta=ChatMessage(content=text), **rest)], self._no_usage
            )
        )

    def _rest(self, output: CompletionOutput) -> dict[str, Any]:
        """The fields of a choice other than its message."""
        rest: dict[str, Any] = {
            "index": output.index,
            "finish_reason": self._answers[output.index].finish_reason(output),
            "stop_reason": output.stop_reason,
            "logprobs": None,
        }
        if self._body.logprobs:
            rest["logprobs"] = chat_logprobs(
                output.token_ids,
                output.logprobs or (),
                top=self._body.top_logprobs or 0,
                as_ids=self._body.return_tokens_as_token_ids,
            )
        if self._body.return_token_ids:
            rest["token_ids"] = output.token_ids
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
