"""Response bodies: OpenAI's formats with vLLM's additions."""

from collections.abc import Callable
from typing import Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, SkipValidation
from pydantic_core import to_json

from pyengine.outputs import MissReason


class ServerModel(BaseModel):
    """Base of response models. Fields that were not set are omitted."""

    model_config = ConfigDict(extra="forbid")

    def to_json(self) -> str:
        """The fields that were set, as JSON."""
        return self.model_dump_json(exclude_unset=True)


class TextItems:
    """Chunks of a stream that differ in one text only: a template, serialized once.

    A pydantic model per token would double the work of the event loop.
    """

    def __init__(self, make: Callable[[str], ServerModel]) -> None:
        """`make` returns the chunk with a given text."""
        mark = uuid4().hex  # unguessable, so not part of the rest of the chunk
        self._head, self._tail = make(mark).to_json().split(f'"{mark}"')

    def with_text(self, text: str) -> str:
        """The chunk with this text."""
        return f"{self._head}{to_json(text).decode()}{self._tail}"


class ErrorInfo(ServerModel):
    """An error: a message, and for programs its type, field and code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ServerModel):
    """The body of every error response."""

    error: ErrorInfo


class PromptCache(ServerModel):
    """The cached tokens of a prompt by source, and why others were computed.

    See `CacheExplanation`. Counts are in whole blocks without `--exact-cached-tokens`.
    """

    pool_tokens: int
    in_flight_tokens: int
    copied_tokens: int
    restored_tokens: int
    position: int | None
    reason: MissReason | None
    diverged_at: int | None
    evicted_by: str | None
    evicted_since: int | None
    cached_to: int | None
    hint: str | None


class RequestCache(ServerModel):
    """The response of GET /v1/requests/{id}/cache: an explanation for each prompt of a request.

    It is null for a prompt that has no output yet.
    """

    id: str
    prompts: list[PromptCache | None]


class PromptTokensDetails(ServerModel):
    """Details of the prompt tokens."""

    cached_tokens: int
    restored_tokens: int | None = None
    """Of the cached tokens, those restored from the store; absent if none was."""
    cache: list[PromptCache | None] | None = None
    """For each prompt, with `explain_cache`."""
    pin_refused: str | None = None
    """Why a prefix with `cache_control` is not pinned; absent if none was refused."""


class Usage(ServerModel):
    """Token counts of the prompts and of all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class LogprobInfo(ServerModel):
    """A token of a prompt or an alternative to it, and its log-probability."""

    logprob: float
    rank: int
    decoded_token: str | None
    bytes: list[int] | None = Field(default=None, exclude_if=lambda value: value is None)
    """For a part of a character, whose text is U+FFFD; else left out."""


# Long lists are not validated: they may be `SlicedList`.
PromptLogprobs = SkipValidation[list[dict[int, LogprobInfo] | None]]
FinishReason = Literal["stop", "length", "tool_calls", "function_call", "abort", "error"]


class CompletionLogprobs(ServerModel):
    """Log-probabilities of completions, as parallel lists."""

    text_offset: SkipValidation[list[int]]
    token_logprobs: SkipValidation[list[float | None]]
    tokens: SkipValidation[list[str]]
    top_logprobs: SkipValidation[list[dict[str, float] | None]]


class CompletionChoice(ServerModel):
    """One completion of one prompt, or a delta of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(ServerModel):
    """The response of POST /v1/completions, and each chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(ServerModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of an answer, and the alternatives to it."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ServerModel):
    """Log-probabilities of an answer's tokens."""

    content: SkipValidation[list[TokenLogprob]]


class CalledFunction(ServerModel):
    """A called function; `arguments` is JSON, or a delta of it."""

    name: str | None = None
    arguments: str


class ToolCall(ServerModel):
    """A tool call, or a delta of it."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(ServerModel):
    """A message of the assistant, or a delta of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: CalledFunction | None = None
    """The call, if the request has `functions`."""


class ChatChoice(ServerModel):
    """One answer to a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(ServerModel):
    """The response of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatChunkChoice(ServerModel):
    """The delta of one answer."""

    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(ServerModel):
    """A chunk of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ModelCard(ServerModel):
    """A served model; `root` is its source, `parent` the model that an adapter changes."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(ServerModel):
    """The response of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]
