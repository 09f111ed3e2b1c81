"""POST /v1/completions: one or several prompts, as text or token ids."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response

from pyengine.outputs import CompletionOutput, RequestOutput
from pyengine.sampling_params import SamplingParams
from pyengine.server.context import Context
from pyengine.server.routes.generation import (
    Call,
    PromptDetails,
    UsageCounter,
    answer,
    begin,
    encode,
)
from pyengine.server.routes.ignored import check_ignored, ignored_fields
from pyengine.server.routes.json_route import JsonRoute
from pyengine.server.routes.params import check_count, sampling_params
from pyengine.server.schemas.fields import COMPLETIONS
from pyengine.server.schemas.logprobs import completion_logprobs, num_characters, prompt_logprobs
from pyengine.server.schemas.requests import CompletionRequest
from pyengine.server.schemas.responses import (
    CompletionChoice,
    CompletionResponse,
    ServerModel,
    TextItems,
    Usage,
)

router = APIRouter(route_class=JsonRoute)

_ALWAYS_SET = {"index", "text", "finish_reason", "stop_reason"}


@router.post(
    "/v1/completions",
    response_model=CompletionResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def completions(body: CompletionRequest, request: Request, context: Context) -> Response:
    """Complete prompts."""
    ignored = ignored_fields(COMPLETIONS, body)
    check_ignored(ignored, COMPLETIONS, context.settings)
    prompts = several(body.prompt)
    check_count(body.n, len(prompts))
    params = _params(body, context.engine.get_default_sampling_params())
    echoes: list[_Echo] = []

    def encoded(tokenizer: Any) -> list[list[int]]:
        special = body.add_special_tokens
        token_ids = [
            encode(context, tokenizer, prompt, special=special)
            if isinstance(prompt, str)
            else list(prompt)
            for prompt in prompts
        ]
        if body.echo:
            longest = context.max_model_len - 1
            truncated = [list(params.truncated(prompt, longest)) for prompt in token_ids]
            has_text = body.detokenize is not False
            echoes.extend([_Echo.of(tokenizer if has_text else None, ids) for ids in truncated])
        return token_ids

    start = begin(context, request, body, params, encoded, PromptDetails(ignored))
    return await answer(request, body, start, _Writer(body, params.n, echoes))


def several(prompt: Any) -> Sequence[str | Sequence[int]]:
    """A prompt or a list of prompts as a list."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    prompts: Sequence[str | Sequence[int]] = prompt
    return prompts


def _params(body: CompletionRequest, default: SamplingParams) -> SamplingParams:
    overrides: dict[str, Any] = {"logprobs": body.logprobs}
    if body.echo and body.logprobs is not None:
        overrides["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return sampling_params(body, default, overrides)


@dataclass(frozen=True, slots=True)
class _Echo:
    """An echoed prompt; `first` is the text of its first token."""

    text: str = ""
    first: str = ""

    @classmethod
    def of(cls, tokenizer: Any, token_ids: list[int]) -> "_Echo":
        if tokenizer is None:
            return cls()
        return cls(tokenizer.decode(token_ids), tokenizer.decode(token_ids[:1]))


@dataclass(slots=True)
class _Writer:
    """Converts outputs of the engine to completion responses."""

    body: CompletionRequest
    n: int
    echoes: Sequence[_Echo]
    """One per prompt; empty without `echo`."""
    _offsets: dict[int, int] = field(default_factory=dict)
    """Length of the text of the tokens so far, by the index of the choice."""
    _plain: dict[int, TextItems] = field(default_factory=dict)
    """Templates of further chunks of text, by index of the choice."""

    def whole(self, call: Call, outputs: Sequence[RequestOutput]) -> CompletionResponse:
        """The response without streaming."""
        tally = UsageCounter(call)
        for item in outputs:
            tally.add(item)
        choices = [self._choice(item, output) for item in outputs for output in item.outputs]
        return _response(call, choices, {"usage": tally.usage()})

    async def chunks(self, call: Call) -> AsyncIterator[str | ServerModel]:
        """The chunks of a stream: as JSON, or to be serialized."""
        tally, options = UsageCounter(call), self.body.stream_options
        async for item in call.stream:
            tally.add(item)
            usage: dict[str, Usage | None] = {}
            if options is not None and options.continuous_usage_stats:
                usage["usage"] = tally.usage()
            elif options is not None and options.include_usage:
                usage["usage"] = None  # as in OpenAI's API
            for output in item.outputs:
                plain = self._plain.get(item.index * self.n + output.index)
                if plain is not None and output.finish_reason is None:
                    if output.text:  # empty while a character is incomplete
                        yield plain.with_text(output.text)
                    continue
                choice = self._choice(item, output)
                has_more = choice.model_fields_set > _ALWAYS_SET
                if choice.text or choice.finish_reason or has_more:
                    yield _response(call, [choice], usage)
                if not has_more and not usage.get("usage"):
                    self._plain[choice.index] = _text_items(call, choice, usage)
        if options is not None and options.include_usage:
            yield _response(call, [], {"usage": tally.usage()})

    def _choice(self, item: RequestOutput, output: CompletionOutput) -> CompletionChoice:
        """A choice or its delta. The first delta contains the fields of the prompt."""
        index = item.index * self.n + output.index
        is_first = index not in self._offsets
        offset = self._offsets.setdefault(index, 0)
        echo = self.echoes[item.index] if self.echoes and is_first else _Echo()
        choice = CompletionChoice(
            index=index,
            text=echo.text + output.text,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )
        if self.body.logprobs is not None:
            prompt = item.prompt_token_ids if self.body.echo and is_first else []
            entries = [*(item.prompt_logprobs or ())] if prompt else []
            all_entries = [*entries, *(output.logprobs or ())]
            choice.logprobs = completion_logprobs(
                [*prompt, *output.token_ids],
                all_entries,
                offset=offset,
                first=echo.first,
                as_ids=self.body.return_tokens_as_token_ids,
            )
            if self.body.stream:
                pairs = zip([*prompt, *output.token_ids], all_entries, strict=True)
                lengths = [num_characters(entry[token]) for token, entry in pairs if entry]
                self._offsets[index] = offset + len(echo.first) + sum(lengths)
        if self.body.return_token_ids:
            choice.token_ids = output.token_ids
            if is_first:
                choice.prompt_token_ids = item.prompt_token_ids
        if self.body.prompt_logprobs is not None and is_first and item.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(item.prompt_logprobs)
        return choice


def _text_items(
    call: Call, choice: CompletionChoice, usage: Mapping[str, Usage | None]
) -> TextItems:
    """The template of further chunks of text."""

    def make(text: str) -> CompletionResponse:
        next = CompletionChoice(index=choice.index, text=text, finish_reason=None, stop_reason=None)
        return _response(call, [next], usage)

    return TextItems(make)


def _response(
    call: Call, choices: list[CompletionChoice], usage: Mapping[str, Usage | None]
) -> CompletionResponse:
    return CompletionResponse(
        id=f"cmpl-{call.name}",
        object="text_completion",
        created=call.created,
        model=call.model,
        choices=choices,
        **usage,
    )
