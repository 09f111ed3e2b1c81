"""What clients get: OpenAI's shapes, with vLLM's additions."""

from collections.abc import Callable
from typing import Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict
from pydantic_core import to_json


class ServerModel(BaseModel):
    """Of what clients get. What was not set is left out."""

    model_config = ConfigDict(extra="forbid")

    def to_json(self) -> str:
        """The fields that were set."""
        return self.model_dump_json(exclude_unset=True)


class TextItems:
    """Items of a stream, as JSON, that differ in one text alone: the rest is written once.

    A model for each token would be half of what an event loop has to do for it.
    """

    def __init__(self, make: Callable[[str], ServerModel]) -> None:
        """`make` gives the item with a text."""
        mark = uuid4().hex  # in nothing that a client can have sent
        self._head, self._tail = make(mark).to_json().split(f'"{mark}"')

    def with_text(self, text: str) -> str:
        """The item with this text."""
        return f"{self._head}{to_json(text).decode()}{self._tail}"


class ErrorInfo(ServerModel):
    """What went wrong: a sentence, and for programs its type, the field and a code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ServerModel):
    """Every answer that is none."""

    error: ErrorInfo


class PromptTokensDetails(ServerModel):
    """Of the prompts' tokens."""

    cached_tokens: int


class Usage(ServerModel):
    """Tokens of the prompts and of all answers; which of the former came from the cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class LogprobInfo(ServerModel):
    """A token of a prompt, or one that might have been there, and its log-probability."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[int, LogprobInfo] | None]
FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class CompletionLogprobs(ServerModel):
    """Log-probabilities of completions: a list each for tokens, offsets, values, alternatives."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(ServerModel):
    """One completion of one prompt, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(ServerModel):
    """The answer of POST /v1/completions, and each item of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(ServerModel):
    """A token that might have been there."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of an answer, and what else might have been there."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ServerModel):
    """Log-probabilities of an answer's tokens."""

    content: list[TokenLogprob]


class CalledFunction(ServerModel):
    """The function that the model calls; `arguments` are JSON, or what is new of it."""

    name: str | None = None
    arguments: str


class ToolCall(ServerModel):
    """A call of a tool, or what is new of it."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(ServerModel):
    """An answer, or what is new of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(ServerModel):
    """One answer to a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(ServerModel):
    """The answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatChunkChoice(ServerModel):
    """What is new of one answer."""

    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(ServerModel):
    """An item of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ModelCard(ServerModel):
    """A model that is served; `root` is where it was loaded from."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(ServerModel):
    """The answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]
